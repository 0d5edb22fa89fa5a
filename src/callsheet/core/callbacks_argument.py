"""Converts the argument `callbacks` of a training loop (a manager, one or several callbacks, or None) to a `CallbackManager`."""

from __future__ import annotations

from collections.abc import Iterable

from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager


def manager_of(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None, loggers: Iterable[Callback] | None = None
) -> CallbackManager:
    """Return the argument `callbacks` of a loop as a manager (an empty manager for None), to which `loggers` are added.

    Raise the same errors as `CallbackManager.add`.
    """
    manager = callbacks if isinstance(callbacks, CallbackManager) else CallbackManager(callbacks if callbacks is not None else ())
    manager.add(loggers or ())
    return manager


def normalize_callbacks(callbacks: CallbackManager | Callback | Iterable[Callback] | None) -> CallbackManager | None:
    """Return the argument `callbacks` of a loop as a `CallbackManager`.

    Args:
        callbacks: a manager, one callback, an iterable of callbacks, or None.

    Returns:
        The same object if it is a manager, None for None, otherwise a new manager.

    Raises:
        NotACallbackError, UnknownEventError, RegistrationError: see `CallbackManager.add`.
    """
    return manager_of(callbacks) if callbacks is not None else None


def should_fire(manager: CallbackManager | None, event: str) -> bool:
    """Return whether an event has a handler. Firing an event without a handler has no effect.

    Args:
        manager: the manager; None: no event has a handler.
        event: the name of the event.

    Raises:
        UnknownEventError: no such event, and a manager is given.
    """
    return manager is not None and manager.has_callbacks(event)
