"""`Background(callback)`: a wrapper that runs a callback on a separate thread."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from callsheet.core.callback import Callback, Lane, label_of
from callsheet.core.lane_options import LaneOptions, Overflow
from callsheet.errors import NotACallbackError

END_SECONDS = 5.0
"""How many seconds a callback's process has to exit after it was asked to end. Then the process is killed."""


class Background(Callback):
    """Run a callback on a separate thread. The callback receives all events in order, as snapshots, while training continues.

    The callback keeps its name, state, phase, ranks and intervals. Its errors are logged and do not end the run. Its `async def`
    methods run one after the other, each to its end. A snapshot holds the fields that `snapshot_fields` names or, if
    `snapshot_fields` is empty, all fields that can be passed without a copy. A snapshot never holds the model. `ctx.log` and
    `ctx.control` work as usual. At the end of a run, the run waits for up to `deadline` seconds until all events are delivered.
    Give each of several runs at the same time its own callback object, because two threads could call a shared one at once.

    Args:
        callback: the callback.
        queue: how many events may wait for the callback.
        overflow: what happens when the queue is full. `block`: training waits. `drop_oldest`: the oldest event is dropped. `latest`: only the
            newest event of each kind waits. Dropped events are counted in the report.
        deadline: seconds that the end of the run waits for the callback, and that training waits while a full queue does not move.

    Raises:
        ConfigError: an option has an invalid value.
        NotACallbackError: `callback` is not a callback, or is in a lane already.

    Examples:
        >>> class Slow(Callback):
        ...     snapshot_fields = ("loss",)
        ...     async def on_train_step_end(self, ctx):
        ...         ...  # await client.post(url, json={"step": ctx.step, "loss": ctx.loss.item()})
        >>> watcher = Background(Slow(), overflow="drop_oldest")
    """

    lane: Lane = "background"
    patience: float = inf
    """Seconds that `state_dict` and `load_state_dict` wait for the wrapped callback. The callback manager sets this attribute."""

    def __init__(self, callback: Callback, *, queue: int = 1024, overflow: Overflow = "block", deadline: float = 10.0) -> None:
        if not isinstance(callback, Callback) or isinstance(callback, Background):
            raise NotACallbackError(f"{type(self).__name__} takes a callback that is not in a lane yet, not {callback!r}")
        self.callback = callback
        self.lane_options = LaneOptions(queue, overflow, deadline)
        self.phase, self.ranks, self.collective, self.draws_random = (
            callback.phase,
            callback.ranks,
            callback.collective,
            callback.draws_random,
        )
        self.keep_fields, self.snapshot_fields = callback.keep_fields, callback.snapshot_fields

    @property
    def name(self) -> str:
        """The wrapped callback's name. Setting this attribute renames the wrapped callback."""
        return label_of(self.callback)

    @name.setter
    def name(self, name: str) -> None:
        """Set the `name` of the wrapped callback."""
        self.callback.name = name

    def state_dict(self) -> Mapping[str, Any]:
        return self.callback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.callback.load_state_dict(state)


def inner(callback: Callback) -> Callback:
    """Return the callback inside a `Background` wrapper, or `callback` itself if it is not wrapped."""
    return callback.callback if isinstance(callback, Background) else callback
