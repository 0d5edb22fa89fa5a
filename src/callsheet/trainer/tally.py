"""The counts between two boundaries: samples, tokens and seconds of training."""

from __future__ import annotations

import time
from typing import Any

from callsheet.context import TrainState
from callsheet.trainer.process_groups import ProcessGroups


class Tally:
    """Counts each step on this process, and settles the counts into the run's timestamp at boundaries.

    Samples and tokens are those of all ranks, the seconds are rank 0's. Between boundaries the timestamp's samples, tokens and seconds
    stand still, so that every decision made on them is made on values that all ranks share. The clock runs while training does:
    evaluating and saving stop it.
    """

    def __init__(self, world: ProcessGroups) -> None:
        self._world = world
        self.samples = 0
        self.tokens = 0
        self._seconds = 0.0
        self._running_since: float | None = None
        self._record = (0, 0, 0.0)  # samples, tokens and seconds of training since the last record

    def count(self, samples: int, tokens: int) -> None:
        """One step more, and what its batches held."""
        self.samples += samples
        self.tokens += tokens

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
        """Add what was counted, on all ranks, to the timestamp: a collective."""
        if self._running_since is not None:
            self.stop()
            self.start()
        counted = [self.samples, self.tokens, self._seconds if self._world.rank == 0 else 0.0]
        samples, tokens, seconds = counted if self._world.size == 1 else self._world.sum(counted)
        state.timestamp = state.timestamp.settled(samples=int(samples), tokens=int(tokens), seconds=seconds)
        before = self._record
        self._record = (before[0] + int(samples), before[1] + int(tokens), before[2] + seconds)
        self.samples = self.tokens = 0
        self._seconds = 0.0

    def since_record(self) -> tuple[int, int, float]:
        """Samples, tokens and seconds of training settled since the last call."""
        record, self._record = self._record, (0, 0, 0.0)
        return record

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have counted since it was settled, and what was settled since the last record: a collective."""
        here = [self.samples, self.tokens, self._seconds if self._world.rank == 0 else 0.0]
        samples, tokens, seconds = self._world.sum(here)
        return {"samples": int(samples), "tokens": int(tokens), "seconds": seconds, "record": list(self._record)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave: rank 0 has counted it, of however many ranks there were."""
        is_counted = self._world.rank == 0
        self.samples, self.tokens = (state["samples"], state["tokens"]) if is_counted else (0, 0)
        self._seconds = state["seconds"] if is_counted else 0.0
        samples, tokens, seconds = state["record"]
        self._record = (samples, tokens, seconds)
