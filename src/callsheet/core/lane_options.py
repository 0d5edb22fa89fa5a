"""The options of a callback's lane, the thread or process in which it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from callsheet.errors import ConfigError, did_you_mean

Overflow = Literal["block", "drop_oldest", "latest"]
"""What happens when the queue of a lane is full; see `LaneOptions`."""
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)

FIELDS_NOT_IN_LANES = ("model", "optimizer", "scheduler")
"""Fields that a callback in a lane never receives, since training keeps changing them."""


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """The options of a callback's lane: the thread or process in which it runs, with a queue of events.

    Args:
        queue: how many events may wait.
        overflow: what happens when the queue is full. `block`: the training thread waits. `drop_oldest`: the oldest event is dropped.
            `latest`: only the newest event of each kind is kept. Dropped events are counted.
        deadline: how many seconds the run's end waits for the lane in total. If the queue has been full for this long without progress,
            training does not wait for it again.

    Raises:
        ConfigError: a value is invalid.
    """

    queue: int = 1024
    overflow: Overflow = "block"
    deadline: float = 10.0

    def __post_init__(self) -> None:
        if isinstance(self.queue, bool) or not isinstance(self.queue, int) or self.queue < 1:
            raise ConfigError(f"queue={self.queue!r}: give the number of events that may wait, at least 1")
        if self.overflow not in OVERFLOWS:
            raise ConfigError(
                f"unknown overflow {self.overflow!r}{did_you_mean(str(self.overflow), OVERFLOWS)} (one of {', '.join(OVERFLOWS)})"
            )
        if not self.deadline > 0:
            raise ConfigError(f"deadline={self.deadline!r}: give a number of seconds above zero")
