"""What is given to a `guest` and is none of its framework: the message says what to do instead."""

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


def test_one_of_ours(bridge: str) -> None:
    assert "it is already a callback of callsheet, and needs no guest" in rejected(bridge, History())


def test_another_framework_s(bridge: str) -> None:
    if bridge != "lightning":
        assert "wrap it: callsheet.bridges.lightning.guest(...)" in rejected(bridge, lightning.pytorch.callbacks.Timer())
    if bridge != "ignite":
        assert "wrap it: callsheet.bridges.ignite.guest(...)" in rejected(bridge, ignite.handlers.Timer())


def test_several_at_once(bridge: str) -> None:
    if bridge != "megatron_bridge":  # which takes a list
        assert "give them one at a time" in rejected(bridge, [lightning.pytorch.callbacks.Timer()])


def test_nothing_of_the_kind(bridge: str) -> None:
    assert "'x' is not " in rejected(bridge, "x")
