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


def rejected(bridge: str, given: object) -> str:
    with pytest.raises(RegistrationError) as caught:
        importlib.import_module(f"callsheet.bridges.{bridge}").guest(given)
    return str(caught.value)


def test_a_class(bridge: str) -> None:
    assert "that is a class, give an instance: EarlyStopping(...)" in rejected(bridge, lightning.pytorch.callbacks.EarlyStopping)


def test_a_callback_of_callsheet(bridge: str) -> None:
    assert "it is already a callback of callsheet, and needs no guest" in rejected(bridge, History())


def test_a_callback_of_another_framework(bridge: str) -> None:
    if bridge != "lightning":
        assert "wrap it: callsheet.bridges.lightning.guest(...)" in rejected(bridge, lightning.pytorch.callbacks.Timer())
    if bridge != "ignite":
        assert "wrap it: callsheet.bridges.ignite.guest(...)" in rejected(bridge, ignite.handlers.Timer())


def test_a_list_of_callbacks(bridge: str) -> None:
    if bridge != "megatron_bridge":  # its `guest` accepts a list
        assert "give them one at a time" in rejected(bridge, [lightning.pytorch.callbacks.Timer()])


def test_an_object_that_is_no_callback(bridge: str) -> None:
    assert "'x' is not " in rejected(bridge, "x")
