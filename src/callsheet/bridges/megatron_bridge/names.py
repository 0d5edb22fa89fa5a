"""A copy of Megatron Bridge's callback interface.

Code that is written for Megatron Bridge works with these classes, whether or not Megatron Bridge is installed.

The behavior is that of the original, even if it is surprising: a tuple passed to `add` registers nothing, a misspelled hook is
never called, and a callback that is registered while an event is fired is called for that event. If the original ignores such a
mistake, callsheet logs a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from callsheet.errors import did_you_mean, where

logger = logging.getLogger("callsheet")

VALID_EVENTS: frozenset[str] = frozenset(
    {
        *("on_data_init_start", "on_train_start", "on_train_step_start", "on_train_step_end", "on_train_end"),
        *("on_eval_start", "on_eval_step_start", "on_eval_step_end", "on_eval_end"),
        *("on_test_start", "on_test_step_start", "on_test_step_end", "on_test_end"),
        "on_checkpoint_save",
    }
)
"""The names of all events of Megatron Bridge."""


@dataclass
class CallbackContext:
    """The object that callbacks receive at an event. All callbacks receive the same object.

    Attributes:
        state: the global state, with `cfg`, `train_state` and `timers`.
        model: the model, as a list of chunks.
        user_state: a dict that the callbacks of one manager share.
        optimizer: the optimizer; None at events outside training.
        scheduler: the scheduler; None at events outside training, and at `on_checkpoint_save`.
        loss_dict: at `on_train_step_end`, the losses by name; otherwise None.
        grad_norm: at `on_train_step_end`, the norm of the gradients; otherwise None.
        skipped_iter: at `on_train_step_end`, whether the optimizer's step was skipped; otherwise None.
        total_loss_dict: at `on_eval_end` and `on_test_end`, the mean losses by name; otherwise None.
    """

    state: Any
    model: Any
    user_state: dict[Any, Any] = field(default_factory=dict)
    optimizer: Any = None
    scheduler: Any = None
    loss_dict: dict[str, Any] | None = None
    grad_norm: float | None = None
    skipped_iter: bool | None = None
    total_loss_dict: dict[str, Any] | None = None


class Callback:
    """The base class of callbacks: override the methods of the events that you need."""

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Called before any data is opened. The model and the optimizer exist, and the checkpoint was loaded."""

    def on_train_start(self, context: CallbackContext) -> None:
        """Called before the first step. The model is in training mode."""

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Called before a step, which consists of its microbatches and one step of the optimizer."""

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Called after a step. `state.train_state.step` does not include this step yet."""

    def on_train_end(self, context: CallbackContext) -> None:
        """Called after training. Validation and test may follow."""

    def on_eval_start(self, context: CallbackContext) -> None:
        """Called before a validation."""

    def on_eval_step_start(self, context: CallbackContext) -> None:
        """Called before a batch of a validation."""

    def on_eval_step_end(self, context: CallbackContext) -> None:
        """Called after a batch of a validation."""

    def on_eval_end(self, context: CallbackContext) -> None:
        """Called after a validation. The model is still in evaluation mode."""

    def on_test_start(self, context: CallbackContext) -> None:
        """Called before a test."""

    def on_test_step_start(self, context: CallbackContext) -> None:
        """Called before a batch of a test."""

    def on_test_step_end(self, context: CallbackContext) -> None:
        """Called after a batch of a test."""

    def on_test_end(self, context: CallbackContext) -> None:
        """Called after a test. The model is still in evaluation mode."""

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Called when a checkpoint was completely written. A checkpoint that was written in the background may be of an earlier step."""


Function = Callable[[CallbackContext], Any]


class CallbackManager:
    """Calls the registered callbacks and functions, in the order of their registration. They share `user_state`."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Function]] = {event: [] for event in VALID_EVENTS}
        self._user_state: dict[Any, Any] = {}

    @property
    def user_state(self) -> dict[Any, Any]:
        """A dict for the callbacks' own use. It lives as long as the manager, and is not saved in checkpoints."""
        return self._user_state

    @property
    def events(self) -> frozenset[str]:
        """The names of all events."""
        return VALID_EVENTS

    def add(self, callback: Callback | list[Callback]) -> None:
        """Register the methods that a callback overrides.

        Args:
            callback: one callback, or a list of callbacks. A tuple registers nothing, as in Megatron Bridge; a warning is logged.

        Raises:
            AttributeError: a callback is a class instead of an instance, or one of its hooks is not a method but, for example, a
                staticmethod or a function that was assigned to the instance.
        """
        for each in callback if isinstance(callback, list) else [callback]:
            found = False
            for event, functions in self._callbacks.items():
                method = getattr(each, event, None)
                if method is None:
                    continue
                found = True
                try:
                    function = method.__func__
                except AttributeError as error:
                    hint = "Pass an instance of it" if isinstance(each, type) else f"Make its {event} a method of its class"
                    raise AttributeError(f"{error}: {each!r} cannot be registered. {hint}") from None
                if function is not getattr(Callback, event):
                    functions.append(method)
            _warn_of_mistakes(each, found)

    def register(self, event_name: str, fn: Function) -> None:
        """Register a function, which is then called whenever the event is fired.

        Args:
            event_name: the name of the event.
            fn: called with the context of the event.

        Raises:
            ValueError: there is no such event.
        """
        self._get_functions(event_name).append(fn)

    def list_callbacks(self, event_name: str) -> list[Function]:
        """Return the functions that are called for an event, in order, as a new list.

        Args:
            event_name: the name of the event.

        Raises:
            ValueError: there is no such event.
        """
        return list(self._get_functions(event_name))

    def has_callbacks(self, event_name: str) -> bool:
        """Return whether any function is called for an event.

        Args:
            event_name: the name of the event. For an unknown event, the result is False.
        """
        return bool(self._callbacks.get(event_name))

    def fire(self, event_name: str, context: CallbackContext) -> None:
        """Call the functions that are registered for an event. If a function raises an error, the later functions are not called.

        Args:
            event_name: the name of the event.
            context: passed to each function.

        Raises:
            KeyError: there is no such event.
        """
        for function in self._callbacks[event_name]:
            function(context)

    def _get_functions(self, event: str) -> list[Function]:
        if event not in VALID_EVENTS:
            # The message begins like that of Megatron Bridge, because tests of Megatron Bridge's users compare the message.
            raise ValueError(f"Unknown event '{event}'. Valid events: {sorted(VALID_EVENTS)}{did_you_mean(event, VALID_EVENTS)}")
        return self._callbacks[event]


