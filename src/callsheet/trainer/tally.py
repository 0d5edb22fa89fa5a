"""The counts between two boundaries: samples, tokens and seconds of training."""

from __future__ import annotations

import time
from typing import Any

from callsheet.context import TrainState


class Tally:
    """Counts each step on this process, and settles the counts into the run's timestamp at boundaries.

    Between boundaries the timestamp's samples, tokens and seconds stand still, so that every decision made on them is made on values
    that all ranks share. The clock runs while training does: evaluating and saving stop it.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.tokens = 0
        self._seconds = 0.0
        self._running_since: float | None = None
        self._record = (0, 0, 0.0)  # samples, tokens and seconds of training since the last record

    def start(self) -> None:
        """Training goes on."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def stop(self) -> None:
        """Something else has the thread."""
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def settle(self, state: TrainState) -> None:
        """Add what was counted to the timestamp."""
        if self._running_since is not None:
            self.stop()
            self.start()
        state.timestamp = state.timestamp.settled(samples=self.samples, tokens=self.tokens, seconds=self._seconds)
        samples, tokens, seconds = self._record
        self._record = (samples + self.samples, tokens + self.tokens, seconds + self._seconds)
        self.samples = self.tokens = 0
        self._seconds = 0.0

    def since_record(self) -> tuple[int, int, float]:
        """Samples, tokens and seconds of training settled since the last call."""
        record, self._record = self._record, (0, 0, 0.0)
        return record

    def state_dict(self) -> dict[str, Any]:
        """What was settled since the last record, and counted since."""
        return {"samples": self.samples, "tokens": self.tokens, "seconds": self._seconds, "record": list(self._record)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.samples, self.tokens, self._seconds = state["samples"], state["tokens"], state["seconds"]
        samples, tokens, seconds = state["record"]
        self._record = (samples, tokens, seconds)
