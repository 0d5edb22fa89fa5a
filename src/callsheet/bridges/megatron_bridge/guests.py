"""Runs Megatron Bridge's callbacks in callsheet's loop (as guests)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from callsheet.bridges.guest_base import Guest, is_another_s, no_guest
from callsheet.bridges.megatron_bridge.internals import PACKAGE
from callsheet.bridges.megatron_bridge.names import VALID_EVENTS, CallbackContext, CallbackManager, normalize_callbacks
from callsheet.bridges.megatron_bridge.run import MegatronBridgeRun
from callsheet.bridges.megatron_bridge.state import GlobalState
from callsheet.checkpoint.plain import flatten
from callsheet.core.callback import Phase
from callsheet.core.context import Context
from callsheet.core.wrappers import Handler
from callsheet.errors import CheckpointError, NotSupported

MODULE = "megatron.bridge.training.callbacks"

GUEST_EVENTS: Mapping[str, tuple[str, ...]] = {
    **{event: (event,) for event in sorted(VALID_EVENTS - {"on_checkpoint_save"})},
    "on_checkpoint_published": ("on_checkpoint_save",),
}
"""For each event of callsheet, the event of Megatron Bridge that a guest fires at this event."""

NEVER = ("on_setup_start", "on_log", "on_checkpoint_load")
"""Events of later versions of Megatron Bridge, and of Megatron-LM's callbacks, that are never fired in callsheet's loop."""


def guest(
    foreign: Any, *, name: str = "", phase: Phase = "measure", strict: bool = True, config: Any = None
) -> MegatronBridgeGuest:
    """Wrap a callback of Megatron Bridge, a list of callbacks, or a `CallbackManager` in one callsheet callback.

    The callbacks are called in the given order. At each event, all of them receive the same new context. All guests of a run
    share one `user_state`, but a manager that the user passes keeps its own. Callbacks may read `context.state`, with its
    `train_state`, `timers` and `cfg`, where steps are counted as in Megatron. They end training as in Megatron: by setting
    `train_state.step` or `cfg.train.train_iters` so that `step` is at least `train_iters`.

    Args:
        foreign: the callback, a list of callbacks, or a manager.
        name: the name under which the state is saved; by default that of the callback's or the manager's class.
        phase: the phase of all these callbacks.
        strict: whether to raise an error if a callback listens to an event that callsheet never fires. False: a warning is logged.
        config: the `context.state.cfg` of the callbacks; it must have `train.train_iters`. None: an object with only
            this setting.

    Returns:
        A callback for `Trainer(callbacks=[...])`, `attach` or a host of another framework.

    Raises:
        NotSupported: a callback listens to an event that is never fired, see `strict`; or, while training, a callback reads an
            attribute that is not available.
    """
    state = GlobalState(config) if config is not None else None
    return MegatronBridgeGuest(foreign, name=name, phase=phase, strict=strict, state=state)


class MegatronBridgeGuest(Guest):
    """The callsheet callback that `callsheet.bridges.megatron_bridge.guest` returns: it calls callbacks of Megatron Bridge."""

    FRAMEWORK = "Megatron Bridge"
    PACKAGE = PACKAGE
    EVENTS = GUEST_EVENTS
    COMMON = MegatronBridgeRun
    NEVER_CALLED = NEVER

    common: MegatronBridgeRun

    def __init__(
        self, foreign: Any, *, name: str = "", phase: Phase = "measure", strict: bool = True, state: GlobalState | None = None
    ) -> None:
        self.manager = _manager(foreign)
        # Whether the manager is the user's own. If so, the user may register more callbacks during the run.
        self._is_live = self.manager is foreign
        several = foreign if isinstance(foreign, list) else [foreign]
        self._alone: Any = several[0] if len(several) == 1 and not self._is_live else None
        # Whether `drive`, which may stop training, is called when a callback sets `step` or `train_iters`.
        # If the user gave a state, the guest calls `drive` after each event instead.
        self._sees_writes = state is None
        super().__init__(foreign, name=name or type(self._alone or self.manager).__name__, phase=phase, strict=strict)
        if self._is_live or state is not None:
            self.common = MegatronBridgeRun(state, self.manager.user_state)

    @property
    def state(self) -> GlobalState:
        """The object that the wrapped callbacks receive as `context.state`."""
        return self.common.state

    def listens_to(self, theirs: str) -> bool:
        """Return whether any of the wrapped callbacks is registered for the event `theirs`.

        A manager counts as listening, because more callbacks may be registered later.
        """
        if theirs in NEVER:
            if self._is_live:
                return theirs in self.manager.events and self.manager.has_callbacks(theirs)
            several = self.foreign if isinstance(self.foreign, list) else [self.foreign]
            return any(_overrides(each, theirs) for each in several)
        return self._is_live or self.manager.has_callbacks(theirs)

    def handler(self, theirs: str, method: Any) -> Handler:
        """Return a handler that calls all wrapped callbacks that are registered for the event `theirs`."""
        function = getattr(self._alone, theirs) if self._alone is not None else partial(_fire, self.manager, theirs)

        def fire(ctx: Context) -> None:
            function(self.common.context)

        def fire_and_drive(ctx: Context) -> None:
            function(self.common.context)
            self.common.drive()

        return fire if self._sees_writes else fire_and_drive

    def state_dict(self) -> Mapping[str, Any]:
        """Return the number of evaluated samples, those entries of `user_state` that a checkpoint can store, and the callbacks' states.

        The states are those of the wrapped callbacks that have a `state_dict`.
        """
        saved: dict[str, Any] = {"consumed_valid_samples": self.common.steps["consumed_valid_samples"]}
        if user_state := {key: value for key, value in self.common.user_state.items() if _is_plain(key, value)}:
            saved["user_state"] = user_state
        if states := {place: each.state_dict() for place, each in self._stateful().items()}:
            saved["callbacks"] = states
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.common.steps["consumed_valid_samples"] = state["consumed_valid_samples"]
        self.common.user_state.update(state.get("user_state", {}))
        # Earlier callsheet versions saved a state only if the guest wrapped a single callback, under the key `callback`.
        states = state.get("callbacks", {f"0.{type(self._alone).__name__}": state["callback"]} if "callback" in state else {})
        for place, each in self._stateful().items():
            if place in states:
                each.load_state_dict(states[place])

    def _stateful(self) -> dict[str, Any]:
        """Return the wrapped callbacks that have a state, by index and class. A manager's callbacks are the owners of its handlers."""
        if self._is_live:
            owners = {
                id(owner): owner
                for event in sorted(self.manager.events)
                for function in self.manager.list_callbacks(event)
                if (owner := getattr(function, "__self__", None)) is not None and function.__name__ == event
            }
            several = list(owners.values())
        else:
            several = self.foreign if isinstance(self.foreign, list) else [self.foreign]
        return {
            f"{place}.{type(each).__name__}": each
            for place, each in enumerate(several)
            if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
        }


