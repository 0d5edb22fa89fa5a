"""The states of callbacks: which callbacks keep one, and calls of `state_dict` and `load_state_dict`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from callsheet.core.background import inner
from callsheet.core.call_sheet import Registration
from callsheet.core.callback import Callback
from callsheet.errors import text_of

logger = logging.getLogger("callsheet")

T = TypeVar("T")


def keeps_state(callback: Callback) -> bool:
    """Return whether the callback's class has a `state_dict` of its own."""
    return type(inner(callback)).state_dict is not Callback.state_dict


def state_of(callback: Callback) -> dict[str, Any]:
    """Return the callback's state as a dict of its own."""
    return dict(callback.state_dict())


def is_inline(registration: Registration) -> bool:
    """Return whether the callback runs on the training thread."""
    return not isinstance(registration.thing, Callback) or registration.thing.lane == "inline"


def results_of(
    calls: Mapping[Registration, Callable[[], T]], failed: Callable[[Registration, Exception], None]
) -> dict[Registration, T]:
    """Return what the calls return, without those that failed.

    Args:
        calls: by callback; for a callback in a lane a function that waits for its result.
        failed: receives the error of a callback in a lane, or of an isolated one.

    Raises:
        Exception: what an inline callback that is not isolated raised.
    """
    results: dict[Registration, T] = {}
    for registration, call in calls.items():
        try:
            results[registration] = call()
        except Exception as error:
            if is_inline(registration) and getattr(registration.thing, "on_error", "") != "isolate":
                raise
            failed(registration, error)
    return results


def starts_without(registration: Registration, error: Exception) -> None:
    """Log that a callback starts without its saved state, and why."""
    reason = f"{type(error).__name__}: {text_of(error)}"
    logger.error(
        "Callback %s (%s) starts without its saved state: %s", registration.label, registration.source, reason, exc_info=error
    )
