"""Stops training before a time limit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.ranks import RankGate
from callsheet.core.time import Time, TimeUnit
from callsheet.errors import ConfigError


class TimeLimit(Callback):
    """Stop training, with a checkpoint, when the run has taken a given wall-clock time.

    All time is counted: set-up, waiting for data, evaluating and saving. For a resumed run, the time of earlier processes up to
    its checkpoint is counted too, but not the time between processes. Rank 0's clock is used. All ranks learn of the stop request
    within about a quarter of a second and stop at the same step, after the evaluation in progress if there is one. The `margin` is for what
    follows: the evaluations at a run's end and the checkpoint. To use several limits, give each its own `name`.

    Args:
        limit: the time, such as `"11h30m"`, or a number of seconds.
        margin: how long before the limit to request the stop.
        across_resumes: whether to count the earlier processes of the run. False limits only this process, like a scheduler's job
            limit.
        save: whether to request a checkpoint in addition to those of a `CheckpointSaver`; the requested checkpoint is never
            deleted.

    Raises:
        ConfigError: a limit or a margin is not a wall-clock time, or no time to train is left.
    """

    phase = "decide"
    ranks: RankGate = "zero"
    requests = ("stop", "save")

    def __init__(
        self, *, limit: str | float | Time, margin: str | float | Time = 0, across_resumes: bool = True, save: bool = True
    ) -> None:
        self._limit, margin_seconds = _seconds("limit", limit), _seconds("margin", margin)
        if not 0 <= margin_seconds < self._limit:
            raise ConfigError(f"limit={limit!r} with margin={margin!r} leaves no time to train; give more, or a smaller margin")
        self._seconds = self._limit - margin_seconds
        self._across_resumes = across_resumes
        self._save = save
        self._before = 0.0  # how many seconds of the limit earlier processes of the run have used up
        self._began: float | None = None
        self._has_asked = False

    def on_run_start(self, ctx: Context) -> None:
        """Start measuring the wall-clock time of this process."""
        self._before, self._began = 0.0, time.monotonic()

    def on_train_start(self, ctx: Context) -> None:
        """Stop training at once if earlier processes of the run have used up the time."""
        self._has_asked = False
        self._stop_if_due(ctx, save=False)

    def on_train_step_end(self, ctx: Context) -> None:
        if not self._has_asked:
            self._stop_if_due(ctx, save=self._save)

    def on_eval_all_end(self, ctx: Context) -> None:
        """Stop training if the time is up. This event is checked too because an evaluation may take longer than many steps."""
        if not self._has_asked and not ctx.standalone:
            self._stop_if_due(ctx, save=self._save)

    def on_run_end(self, ctx: Context) -> None:
        """Stop measuring the run's wall-clock time."""
        self._before, self._began = self._taken, None

    @property
    def _taken(self) -> float:
        return self._before + (time.monotonic() - self._began if self._began is not None else 0.0)

    def _stop_if_due(self, ctx: Context, *, save: bool) -> None:
        taken = self._taken
        if taken < self._seconds:
            return
        self._has_asked = True
        who = "the run" if self._across_resumes else "this process"
        why = f"{who} has taken {taken:.0f} s of its limit of {self._limit:.0f} s"
        ctx.control.stop(why, resumable=not self._across_resumes)
        if save:
            ctx.control.save(why, kind="final")

    def state_dict(self) -> Mapping[str, Any]:
        return {"seconds": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = state["seconds"] if self._across_resumes else 0.0


def _seconds(argument: str, given: str | float | Time) -> float:
    found = Time.parse(given) if isinstance(given, str | Time) else Time(given, TimeUnit.SECOND)
    if found.unit is not TimeUnit.SECOND:
        raise ConfigError(f"{argument}={given!r} is not a wall-clock time; give one such as '11h30m', or seconds")
    return found.value
