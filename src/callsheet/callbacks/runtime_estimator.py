"""Estimates the remaining training time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from callsheet.core.callback import Callback, one_of
from callsheet.core.context import Context
from callsheet.core.run_state import TrainState
from callsheet.core.time import TimeUnit
from callsheet.errors import ConfigError

Unit = Literal["seconds", "minutes", "hours", "days"]
_SECONDS_PER_UNIT: dict[Unit, float] = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


class RuntimeEstimator(Callback):
    """Add an estimate of the remaining time to every metrics record. The time includes evaluations and checkpoints.

    It adds `time/remaining_estimate` in seconds. In another unit, the name contains the unit, such as
    `time/remaining_estimate_hours`. If the estimator has a `name`, the name is used instead of `time`. All ranks log the estimate
    of rank 0.

    The estimate is the time for the remaining training at the speed so far, plus the time for the expected evaluations and
    checkpoints. The speed does not include the first steps of every process. The number of evaluations and checkpoints is derived
    from their intervals so far, and multiplied by their mean duration. The measurements survive a resume, even with another
    `max_duration` in the same time unit. Without `max_duration` nothing is logged.

    Args:
        skip_batches: how many steps of a process to leave out as warm-up (compiling, first allocations).
        time_unit: `seconds`, `minutes`, `hours` or `days`.

    Raises:
        ConfigError: an argument is invalid.
    """

    collective = True

    def __init__(self, *, skip_batches: int = 1, time_unit: Unit = "seconds") -> None:
        if skip_batches < 0:
            raise ConfigError(f"skip_batches={skip_batches}: give 0 or more")
        self._unit = one_of("time_unit", time_unit, tuple(_SECONDS_PER_UNIT))
        self._skip_batches = skip_batches
        self._counts = ""  # time unit of `max_duration`, in which progress is measured
        self._seconds = self._progress = 0.0  # training time and progress measured so far, without warm-up and pauses
        # Kind of pause -> number of pauses, their total seconds, and the run's progress at the first and at the last pause.
        self._pauses: dict[str, tuple[int, float, float, float]] = {}
        self._to_skip = skip_batches
        self._since: tuple[float, float] | None = None  # time and progress when the current stretch of training began
        self._paused: tuple[str, float] | None = None  # kind ("evaluation" or "save") and start of the current pause

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """In a new run, discard the measurements, because this object may have made them in an earlier run."""
        if ctx.checkpoint is None:
            self._counts = ""

    def on_train_start(self, ctx: Context) -> None:
        """Prepare to measure training time after the warm-up steps, whose time is not measured."""
        longest = ctx.state.max_duration
        counts = longest.unit.value if longest is not None else ""
        if counts != self._counts:  # measurements in another time unit cannot be converted, so discard them
            self._counts, self._seconds, self._progress, self._pauses = counts, 0.0, 0.0, {}
        self._to_skip, self._paused = self._skip_batches, None
        self._since = (time.monotonic(), _progress(ctx.state)) if not self._skip_batches else None
        (ctx.unmute if self._skip_batches else ctx.mute)(self, "on_train_step_end")

    def on_train_step_end(self, ctx: Context) -> None:
        """Count the warm-up steps, and begin to measure training time after the last one."""
        if self._to_skip:
            self._to_skip -= 1
            if not self._to_skip:
                self._since = (time.monotonic(), _progress(ctx.state))
                ctx.mute(self, "on_train_step_end")

    def on_log(self, ctx: Context) -> None:
        if self._paused is None:
            self._add_stretch(ctx.state)
        estimate = ctx.gather(self._estimate(ctx.state))[0]
        if estimate is not None:
            suffix = "" if self._unit == "seconds" else f"_{self._unit}"
            name = f"{self.name or 'time'}/remaining_estimate{suffix}"
            ctx.log({name: estimate / _SECONDS_PER_UNIT[self._unit]}, across="same")

    def on_eval_all_start(self, ctx: Context) -> None:
        """Pause the measurement of training time, because an evaluation begins."""
        if not ctx.standalone:
            self._pause("evaluation", ctx.state)

    def on_eval_all_end(self, ctx: Context) -> None:
        """Record how long the evaluations took, and continue to measure training time."""
        self._unpause(ctx.state)

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        """Pause the measurement of training time, because a save begins."""
        self._pause("save", ctx.state)

    def on_checkpoint_save_end(self, ctx: Context) -> None:
        """Record how long the save took, and continue to measure training time."""
        self._unpause(ctx.state)

    def state_dict(self) -> Mapping[str, Any]:
        pauses = {kind: list(pause) for kind, pause in self._pauses.items()}
        return {"counts": self._counts, "seconds": self._seconds, "progress": self._progress, "pauses": pauses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts, self._seconds, self._progress = state["counts"], state["seconds"], state["progress"]
        self._pauses = {kind: (int(count), *rest) for kind, (count, *rest) in state["pauses"].items()}

    def _estimate(self, state: TrainState) -> float | None:
        """Return the estimated remaining time in seconds; None if there are no measurements yet."""
        if state.max_duration is None or self._seconds <= 0 or self._progress <= 0:
            return None
        here, end = _progress(state), float(state.max_duration.value)
        left = max(0.0, end - here) * self._seconds / self._progress
        for count, seconds, first, last in self._pauses.values():
            # After only one pause, assume that the run makes as much progress between two pauses as before the first pause.
            between = (last - first) / (count - 1) if count > 1 else first
            if between > 0 and end > last:
                # The number of remaining pauses (evaluations or saves). Round up, because training ends with a pause.
                to_come = -int(-((end - last) / between - 1e-6) // 1)
                left += max(0, to_come) * seconds / count
        return left

    def _add_stretch(self, state: TrainState) -> None:
        if self._since is not None:
            (moment, progress), self._since = self._since, (time.monotonic(), _progress(state))
            self._seconds += self._since[0] - moment
            self._progress += self._since[1] - progress

    def _pause(self, kind: str, state: TrainState) -> None:
        self._add_stretch(state)
        self._paused = (kind, time.monotonic())

    def _unpause(self, state: TrainState) -> None:
        if self._paused is None:
            return
        (kind, moment), self._paused = self._paused, None
        here, took = _progress(state), time.monotonic() - moment
        count, seconds, first, _ = self._pauses.get(kind, (0, 0.0, here, here))
        self._pauses[kind] = (count + 1, seconds + took, first, here)
        if self._since is not None:
            self._since = (time.monotonic(), here)


def _progress(state: TrainState) -> float:
    """Return the run's progress in the time unit of `max_duration`. An incomplete epoch counts in part if its length is known."""
    longest = state.max_duration
    if longest is None:
        return 0.0
    done = float(state.timestamp.count(longest.unit))
    if longest.unit is TimeUnit.EPOCH and state.epoch_batches:
        done += state.timestamp.batch_in_epoch / state.epoch_batches
    return done
