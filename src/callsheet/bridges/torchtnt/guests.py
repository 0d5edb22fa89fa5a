"""torchtnt's callbacks as guests: heard in torchtnt's order, with its state and a stand-in for its unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchtnt.framework.callback import Callback as TorchTNTCallback
from torchtnt.framework.callbacks import EarlyStopping, TimeLimitInterrupter
from torchtnt.framework.state import State
from torchtnt.utils.progress import Progress

from callsheet.bridges.guest_base import Facade, Guest, NotOnTheList
from callsheet.bridges.torchtnt.run import PHASES, TorchTNTRun
from callsheet.context import Context
from callsheet.sheet import Handler

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
"""Our event, and torchtnt's at it. torchtnt has a step for each batch, and knows only one evaluated dataset: each of ours is one."""


def guest(
    foreign: Any,
    *,
    attributes: Mapping[str, str] | None = None,
    replicated: bool = False,
    name: str = "",
    phase: str = "measure",
    strict: bool = True,
) -> TorchTNTGuest:
    """A torchtnt callback as one of ours.

    It is given torchtnt's `State`, whose `stop()` stops our loop, and for the unit its progress, module, optimizer and scheduler under
    AutoUnit's names. What it reads from the unit beside these, such as the attribute that `EarlyStopping` monitors, is named in
    `attributes`.

    Args:
        attributes: the name of a unit's attribute, and of the metric that stands for it: `"loss"` for the step's own, else one of a record
            or an evaluation, such as `"train/loss"` or `"validation/loss"`, as it was last told.

        replicated: all ranks call `state.stop()` alike, so that it acts at once; known of torchtnt's own callbacks. Else what one asks for
            is done when all know of it.

    Raises:
        NotSupported: when it asks the unit for anything else.
    """
    agrees = replicated or type(foreign) in (EarlyStopping, TimeLimitInterrupter)  # which ask the first rank
    return TorchTNTGuest(foreign, attributes=attributes or {}, replicated=agrees, name=name, phase=phase, strict=strict)


class TorchTNTGuest(Guest):
    """See `guest`."""

    FRAMEWORK = "torchtnt"
    BASE = TorchTNTCallback
    EVENTS = EVENTS
    COMMON = TorchTNTRun

    common: TorchTNTRun

    def __init__(
        self, foreign: Any, *, attributes: Mapping[str, str], replicated: bool, name: str, phase: str, strict: bool
    ) -> None:
        self._unit = GuestUnit(self, attributes)
        self._state = GuestState(self)
        self._replicated = replicated
        if attributes:  # it hears these for them alone
            self.OWN = {  # type: ignore[misc]
                "on_train_step_end": "_take_loss",
                "on_log": "_take_record",
                "on_eval_end": "_take_losses",
                "on_eval_all_end": "_take_results",
            }
        super().__init__(foreign, name=name, phase=phase, strict=strict)

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """torchtnt gives each callback its state and the unit."""
        state, unit = self._state, self._unit
        if theirs == "on_exception":
            return lambda ctx: method(state, unit, ctx.exception)
        if theirs == "on_train_epoch_start":  # not told of an epoch that a resumed run enters in its midst
            return lambda ctx: None if ctx.state.timestamp.batch_in_epoch else method(state, unit)
        return lambda ctx: method(state, unit)

    # --- what stands for the unit's attributes ---

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
        """What torchtnt saves: the progress of its loops; and the callback's own, if it has any."""
        return {**self.common.state_dict(), "foreign": super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self.common.load_state_dict(state)
        super().load_state_dict(state["foreign"])


class GuestUnit(Facade):
    """A unit of torchtnt's as far as callbacks may see it."""

    OF = "torchtnt's unit"

    def __init__(self, guest: TorchTNTGuest, attributes: Mapping[str, str]) -> None:
        self._guest = guest
        self._attributes = attributes
        self._told: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and (stands_for := self._attributes.get(name)) is not None:
            if stands_for in self._told:
                return self._told[stands_for]
            raise NotOnTheList(f"{self.OF}: {name!r} is to be {stands_for!r}, which has not been told")
        return super().__getattr__(name)

    def _take(self, values: Mapping[str, Any]) -> None:
        for name in self._attributes.values():
            if (value := values.get(name)) is not None:
                self._told[name] = value

    _ctx = property(lambda self: self._guest.common.ctx)
    train_progress = property(lambda self: self._guest.common.progress["train"])
    eval_progress = property(lambda self: self._guest.common.progress["eval"])
    predict_progress = property(lambda self: self._guest.common.progress["predict"])
    module = property(lambda self: self._ctx.model)
    optimizer = property(lambda self: self._ctx.optimizer)
    lr_scheduler = property(lambda self: self._ctx.scheduler)

    def tracked_modules(self) -> dict[str, Any]:
        """The model."""
        return {"module": self.module}

    def tracked_optimizers(self) -> dict[str, Any]:
        """The optimizer, while there is one."""
        return self._told_as("optimizer")

    def tracked_lr_schedulers(self) -> dict[str, Any]:
        """The scheduler, if there is one."""
        return self._told_as("scheduler", "lr_scheduler")

    def tracked_progress(self) -> dict[str, Progress]:
        """Of each loop."""
        return {f"{loop}_progress": progress for loop, progress in self._guest.common.progress.items()}

    def tracked_misc_statefuls(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def app_state(self) -> dict[str, Any]:
        """What torchtnt's checkpointers write."""
        return (
            self.tracked_modules() | self.tracked_optimizers() | self.tracked_lr_schedulers() | self.tracked_progress()
        )  # fmt: skip

    _construct_tracked_optimizers = tracked_optimizers  # its checkpointers ask for these by that name

    def _told_as(self, field: str, name: str = "") -> dict[str, Any]:
        part = getattr(self._ctx, field) if self._ctx.has(field) else None
        return {} if part is None else {name or field: part}


class GuestState(State):  # type: ignore[misc]  # torchtnt's types are not read
    """torchtnt's state of a run of ours, which is the same for all guests but for who it is that stops."""

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
        """Whether anybody has asked that training stop."""
        run = self._guest.common
        return run.was_stopped or run.ctx.control.stop_requested is not None

    def stop(self) -> None:
        """Stop our loop after the step in hand."""
        run = self._guest.common
        run.was_stopped = True
        run.ctx.control.stop(f"{self._guest.name} called state.stop()", replicated=self._guest._replicated)