def normalize_callbacks(callbacks: list[Callback] | CallbackManager | None) -> CallbackManager | None:
    """Return a new `CallbackManager` for a list of callbacks. If `callbacks` is a manager or None, return it unchanged.

    Args:
        callbacks: a manager, a list of callbacks, or None.

    Raises:
        AttributeError: see `CallbackManager.add`.
    """
    if callbacks is None or isinstance(callbacks, CallbackManager):
        return callbacks
    manager = CallbackManager()
    manager.add(callbacks)
    return manager


def should_fire(callback_manager: CallbackManager | None, event_name: str) -> bool:
    """Return whether the manager has a function to call for an event.

    Args:
        callback_manager: the manager; None: no function is called.
        event_name: the name of the event.
    """
    return callback_manager is not None and callback_manager.has_callbacks(event_name)


def _warn_of_mistakes(callback: Any, has_a_hook: bool) -> None:
    """Warn if `add` registers nothing, or if a method's name is a misspelled event name. Megatron Bridge ignores both mistakes."""
    if not has_a_hook:
        logger.warning("add(%.80r) registers nothing: pass a callback, or a list of callbacks", callback)
        return
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in VALID_EVENTS and (meant := did_you_mean(name, VALID_EVENTS)):
            logger.warning("%s.%s (%s) is never called%s", type(callback).__name__, name, where(type(callback)), meant)
