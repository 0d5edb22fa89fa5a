"""torchtnt's callbacks as guests: heard in torchtnt's order, with its state and a stand-in for its unit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from torchtnt.framework.callback import Callback as TorchTNTCallback
from torchtnt.framework.callbacks import EarlyStopping, TimeLimitInterrupter
from torchtnt.framework.state import ActivePhase, EntryPoint, PhaseState, State
from torchtnt.utils.progress import Progress

from callsheet.bridges.foreign import Facade, Guest, Handler, NotOnTheList
from callsheet.context import Context
from callsheet.errors import NotCarried
from callsheet.time import TimeUnit

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

_PHASES = {"train": ActivePhase.TRAIN, "eval": ActivePhase.EVALUATE, "predict": ActivePhase.PREDICT}
_MOST_TIMES = 5000  # that torchtnt keeps of a name


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
        NotCarried: when it asks the unit for anything else.
    """
    agrees = replicated or type(foreign) in (EarlyStopping, TimeLimitInterrupter)  # which ask the first rank
    return TorchTNTGuest(foreign, attributes=attributes or {}, replicated=agrees, name=name, phase=phase, strict=strict)


class TorchTNTGuest(Guest):
    """See `guest`."""

    FRAMEWORK = "torchtnt"
    BASE = TorchTNTCallback
    EVENTS = EVENTS
    OWN: ClassVar[Mapping[str, str]] = {
        "on_run_start": "_begins",
        "on_train_start": "_train_starts",
        "on_epoch_start": "_epoch_starts",
        "on_fetch_start": "_asks_for_a_batch",
        "on_train_step_start": "_has_its_batch",
        "on_train_step_end": "_step_ends",
        "on_epoch_end": "_epoch_ends",
        "on_train_end": "_train_ends",
        "on_eval_start": "_judging_starts",
        "on_eval_step_start": "_judges",
        "on_eval_step_end": "_judged",
        "on_eval_end": "_judging_ends",
        "on_predict_start": "_judging_starts",
        "on_predict_step_start": "_judges",
        "on_predict_step_end": "_judged",
        "on_predict_end": "_judging_ends",
    }

    def __init__(
        self, foreign: Any, *, attributes: Mapping[str, str], replicated: bool, name: str, phase: str, strict: bool
    ) -> None:
        self._unit = GuestUnit(attributes)
        self._state = GuestState(self)
        self._replicated = replicated
        self._is_asked_for_more = bool(attributes)
        self._phase = "train"
        self._asked_at: float | None = None
        self._began_at = 0.0
        self._late: tuple[PhaseState, str, float] | None = None
        super().__init__(foreign, name=name, phase=phase, strict=strict)
        if attributes:  # it hears these for them alone
            self.on_log = self._take_record  # type: ignore[method-assign]
            self.on_eval_all_end = self._take_results  # type: ignore[method-assign]

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """torchtnt gives each callback its state and the unit."""
        state, unit = self._state, self._unit
        if theirs == "on_exception":
            return lambda ctx: method(state, unit, ctx.exception)
        if theirs == "on_train_epoch_start":  # not told of an epoch that a resumed run enters in its midst
            return lambda ctx: None if ctx.state.timestamp.batch_in_epoch else method(state, unit)
        return lambda ctx: method(state, unit)

    # --- what torchtnt keeps itself ---

    def _begins(self, ctx: Context) -> None:
        self._unit._ctx = self._state._ctx = ctx
        self._state._should_stop = False

    def _enter(self, phase: str) -> Progress:
        self._phase = phase
        self._state._active_phase = _PHASES[phase]
        progress: Progress = getattr(self._unit, f"{phase}_progress")
        return progress

    def _train_starts(self, ctx: Context) -> None:
        now = ctx.state.timestamp
        self._enter("train").load_state_dict({
            "num_epochs_completed": now.epoch,
            "num_steps_completed": now.batch,
            "num_steps_completed_in_epoch": now.batch_in_epoch,
        })  # fmt: skip
        self._state._begin(EntryPoint.FIT if ctx.state.evaluators else EntryPoint.TRAIN, ctx)

    def _epoch_starts(self, ctx: Context) -> None:
        self._enter("train")

    def _asks_for_a_batch(self, ctx: Context) -> None:
        self._write_time()
        if self._asked_at is None:
            self._asked_at = time.perf_counter()

    def _has_its_batch(self, ctx: Context) -> None:
        if self._phase != "train":  # there was an evaluation within the epoch
            self._enter("train")
        self._began_at = now = time.perf_counter()
        if self._asked_at is not None:  # torchtnt writes it down behind the hook of the batch; nothing reads it there
            self._add_time(self._state._train_state, "data_wait_time", now - self._asked_at)
            self._asked_at = None

    def _step_ends(self, ctx: Context) -> None:
        self._unit._train.increment_step()
        if self._is_asked_for_more and ctx.has("loss"):
            self._unit._take({"loss": ctx.loss})
        self._late = self._state._train_state, "train_iteration_time", time.perf_counter() - self._began_at

    def _epoch_ends(self, ctx: Context) -> None:
        self._write_time()
        self._enter("train")
        self._asked_at = None
        self._unit._train.increment_epoch()

    def _train_ends(self, ctx: Context) -> None:
        self._write_time()
        self._enter("train")

    def _judging_starts(self, ctx: Context) -> None:
        self._write_time()
        self._enter("predict" if str(ctx.event) == "on_predict_start" else "eval")
        if self._phase == "predict":
            self._state._begin(EntryPoint.PREDICT, ctx)
        elif ctx.standalone:
            self._state._begin(EntryPoint.EVALUATE, ctx)
        self._asked_at = time.perf_counter()

    def _judges(self, ctx: Context) -> None:
        self._write_time()
        self._began_at = now = time.perf_counter()
        if self._asked_at is not None:
            self._add_time(self._state.active_phase_state(), "data_wait_time", now - self._asked_at)

    def _judged(self, ctx: Context) -> None:
        self._asked_at = now = time.perf_counter()
        getattr(self._unit, f"{self._phase}_progress").increment_step()
        self._late = self._state.active_phase_state(), f"{self._phase}_iteration_time", now - self._began_at

    def _judging_ends(self, ctx: Context) -> None:
        self._write_time()
        self._asked_at = None
        getattr(self._unit, f"{self._phase}_progress").increment_epoch()
        if self._phase == "eval":
            self._unit._take({f"{ctx.eval_name}/{name}": loss for name, loss in ctx.eval_losses.items()})

    def _write_time(self) -> None:
        """torchtnt writes a step's time down behind the hooks of its end."""
        if self._late is not None:
            self._add_time(*self._late)
            self._late = None

    def _add_time(self, phase: PhaseState, name: str, seconds: float) -> None:
        times = phase.iteration_timer.recorded_durations[name]
        times.append(seconds)
        if len(times) > _MOST_TIMES:
            del times[: _MOST_TIMES // 2]

    def _take_record(self, ctx: Context) -> None:
        self._unit._take(ctx.record.values)

    def _take_results(self, ctx: Context) -> None:
        self._unit._take({f"{data}/{name}": value for data, found in ctx.eval_results.items() for name, value in found.items()})

    def state_dict(self) -> Mapping[str, Any]:
        """What torchtnt saves: the progress of its loops; and the callback's own, if it has any."""
        unit = self._unit
        return {"eval": unit._eval.state_dict(), "predict": unit._predict.state_dict(), "foreign": super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._unit._eval.load_state_dict(state["eval"])
        self._unit._predict.load_state_dict(state["predict"])
        super().load_state_dict(state["foreign"])


class GuestUnit(Facade):
    """A unit of torchtnt's as far as callbacks may see it."""

    OF = "torchtnt's unit"

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self._ctx: Any = None  # until the run begins
        self._attributes = attributes
        self._told: dict[str, Any] = {}
        self._train, self._eval, self._predict = Progress(), Progress(), Progress()

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

    train_progress = property(lambda self: self._train)
    eval_progress = property(lambda self: self._eval)
    predict_progress = property(lambda self: self._predict)
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
        return {"train_progress": self._train, "eval_progress": self._eval, "predict_progress": self._predict}

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
    """torchtnt's state of a run of ours."""

    def __init__(self, guest: TorchTNTGuest) -> None:
        self._guest = guest
        self._ctx: Any = None  # until the run begins
        phases = {f"{name}_state": GuestPhase() for name in _PHASES}
        super().__init__(entry_point=EntryPoint.TRAIN, **phases)

    def _begin(self, entry_point: EntryPoint, ctx: Context) -> None:
        self._entry_point = entry_point
        self._train_state._limit(ctx)

    @property
    def should_stop(self) -> bool:
        """Whether anybody has asked that training stop."""
        return self._should_stop or self._ctx.control.stop_requested is not None

    def stop(self) -> None:
        """Stop our loop after the step in hand."""
        super().stop()
        self._ctx.control.stop(f"{self._guest.name} called state.stop()", replicated=self._guest._replicated)


class GuestPhase(PhaseState):  # type: ignore[misc]  # torchtnt's types are not read
    """torchtnt's state of one of its loops."""

    def __init__(self) -> None:
        super().__init__(dataloader=_Length(None))

    def _limit(self, ctx: Context) -> None:
        longest = ctx.state.max_duration
        self._dataloader = _Length(ctx.state.epoch_batches)
        if longest is not None and longest.unit is TimeUnit.EPOCH:
            self._max_epochs = int(longest.value)
        elif longest is not None and longest.unit is TimeUnit.BATCH:
            self._max_steps = int(longest.value)

    @property
    def step_output(self) -> Any:
        """Refused: what a unit's step returns is its own."""
        raise NotCarried(
            "torchtnt's state has here no 'step_output': a step of ours returns nothing; run the callback at home for that"
        )


class _Length:
    """In the place of the dataloader: how many batches it has, where that is known, and no batches."""

    def __init__(self, length: int | None) -> None:
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("how many batches there are is not known")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        raise NotCarried("torchtnt's state has here no batches to iterate over, but only their number")
