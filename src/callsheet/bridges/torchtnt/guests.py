"""Runs torchtnt's callbacks in callsheet's loop (as guests). The callbacks are called in torchtnt's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchtnt.framework.callback import Callback as TorchTNTCallback
from torchtnt.framework.state import State
from torchtnt.utils.progress import Progress

from callsheet.bridges.guest_base import Facade, Guest, NotOnTheList
from callsheet.bridges.torchtnt.internals import GUEST, PACKAGE
from callsheet.bridges.torchtnt.run import PHASES, TorchTNTRun
from callsheet.core.callback import Phase
from callsheet.core.context import Context
from callsheet.core.wrappers import Handler

EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_train_start": ("on_train_start",),
    "on_epoch_start": ("on_train_epoch_start",),
    "on_train_step_start": ("on_train_get_next_batch_end", "on_train_step_start"),
    "on_train_step_end": ("on_train_step_end",),
    "on_epoch_end": ("on_train_epoch_end",),
    "on_train_end": ("on_train_end",),
    "on_eval_start": ("on_eval_start", "on_eval_epoch_start"),
    "on_eval_step_start": ("on_eval_get_next_batch_end", "on_eval_step_start"),
    "on_eval_step_end": ("on_eval_step_end",),
    "on_eval_end": ("on_eval_epoch_end", "on_eval_end"),
    "on_predict_start": ("on_predict_start", "on_predict_epoch_start"),
    "on_predict_step_start": ("on_predict_get_next_batch_end", "on_predict_step_start"),
    "on_predict_step_end": ("on_predict_step_end",),
    "on_predict_end": ("on_predict_epoch_end", "on_predict_end"),
    "on_exception": ("on_exception",),
}
"""For each event of callsheet, the events of torchtnt that are fired at this event.

A step of callsheet is one step of torchtnt. torchtnt has only one evaluated dataset, so each dataset of callsheet is an
evaluation of its own.
"""

_AGREEING_CALLBACKS = ("EarlyStopping", "TimeLimitInterrupter")
"""Callbacks of torchtnt that stop all ranks at the same step, because all ranks use rank 0's decision."""


def guest(
    foreign: Any,
    *,
    attributes: Mapping[str, str] | None = None,
    replicated: bool = False,
    name: str = "",
    phase: Phase = "measure",
    strict: bool = True,
) -> TorchTNTGuest:
    """Wrap a torchtnt callback as a callsheet callback.

    The callback receives torchtnt's `State`, whose `stop()` stops callsheet's loop, and an object that replaces the unit. This
    object has progress, module, optimizer and scheduler under AutoUnit's names. If the callback reads other attributes of the
    unit, such as the one that `EarlyStopping` monitors, map these attributes to metrics in `attributes`.

    Args:
        foreign: the callback, an instance.
        attributes: for each attribute of the unit, the metric that provides its latest value: `"loss"` for the step's loss, else a metric
            of a record or an evaluation, such as `"train/loss"` or `"validation/loss"`.
        replicated: whether all ranks call `state.stop()` at the same step, so that the stop acts at once. Otherwise, the stop
            acts when the ranks have agreed on it. Not needed for torchtnt's own callbacks.
        name: the name under which the callback's state is saved; by default that of its class.
        phase: the callback's phase.
        strict: has no effect, because callsheet fires every event of torchtnt.

    Returns:
        A callback for `Trainer(callbacks=[...])`, `attach` or a host of another framework.

    Raises:
        NotSupported: while training, the callback reads an attribute of the unit that is not available; see `attributes`.
    """
    kind = type(foreign)
    agrees = replicated or (kind.__module__.startswith("torchtnt.framework.callbacks.") and kind.__name__ in _AGREEING_CALLBACKS)
    return TorchTNTGuest(foreign, attributes=attributes or {}, replicated=agrees, name=name, phase=phase, strict=strict)


