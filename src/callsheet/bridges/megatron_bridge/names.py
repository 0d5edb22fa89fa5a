"""Megatron Bridge's callback interface, as that system has it: what is written against it works here, whether or not it is installed.

Behaviour is that of the original, also where it surprises: a tuple given to `add` registers nothing, a misspelt hook is never told, the
list of callbacks is alive while it is told. Where the original says nothing of such a mistake, a warning does here.
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
"""The names of all events."""


@dataclass
class CallbackContext:
    """What a callback is given; all callbacks of one event are given the same one.

    `state`, `model` (a list of chunks) and `user_state` are there at every event, `optimizer` and `scheduler` at the events of training
    (`on_checkpoint_save` has the optimizer alone), `loss_dict`, `grad_norm` and `skipped_iter` at `on_train_step_end`, `total_loss_dict`
    at `on_eval_end` and `on_test_end`. What is not there is None.
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
    """The base of callbacks that are classes: override what is to be heard."""

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Model, optimizer and checkpoint are ready; no data has been opened."""

    def on_train_start(self, context: CallbackContext) -> None:
        """The model is in training mode, and no step has been made."""

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Before a step: all its microbatches, and the optimizer's."""

    def on_train_step_end(self, context: CallbackContext) -> None:
        """After a step; `state.train_state.step` is still what it was before it."""

    def on_train_end(self, context: CallbackContext) -> None:
        """Training is over; validation and test may follow."""

    def on_eval_start(self, context: CallbackContext) -> None:
        """Before a validation."""

    def on_eval_step_start(self, context: CallbackContext) -> None:
        """Before a batch of a validation."""

    def on_eval_step_end(self, context: CallbackContext) -> None:
        """After a batch of a validation."""

    def on_eval_end(self, context: CallbackContext) -> None:
        """After a validation; the model is still in evaluation mode."""

    def on_test_start(self, context: CallbackContext) -> None:
        """Before a test."""

    def on_test_step_start(self, context: CallbackContext) -> None:
        """Before a batch of a test."""

    def on_test_step_end(self, context: CallbackContext) -> None:
        """After a batch of a test."""

    def on_test_end(self, context: CallbackContext) -> None:
        """After a test; the model is still in evaluation mode."""

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """A checkpoint is durable; one that was written in the background may be of an earlier step."""


Told = Callable[[CallbackContext], Any]


class CallbackManager:
    """Callbacks and functions, told in the order in which they were registered; `user_state` is shared between them."""

    def __init__(self) -> None:
        self._told: dict[str, list[Told]] = {event: [] for event in VALID_EVENTS}
        self._user_state: dict[Any, Any] = {}

    @property
    def user_state(self) -> dict[Any, Any]:
        """The callbacks' own; it lives as long as the manager, and is in no checkpoint."""
        return self._user_state

    @property
    def events(self) -> frozenset[str]:
        """The names of all events."""
        return VALID_EVENTS

    def add(self, callback: Callback | list[Callback]) -> None:
        """Register what a callback overrides, or each of a list.

        Raises:
            AttributeError: a class in the place of its instance, or a hook that is no method: a staticmethod, a function on the instance.
        """
        for each in callback if isinstance(callback, list) else [callback]:
            found = False
            for event, told in self._told.items():
                method = getattr(each, event, None)
                if method is None:
                    continue
                found = True
                try:
                    function = method.__func__
                except AttributeError as error:
                    hint = "Give an instance of it" if isinstance(each, type) else f"Make its {event} a method of its class"
                    raise AttributeError(f"{error}: {each!r} cannot be registered. {hint}") from None
                if function is not getattr(Callback, event):
                    told.append(method)
            _warn_of_mistakes(each, found)

    def register(self, event_name: str, fn: Told) -> None:
        """Have `fn` called with the context of an event. Raises ValueError where there is no such event."""
        self._checked(event_name).append(fn)

    def list_callbacks(self, event_name: str) -> list[Told]:
        """What is called at an event, in order; a new list. Raises ValueError where there is no such event."""
        return list(self._checked(event_name))

    def has_callbacks(self, event_name: str) -> bool:
        """Whether anything is called at an event; at one that does not exist nothing is."""
        return bool(self._told.get(event_name))

    def fire(self, event_name: str, context: CallbackContext) -> None:
        """Call what is registered; what is raised comes out, and the rest is not called. Raises KeyError where there is no such event."""
        for told in self._told[event_name]:
            told(context)

    def _checked(self, event: str) -> list[Told]:
        if event not in VALID_EVENTS:
            # The original's words come first: tests that were written for it match them.
            raise ValueError(f"Unknown event '{event}'. Valid events: {sorted(VALID_EVENTS)}{did_you_mean(event, VALID_EVENTS)}")
        return self._told[event]


def normalize_callbacks(callbacks: list[Callback] | CallbackManager | None) -> CallbackManager | None:
    """A manager as it is, a list in a new one, and None for None."""
    if callbacks is None or isinstance(callbacks, CallbackManager):
        return callbacks
    manager = CallbackManager()
    manager.add(callbacks)
    return manager


def should_fire(callback_manager: CallbackManager | None, event_name: str) -> bool:
    """Whether there is a manager, and something in it that is called at the event."""
    return callback_manager is not None and callback_manager.has_callbacks(event_name)


def _warn_of_mistakes(callback: Any, has_a_hook: bool) -> None:
    """Of what the original passes over without a word."""
    if not has_a_hook:
        logger.warning("add(%.80r) registers nothing: give it a callback, or a list of them", callback)
        return
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in VALID_EVENTS and (meant := did_you_mean(name, VALID_EVENTS)):
            logger.warning("%s.%s (%s) is never told%s", type(callback).__name__, name, where(type(callback)), meant)
