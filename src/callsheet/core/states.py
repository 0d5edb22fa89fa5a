"""Saves and loads the states of callbacks through their methods `state_dict` and `load_state_dict`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from callsheet.core.background import inner
from callsheet.core.call_sheet import Registration
from callsheet.core.callback import Callback, label_of
from callsheet.errors import RegistrationError, text_of

if TYPE_CHECKING:
    from callsheet.lanes.lane_set import LaneSet

logger = logging.getLogger("callsheet")

T = TypeVar("T")


def keeps_state(callback: Callback) -> bool:
    """Return whether the callback has a state, which means that its class overrides `state_dict`."""
    return type(inner(callback)).state_dict is not Callback.state_dict


def state_of(callback: Callback, copied: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> dict[str, Any]:
    """Return a copy of the callback's state, made with the function `copied`."""
    return copied(dict(callback.state_dict()))


def states_of(
    registrations: Iterable[Registration], lanes: LaneSet | None, copied: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the states of the callbacks, and the reasons why states are missing, as two dicts by callback name.

    `copied` is called to copy the state of a callback that is isolated or has a lane. Errors of `copied` are logged like errors of
    the callback.

    Raises:
        RegistrationError: two callbacks with a state have the same name.
        Exception: what an inline callback that is not isolated raised.
    """
    missing: dict[str, str] = {}

    def record_missing_state(registration: Registration, error: Exception) -> None:
        missing[registration.label] = reason = f"{type(error).__name__}: {text_of(error)}"
        logger.error(
            "The state of callback %s (%s) is missing from this checkpoint: %s",
            registration.label,
            registration.source,
            reason,
            exc_info=error,
        )

    if lanes is not None:
        lanes.wait_for_states()
    stateful = {registration: callback for registration, callback in _callbacks(registrations).items() if keeps_state(callback)}
    reads = {
        registration: partial(state_of, callback, copied if _may_fail(registration) else dict)
        for registration, callback in stateful.items()
    }
    states: dict[str, dict[str, Any]] = {}
    for registration, state in results_of(_start_calls(reads, lanes), record_missing_state).items():
        if state:
            name = label_of(stateful[registration])
            if name in states:
                raise RegistrationError(
                    f"two callbacks keep their state under the name {name!r}; give one another: callback.name = '...'"
                )
            states[name] = state
    return states, missing


def load_states(
    registrations: Iterable[Registration],
    lanes: LaneSet | None,
    saved: Mapping[str, Mapping[str, Any]],
    missing: Mapping[str, str],
) -> None:
    """Load the saved state of every callback. Log which states could not be saved, and which belong to no callback.

    Raises:
        Exception: what an inline callback that is not isolated raised.
    """
    if lanes is not None:
        lanes.wait_for_states(is_loading=True)
    for label, reason in missing.items():
        logger.warning("The checkpoint has no state of callback %s, which starts without one: %s", label, reason)
    callbacks = _callbacks(registrations)
    loads = {
        registration: partial(callback.load_state_dict, saved[label_of(callback)])
        for registration, callback in callbacks.items()
        if label_of(callback) in saved
    }
    results_of(_start_calls(loads, lanes), starts_without)
    if unclaimed := sorted(saved.keys() - {label_of(callback) for callback in callbacks.values()}):
        logger.warning("the checkpoint holds the state of callbacks that are not here: %s", ", ".join(unclaimed))


def _callbacks(registrations: Iterable[Registration]) -> dict[Registration, Callback]:
    """Return the callback objects among the registrations; plain functions are left out."""
    return {registration: registration.thing for registration in registrations if isinstance(registration.thing, Callback)}


def _may_fail(registration: Registration) -> bool:
    """Return whether errors of the callback are logged instead of raised."""
    return not registration.is_inline or getattr(registration.thing, "on_error", "") == "isolate"


def _start_calls(calls: Mapping[Registration, Callable[[], T]], lanes: LaneSet | None) -> Mapping[Registration, Callable[[], T]]:
    """Return `calls`. Start the calls for callbacks in other threads, and replace each by a function that waits for its result."""
    return calls if lanes is None else lanes.state_calls(calls)


def results_of(
    calls: Mapping[Registration, Callable[[], T]], failed: Callable[[Registration, Exception], None]
) -> dict[Registration, T]:
    """Run the `calls`, one for each callback, and return their results by callback. Calls that failed are left out.

    Args:
        calls: the function to call for each callback; for one in a lane, a function that waits for its result.
        failed: called with the error of a callback that is isolated or has a lane.

    Raises:
        Exception: what an inline callback that is not isolated raised.
    """
    results: dict[Registration, T] = {}
    for registration, call in calls.items():
        try:
            results[registration] = call()
        except Exception as error:
            if not _may_fail(registration):
                raise
            failed(registration, error)
    return results


def starts_without(registration: Registration, error: Exception) -> None:
    """Log that a callback starts without its saved state, and why."""
    reason = f"{type(error).__name__}: {text_of(error)}"
    logger.error(
        "Callback %s (%s) starts without its saved state: %s", registration.label, registration.source, reason, exc_info=error
    )
