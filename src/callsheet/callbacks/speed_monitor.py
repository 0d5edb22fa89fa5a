"""How fast training is: batches, samples and tokens per second."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.errors import ConfigError
from callsheet.time import Timestamp


class _Point(NamedTuple):
    """What was completed at a log boundary."""

    batch: int
    sample: int
    token: int
    seconds: float


class SpeedMonitor(Callback):
    """Add the speed of training to every record, over a window that rolls along.

    Adds `throughput/batches_per_second`, `throughput/samples_per_second` and `throughput/tokens_per_second`, each over all ranks, and
    per rank as `throughput/device/...`; samples and tokens where they are counted. With a `name` of its own, such as
    `throughput/long`, a second monitor logs under that instead.

    A rate is what was completed within the window, by the seconds that training took for it: waiting for data is in them, and
    callbacks, and compiling in the first steps; evaluating and saving are not. Nothing is timed here: the counts are the run's own
    timestamp, which the ranks agree on at every record, so that it costs nothing between records. The window goes on across a resume.

    Args:
        window_size: how many of the last batches; where a record is made less often than that, those since the last record.
    """

    def __init__(self, *, window_size: int = 100) -> None:
        if window_size < 1:
            raise ConfigError(f"window_size={window_size}: give at least one batch")
        self._window_size = window_size
        self._window: deque[_Point] = deque()  # its last points cover `window_size` batches, or it is all there is

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """A new run has a new window."""
        if ctx.checkpoint is None:
            self._window.clear()

    def on_train_start(self, ctx: Context) -> None:
        """The first rate is taken from here."""
        if not self._window:
            self._window.append(_point(ctx.state.timestamp))

    def on_log(self, ctx: Context) -> None:
        """Add the rates to the record that is being told."""
        window, now = self._window, _point(ctx.state.timestamp)
        if not window or now.batch <= window[-1].batch:  # an evaluation's record: nothing was trained meanwhile
            return
        window.append(now)
        while now.batch - window[1].batch >= self._window_size:
            window.popleft()
        first = window[0]
        seconds = now.seconds - first.seconds
        if seconds <= 0:
            return
        done = {"batches": now.batch - first.batch, "samples": now.sample - first.sample, "tokens": now.token - first.token}
        family, ranks = self.name or "throughput", ctx.run.world_size
        for name, count in done.items():
            if count:
                # Written into this record, for the loggers after us: what `ctx.log` takes here would stand in the next one.
                ctx.record.values[f"{family}/{name}_per_second"] = count / seconds
                ctx.record.values[f"{family}/device/{name}_per_second"] = count / seconds / ranks

    def state_dict(self) -> Mapping[str, Any]:
        """The window."""
        return {"window": [list(point) for point in self._window]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._window = deque(_Point(*point) for point in state["window"])


def _point(timestamp: Timestamp) -> _Point:
    return _Point(timestamp.batch, timestamp.sample, timestamp.token, timestamp.seconds)
