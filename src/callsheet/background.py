"""`Background(callback)`: any callback, off the training thread."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from callsheet.callback import Callback, label_of
from callsheet.errors import NotACallbackError
from callsheet.lanes import LaneOptions

END_SECONDS = 5.0
"""That a callback's process is given to end by itself."""


class Background(Callback):
    """Run a callback on a thread of its own: it is told everything in order, as snapshots, and training does not wait for it.

    The callback keeps its name, its state, its phase, ranks and intervals. Its errors are isolated; its `async def` methods are awaited one
    after the other. It reads what costs nothing to take, or what its `needs` names; never the model. `ctx.log` and `ctx.control` work as
    ever. At the end of a run everything is delivered, within `deadline`.

    Args:
        callback: which.
        queue: how many events may wait for it.
        overflow: when that many do: `block`, training waits; `drop_oldest`; or `latest`, of each event only the newest waits. What is
            dropped is counted, and told in the report.
        deadline: seconds: how long the end of the run waits for it, and training for a full queue that does not move.

    Raises:
        ConfigError: an option that cannot work.
        NotACallbackError: `callback` is none, or in a lane already.

    Example:
        >>> class Slow(Callback):
        ...     needs = ("loss",)
        ...     async def on_train_step_end(self, ctx):
        ...         ...  # await client.post(url, json={"step": ctx.step, "loss": ctx.loss.item()})
        >>> watcher = Background(Slow(), overflow="drop_oldest")
    """

    lane = "background"
    patience: float = inf
    """Seconds that reading or giving back its state may wait for it; the manager says how many there are."""

    def __init__(self, callback: Callback, *, queue: int = 1024, overflow: str = "block", deadline: float = 10.0) -> None:
        if not isinstance(callback, Callback) or isinstance(callback, Background):
            raise NotACallbackError(f"{type(self).__name__} takes a callback that is in no lane yet, not {callback!r}")
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
        """The callback's: giving the one another name gives it to the other."""
        return label_of(self.callback)

    @name.setter
    def name(self, name: str) -> None:
        """Give it another."""
        self.callback.name = name

    def state_dict(self) -> Mapping[str, Any]:
        """The callback's."""
        return self.callback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The callback's."""
        self.callback.load_state_dict(state)


def inner(callback: Callback) -> Callback:
    """The callback itself, out of the `Background` around it."""
    return callback.callback if isinstance(callback, Background) else callback