class TorchTNTGuest(Guest):
    """The callsheet callback that `guest` returns: it calls a torchtnt callback.

    The arguments are those of `guest`.
    """

    FRAMEWORK = "torchtnt"
    PACKAGE, INTERNALS = PACKAGE, GUEST
    BASE = TorchTNTCallback
    EVENTS = EVENTS
    COMMON = TorchTNTRun

    common: TorchTNTRun

    def __init__(
        self, foreign: Any, *, attributes: Mapping[str, str], replicated: bool, name: str, phase: Phase, strict: bool
    ) -> None:
        self._unit = GuestUnit(self, attributes)
        self._state = GuestState(self)
        self._replicated = replicated
        if attributes:
            # These handlers store values of callsheet's metrics, which torchtnt's callbacks read as attributes of the unit.
            self.OWN_HANDLERS = {  # type: ignore[misc]
                "on_train_step_end": "_take_loss",
                "on_log": "_take_record",
                "on_eval_end": "_take_losses",
                "on_eval_all_end": "_take_results",
            }
        super().__init__(foreign, name=name, phase=phase, strict=strict)

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """Return a handler that calls `method`, a method of the wrapped callback, with the state and the unit."""
        state, unit = self._state, self._unit
        if theirs == "on_exception":
            return lambda ctx: method(state, unit, ctx.exception)
        if theirs == "on_train_epoch_start":  # if a run resumes within an epoch, torchtnt does not report the epoch's start
            return lambda ctx: None if ctx.state.timestamp.batch_in_epoch else method(state, unit)
        return lambda ctx: method(state, unit)

    # --- the values of the unit's attributes ---

    def _take_loss(self, ctx: Context) -> None:
        if ctx.has("loss"):
            self._unit._take({"loss": ctx.loss})

    def _take_record(self, ctx: Context) -> None:
        self._unit._take(ctx.record.values)

    def _take_losses(self, ctx: Context) -> None:
        self._unit._take({f"{ctx.eval_name}/{name}": loss for name, loss in ctx.eval_losses.items()})

    def _take_results(self, ctx: Context) -> None:
        self._unit._take({f"{data}/{name}": value for data, found in ctx.eval_results.items() for name, value in found.items()})

    def state_dict(self) -> Mapping[str, Any]:
        """Return the progress of torchtnt's evaluation and prediction loops, and the wrapped callback's state, if any."""
        return {**self.common.state_dict(), "foreign": super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.common.load_state_dict(state)
        super().load_state_dict(state["foreign"])


class GuestUnit(Facade):
    """Takes the place of the unit when a torchtnt callback runs in callsheet's loop. It has only attributes that callbacks may use."""

    REPLACED_OBJECT = "torchtnt's unit"

    def __init__(self, guest: TorchTNTGuest, attributes: Mapping[str, str]) -> None:
        self._guest = guest
        self._attributes = attributes
        self._values: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and (metric := self._attributes.get(name)) is not None:
            if metric in self._values:
                return self._values[metric]
            raise NotOnTheList(f"{self.REPLACED_OBJECT}: {name!r} is mapped to the metric {metric!r}, which has no value yet")
        return super().__getattr__(name)

    def _take(self, values: Mapping[str, Any]) -> None:
        for name in self._attributes.values():
            if (value := values.get(name)) is not None:
                self._values[name] = value

    _ctx = property(lambda self: self._guest.common.ctx)
    train_progress = property(lambda self: self._guest.common.progress["train"])
    eval_progress = property(lambda self: self._guest.common.progress["eval"])
    predict_progress = property(lambda self: self._guest.common.progress["predict"])
    module = property(lambda self: self._ctx.model)
    optimizer = property(lambda self: self._ctx.optimizer)
    lr_scheduler = property(lambda self: self._ctx.scheduler)

    def tracked_modules(self) -> dict[str, Any]:
        """Return a dict with the model."""
        return {"module": self.module}

    def tracked_optimizers(self) -> dict[str, Any]:
        """Return a dict with the optimizer; empty before the optimizer is available."""
        return self._field("optimizer")

    def tracked_lr_schedulers(self) -> dict[str, Any]:
        """Return a dict with the scheduler; empty if there is none."""
        return self._field("scheduler", "lr_scheduler")

    def tracked_progress(self) -> dict[str, Progress]:
        """Return a dict with the progress of each loop of torchtnt: train, eval and predict."""
        return {f"{loop}_progress": progress for loop, progress in self._guest.common.progress.items()}

    def tracked_misc_statefuls(self) -> dict[str, Any]:
        """Return an empty dict, because this unit has only a model, an optimizer, a scheduler and progress."""
        return {}

    def app_state(self) -> dict[str, Any]:
        """Return everything that torchtnt's checkpointers write: model, optimizer, scheduler and progress."""
        return (
            self.tracked_modules() | self.tracked_optimizers() | self.tracked_lr_schedulers() | self.tracked_progress()
        )  # fmt: skip

    _construct_tracked_optimizers = tracked_optimizers  # torchtnt's checkpointers call the method by this name

    def _field(self, field: str, name: str = "") -> dict[str, Any]:
        part = getattr(self._ctx, field) if self._ctx.has(field) else None
        return {} if part is None else {name or field: part}


class GuestState(State):  # type: ignore[misc]  # mypy does not read torchtnt's types
    """The `State` that torchtnt's callbacks receive when they run in callsheet's loop.

    All guests see the same values. Each has its own object, so that a stop can name the guest that requested it.
    """

    def __init__(self, guest: TorchTNTGuest) -> None:
        self._guest = guest
        self._timer = None

    _entry_point = property(lambda self: self._guest.common.entry_point)
    _active_phase = property(lambda self: PHASES[self._guest.common.phase])
    _train_state = property(lambda self: self._guest.common.phases["train"])
    _eval_state = property(lambda self: self._guest.common.phases["eval"])
    _predict_state = property(lambda self: self._guest.common.phases["predict"])

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested."""
        run = self._guest.common
        return run.was_stopped or run.ctx.control.stop_requested is not None

    def stop(self) -> None:
        """Request that callsheet's loop stops after the current step."""
        run = self._guest.common
        run.was_stopped = True
        run.ctx.control.stop(f"{self._guest.name} called state.stop()", replicated=self._guest._replicated)
