"""A wrapped training function is called exactly once, whichever part of the wrapper fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from callsheet.exec.frameworks import _wrapper


def raise_before(observation: Any, train: Callable[..., Any], *args: Any) -> Any:
    raise ValueError("before")


def raise_after(observation: Any, train: Callable[..., Any], *args: Any) -> Any:
    train(*args)
    raise ValueError("after")


def raise_instead(observation: Any, train: Callable[..., Any], *args: Any) -> Any:
    try:
        return train(*args)
    finally:
        raise ValueError("instead")


@pytest.mark.parametrize("around", [raise_before, raise_after, raise_instead])
def test_an_error_of_the_wrapper_does_not_change_training(around: Any, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def train(steps: int) -> str:
        calls.append(steps)
        return "trained"

    observation: Any = None
    assert _wrapper(observation, train, around)(3) == "trained"
    assert calls == [3]
    assert caplog.text.count("the trainer cannot be observed") == 1


@pytest.mark.parametrize("around", [raise_after, raise_instead])
def test_an_error_of_training_is_raised_and_not_retried(around: Any) -> None:
    calls: list[int] = []

    def train(steps: int) -> str:
        calls.append(steps)
        raise ZeroDivisionError

    observation: Any = None
    with pytest.raises(ZeroDivisionError):
        _wrapper(observation, train, around)(3)
    assert calls == [3]
