"""Training ends before its time is up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.errors import ConfigError
from callsheet.time import Time, TimeUnit


class TimeLimit(Callback):
    """Stop training, with a checkpoint, when the run has taken so much time by the clock on the wall.

    Everything counts: set-up, waiting for data, evaluating, saving; of a resumed run also what its earlier processes took, up to the
    checkpoint that it goes on from, but not the time between them. The clock is rank 0's: its wish to stop is known to all ranks within
    about 0.2 seconds, and acts on all of them at the same step, after the evaluation in progress if there is one. What then follows, the
    evaluations at a run's end and the checkpoint, is what the `margin` is for. Several limits stand side by side if each has a `name`.

    Args:
        limit: such as `"11h30m"`, or seconds.
        margin: ask so long before the limit, so that what follows is done in time.
        across_resumes: count the earlier processes of the run; False limits this process alone, as a scheduler's job does.
        save: ask for a checkpoint, whether or not a `CheckpointSaver` does; nothing ever deletes it.

    Raises:
        ConfigError: a limit or a margin that is no time on the wall, or leaves nothing.
    """

    phase = "decide"
    ranks = "zero"

    def __init__(
        self, *, limit: str | float | Time, margin: str | float | Time = 0, across_resumes: bool = True, save: bool = True
    ) -> None:
        self._limit, margin_seconds = _seconds("limit", limit), _seconds("margin", margin)
        if not 0 <= margin_seconds < self._limit:
            raise ConfigError(f"limit={limit!r} with margin={margin!r} leaves no time to train; give more, or a smaller margin")
        self._seconds = self._limit - margin_seconds
        self._across_resumes = across_resumes
        self._save = save
        self._before = 0.0  # seconds that earlier processes took
        self._began: float | None = None
        self._has_asked = False

    def on_run_start(self, ctx: Context) -> None:
        """The clock of this process starts."""
        self._before, self._began = 0.0, time.monotonic()

    def on_train_start(self, ctx: Context) -> None:
        """What is over already need not begin."""
        self._has_asked = False
        self._look(ctx, save=False)

    def on_train_step_end(self, ctx: Context) -> None:
        """Look at the clock."""
        if not self._has_asked:
            self._look(ctx, save=self._save)

    def on_eval_all_end(self, ctx: Context) -> None:
        """An evaluation may take longer than many steps."""
        if not self._has_asked and not ctx.standalone:
            self._look(ctx, save=self._save)

    def on_run_end(self, ctx: Context) -> None:
        """The clock stands still."""
        self._before, self._began = self._taken, None

    @property
    def _taken(self) -> float:
        return self._before + (time.monotonic() - self._began if self._began is not None else 0.0)

    def _look(self, ctx: Context, *, save: bool) -> None:
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
        """The seconds that the run has taken."""
        return {"seconds": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._before = state["seconds"] if self._across_resumes else 0.0


def _seconds(argument: str, given: str | float | Time) -> float:
    found = Time.parse(given) if isinstance(given, str | Time) else Time(given, TimeUnit.SECOND)
    if found.unit is not TimeUnit.SECOND:
        raise ConfigError(f"{argument}={given!r} is no time on the wall; give one such as '11h30m', or seconds")
    return found.value