def _manager(foreign: Any) -> Any:
    """Return `foreign` if it is a `CallbackManager`, otherwise a new `CallbackManager` for the callbacks in `foreign`."""
    if hasattr(foreign, "callback_context"):
        raise NotSupported(
            "a manager of Megatron-LM cannot be a guest, because it calls its callbacks with a context of its own; pass a list of its "
            "callbacks"
        )
    if hasattr(foreign, "fire") and hasattr(foreign, "has_callbacks"):
        return foreign
    for each in foreign if isinstance(foreign, list) else [foreign]:
        if is_another_s(each) or not any(hasattr(each, event) for event in VALID_EVENTS):
            raise no_guest(each, "a callback of Megatron's, a list of them, or a manager")
    package = sys.modules.get(MODULE)
    first = foreign[0] if isinstance(foreign, list) and foreign else foreign
    if package is not None and isinstance(first, package.Callback):
        return package.normalize_callbacks(foreign)
    return normalize_callbacks(foreign) or CallbackManager()


def _fire(manager: Any, theirs: str, context: CallbackContext) -> None:
    if manager.has_callbacks(
        theirs
    ):  # check first, because `fire` raises an error for events that older releases of Megatron Bridge do not know
        manager.fire(theirs, context)


def _overrides(callback: Any, event: str) -> bool:
    """Return whether the callback overrides the method named `event` of the base class `Callback`."""
    bases = [kind for kind in type(callback).__mro__ if kind.__name__ == "Callback" and hasattr(kind, event)]
    return bool(bases) and all(getattr(type(callback), event) is not getattr(base, event) for base in bases)


def _is_plain(key: Any, value: Any) -> bool:
    if not isinstance(key, str):
        return False
    try:
        flatten(value)
    except CheckpointError:
        return False
    return True
