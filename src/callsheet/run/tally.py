"""Counts samples, tokens and seconds of training, and adds them to the run's totals every few steps."""

from __future__ import annotations

import time
from typing import Any

from callsheet.core.run_state import TrainState
from callsheet.run.process_groups import ProcessGroups


class Tally:
    """Counts the samples, tokens and seconds of each step in this process, and every few steps adds them to the run's timestamp.

    In the timestamp, samples and tokens are those of all ranks; the seconds are those of rank 0. Between boundaries the
    timestamp's samples, tokens and seconds do not change, so every decision that depends on them uses values that all ranks
    share. The clock runs only during training; it stops during evaluation and saving.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self.samples = 0
        self.tokens = 0
        # The difference between the estimates for all ranks and this rank's counts multiplied by the number of ranks; see `count`.
        self._more_samples = self._more_tokens = 0
        self._seconds = 0.0
        self._running_since: float | None = None
        self._record = (0, 0, 0.0)  # samples, tokens and seconds of training since the last metrics record
        self.resumed_samples = 0
        """In a resumed run, how many samples of all ranks were not yet counted in its first timestamp, the baseline."""
        # The samples and tokens of all ranks that the next update of the timestamp adds to it; 0 after that.
        self._loaded = self._loaded_tokens = 0

    def count(self, samples: int, tokens: int, samples_in_all: int | None = None, fillers: tuple[int, int] = (0, 0)) -> None:
        """Count one training step, with the samples and tokens of its batches.

        Args:
            samples: the samples of this rank.
            tokens: the tokens of this rank.
            samples_in_all: the samples of all ranks, or None if their number is not known.
            fillers: the samples and tokens of this rank's fillers (batches that only keep the ranks in step). The estimates for all
                ranks contain them until the next update of the timestamp, so that the estimates are the same on all ranks if all
                batches have the same size.
        """
        self.samples += samples
        self.tokens += tokens
        if samples_in_all is not None:
            self._more_samples += samples_in_all - samples * self._groups.size
        else:
            self._more_samples += fillers[0] * self._groups.size
        self._more_tokens += fillers[1] * self._groups.size

    @property
    def uncounted_samples(self) -> int:
        """The samples of all ranks that the run's timestamp does not contain yet.

        If the number in all ranks' batches is not known, it is estimated from the samples of this rank, including its fillers.
        """
        own = self.samples - (self._loaded if self._groups.rank == 0 else 0)
        return self._loaded + own * self._groups.size + self._more_samples

    @property
    def uncounted_tokens(self) -> int:
        """The tokens of all ranks that the run's timestamp does not contain yet. Estimated from those of this rank and its fillers."""
        own = self.tokens - (self._loaded_tokens if self._groups.rank == 0 else 0)
        return self._loaded_tokens + own * self._groups.size + self._more_tokens

    def start(self) -> None:
        """Start the clock that measures the seconds of training."""
        if self._running_since is None:
            self._running_since = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock that measures the seconds of training."""
        if self._running_since is not None:
            self._seconds += time.perf_counter() - self._running_since
            self._running_since = None

    def update_timestamp(self, state: TrainState) -> None:
        """Add the counts of all ranks to the timestamp in `state`. This is a collective."""
        if self._running_since is not None:
            self.stop()
            self.start()
        counted = [self.samples, self.tokens, self._seconds if self._groups.rank == 0 else 0.0]
        samples, tokens, seconds = counted if self._groups.size == 1 else self._groups.sum(counted)
        state.timestamp = state.timestamp.with_counts(samples=int(samples), tokens=int(tokens), seconds=seconds)
        before = self._record
        self._record = (before[0] + int(samples), before[1] + int(tokens), before[2] + seconds)
        self.samples = self.tokens = self._more_samples = self._more_tokens = self._loaded = self._loaded_tokens = 0
        self._seconds = 0.0

    def since_record(self) -> tuple[int, int, float]:
        """Return how many samples, tokens and seconds of training there were since the last call of this method."""
        record, self._record = self._record, (0, 0, 0.0)
        return record

    def seconds_since_record(self) -> float:
        """Return the seconds of training since the last metrics record, as measured in this process."""
        running = time.perf_counter() - self._running_since if self._running_since is not None else 0.0
        return self._record[2] + self._seconds + running

    def state_dict(self) -> dict[str, Any]:
        """Return two sets of counts: those that are not in the run's timestamp yet, and those that are in no metrics record yet.

        The first are samples, tokens and seconds since the last call of `update_timestamp`, added up over all ranks. The second
        were added to the timestamp since the last metrics record. This is a collective.
        """
        here = [self.samples, self.tokens, self._seconds if self._groups.rank == 0 else 0.0]
        samples, tokens, seconds = self._groups.sum(here)
        return {"samples": int(samples), "tokens": int(tokens), "seconds": seconds, "record": list(self._record)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the counts that `state_dict` returned. Rank 0 gets the counts of all ranks, so a run may resume with more or fewer ranks."""
        is_counted = self._groups.rank == 0
        self.samples, self.tokens = (state["samples"], state["tokens"]) if is_counted else (0, 0)
        self._seconds = state["seconds"] if is_counted else 0.0
        self.resumed_samples = self._loaded = state["samples"]
        self._loaded_tokens = state["tokens"]
        samples, tokens, seconds = state["record"]
        self._record = (samples, tokens, seconds)
