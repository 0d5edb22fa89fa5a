"""`guest` rejects objects that are not callbacks of its framework, and the message says what to do instead."""

import importlib

import pytest

pytest.importorskip("ignite")
pytest.importorskip("lightning")

import ignite.handlers
import lightning.pytorch.callbacks

from callsheet.callbacks import History
from callsheet.errors import RegistrationError

BRIDGES = [
    "accelerate", "automodel", "composer", "huggingface", "ignite", "instructlab", "keras", "lightning", "megatron_bridge", "torchtnt",
]  # fmt: skip


@pytest.fixture(params=BRIDGES)
def bridge(request: pytest.FixtureRequest) -> str:
    package = {
        "huggingface": "transformers",
        "megatron_bridge": "torch",
        "automodel": "torch",
        "instructlab": "torch",
        "composer": "torch",
    }
    pytest.importorskip(package.get(request.param, request.param))
    return str(request.param)


def rejection_message(bridge: str, given: object) -> str:
    with pytest.raises(RegistrationError) as caught:
        importlib.import_module(f"callsheet.bridges.{bridge}").guest(given)
    return str(caught.value)


def test_a_class_is_rejected_with_a_hint_to_give_an_instance(bridge: str) -> None:
    assert "that is a class, give an instance: EarlyStopping(...)" in rejection_message(
        bridge, lightning.pytorch.callbacks.EarlyStopping
    )


def test_a_callback_of_callsheet_is_rejected(bridge: str) -> None:
    assert "it is already a callback of callsheet, and needs no guest" in rejection_message(bridge, History())


def test_a_callback_of_another_framework_is_rejected_with_the_right_guest(bridge: str) -> None:
    if bridge != "lightning":
        assert "wrap it: callsheet.bridges.lightning.guest(...)" in rejection_message(bridge, lightning.pytorch.callbacks.Timer())
    if bridge != "ignite":
        assert "wrap it: callsheet.bridges.ignite.guest(...)" in rejection_message(bridge, ignite.handlers.Timer())


def test_a_list_of_callbacks_is_rejected(bridge: str) -> None:
    if bridge != "megatron_bridge":  # this `guest` accepts a list
        assert "give them one at a time" in rejection_message(bridge, [lightning.pytorch.callbacks.Timer()])


def test_an_object_that_is_not_a_callback_is_rejected(bridge: str) -> None:
    assert "'x' is not " in rejection_message(bridge, "x")
