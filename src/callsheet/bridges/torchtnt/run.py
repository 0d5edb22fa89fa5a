"""The state that torchtnt's callbacks share in one run of callsheet's loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

from torchtnt.framework.state import ActivePhase, EntryPoint, PhaseState
from torchtnt.utils.progress import Progress

from callsheet.bridges.guest_base import Common
from callsheet.core.context import Context
from callsheet.core.time import TimeUnit
from callsheet.errors import NotSupported

PHASES: Mapping[str, ActivePhase] = {
    "train": ActivePhase.TRAIN,
    "eval": ActivePhase.EVALUATE,
    "predict": ActivePhase.PREDICT,
}
_MAX_DURATIONS = 5000  # how many durations to keep per name, as in torchtnt


class TorchTNTRun(Common):
    """Keeps the progress of torchtnt's loops, and measures how long steps take and how long they wait for data.

    Each method that is named after an event of callsheet handles that event."""

    def __init__(self) -> None:
        self.ctx: Any = None  # callsheet's context; None until the run begins
        self.entry_point = EntryPoint.TRAIN
        self.phase = "train"
        self.was_stopped = False
        self.progress: Mapping[str, Progress] = {phase: Progress() for phase in PHASES}
        self.phases: Mapping[str, GuestPhase] = {phase: GuestPhase() for phase in PHASES}
        self._count_step = self.progress["train"].increment_step
        self._asked_at: float | None = None
        self._began_at = 0.0
        self._timer = self.phases["train"].iteration_timer  # the timer of the current loop
        self._late: float | None = None  # the duration of the last step; None once it is recorded

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of evaluation and prediction. The run's timestamp already contains the progress of training."""
        return {phase: self.progress[phase].state_dict() for phase in ("eval", "predict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for phase in ("eval", "predict"):
            self.progress[phase].load_state_dict(state[phase])

    # --- training ---

    def on_run_start(self, ctx: Context) -> None:
        """Store the run's context, which later calls of torchtnt's callbacks use."""
        self.ctx, self.was_stopped = ctx, False

    def on_train_start(self, ctx: Context) -> None:
        """Set torchtnt's progress counters to the run's progress."""
        now = ctx.state.timestamp
        self._switch_to("train")
        self.progress["train"].load_state_dict({
            "num_epochs_completed": now.epoch,
            "num_steps_completed": now.batch,
            "num_steps_completed_in_epoch": now.batch_in_epoch,
        })  # fmt: skip
        self._enter(EntryPoint.FIT if ctx.state.evaluators else EntryPoint.TRAIN, ctx)

    def on_epoch_start(self, ctx: Context) -> None:
        """Set the active loop in torchtnt's `State` back to training, after an evaluation."""
        self._switch_to("train")

    def on_fetch_start(self, ctx: Context) -> None:
        """Start measuring the wait for data, at the first fetch of a step."""
        if self._asked_at is None:
            self._asked_at = perf_counter()

    def on_train_step_start(self, ctx: Context) -> None:
        """Record how long the step has waited for data, and the duration of the previous step."""
        if self.phase != "train":  # an evaluation within the epoch has ended, so return to the training phase
            self._switch_to("train")
        self._began_at = now = perf_counter()
        durations = self._timer.recorded_durations
        # Record the previous step's duration now, because torchtnt records it after `on_train_step_end`.
        if (late := self._late) is not None:
            self._late = None
            durations["train_iteration_time"].append(late)
        # torchtnt records the wait for data just before `on_train_step_start`, so record it here and not at `on_fetch_end`.
        if (asked := self._asked_at) is not None:
            self._asked_at = None
            waits = durations["data_wait_time"]
            waits.append(now - asked)
            if len(waits) > _MAX_DURATIONS:
                self._shorten()

    def on_train_step_end(self, ctx: Context) -> None:
        """Add the step to torchtnt's progress."""
        self._late = perf_counter() - self._began_at
        self._count_step()

    def on_epoch_end(self, ctx: Context) -> None:
        """Add the epoch to torchtnt's progress."""
        self._switch_to("train")
        self._asked_at = None
        self.progress["train"].increment_epoch()

    def on_train_end(self, ctx: Context) -> None:
        """Record the duration of the last step."""
        self._switch_to("train")

    # --- evaluation and prediction ---

    def on_eval_start(self, ctx: Context) -> None:
        """Start the evaluation of one dataset, which torchtnt's callbacks see as a whole evaluation."""
        self._begin_eval("eval", EntryPoint.EVALUATE if ctx.standalone else None, ctx)

    def on_predict_start(self, ctx: Context) -> None:
        """Start a prediction."""
        self._begin_eval("predict", EntryPoint.PREDICT, ctx)

    def on_eval_step_start(self, ctx: Context) -> None:
        """Record how long the step has waited for data, and the duration of the previous step."""
        self._write_time()
        self._began_at = now = perf_counter()
        if self._asked_at is not None:
            self._add("data_wait_time", now - self._asked_at)

    def on_eval_step_end(self, ctx: Context) -> None:
        """Count the step, and start measuring the wait for the next batch."""
        self._asked_at = now = perf_counter()
        self.progress[self.phase].increment_step()
        self._late = now - self._began_at

    def on_eval_end(self, ctx: Context) -> None:
        """Count the evaluated dataset as an epoch of torchtnt's evaluation."""
        self._write_time()
        self._asked_at = None
        self.progress[self.phase].increment_epoch()

    on_predict_step_start, on_predict_step_end, on_predict_end = on_eval_step_start, on_eval_step_end, on_eval_end

    def _begin_eval(self, phase: str, entry_point: EntryPoint | None, ctx: Context) -> None:
        self._switch_to(phase)
        if entry_point is not None:
            self._enter(entry_point, ctx)
        self._asked_at = perf_counter()

    def _switch_to(self, phase: str) -> None:
        self._write_time()
        self.phase, self._timer = phase, self.phases[phase].iteration_timer

    def _enter(self, entry_point: EntryPoint, ctx: Context) -> None:
        self.entry_point = entry_point
        self.phases["train"].limit(ctx)

    def _write_time(self) -> None:
        """Record the duration of the last step.

        torchtnt records it only after it has called the callbacks of the step's end.
        """
        if self._late is not None:
            self._add(f"{self.phase}_iteration_time", self._late)
            self._late = None

    def _add(self, name: str, seconds: float) -> None:
        times = self._timer.recorded_durations[name]
        times.append(seconds)
        if len(times) > _MAX_DURATIONS:
            self._shorten()

    def _shorten(self) -> None:
        for times in self._timer.recorded_durations.values():
            del times[: -_MAX_DURATIONS // 2]


class GuestPhase(PhaseState):  # type: ignore[misc]  # mypy does not read torchtnt's types
    """Takes the place of torchtnt's `PhaseState` of training, evaluation or prediction when callsheet's loop calls torchtnt's callbacks."""

    def __init__(self) -> None:
        super().__init__(dataloader=_Length(None))

    def limit(self, ctx: Context) -> None:
        """Set the loop's maximum number of epochs or steps, and the number of batches, to those of the run."""
        longest = ctx.state.max_duration
        self._dataloader = _Length(ctx.state.epoch_batches)
        if longest is not None and longest.unit is TimeUnit.EPOCH:
            self._max_epochs = int(longest.value)
        elif longest is not None and longest.unit is TimeUnit.BATCH:
            self._max_steps = int(longest.value)

    @property
    def step_output(self) -> Any:
        """Raise NotSupported, because a step of callsheet returns nothing."""
        raise NotSupported(
            "torchtnt's state has no 'step_output' in callsheet, whose steps return nothing; run the callback in torchtnt for that"
        )


class _Length:
    """Takes the place of the dataloader in torchtnt's `State`. It has a length, if the length is known, but no batches."""

    def __init__(self, length: int | None) -> None:
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the number of batches is not known")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        raise NotSupported("torchtnt's state has no batches to iterate over in callsheet, only their number")
