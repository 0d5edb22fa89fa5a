"""Lets a hand-written loop continue without callbacks after an error in callsheet has ended callsheet's run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from time import perf_counter
from typing import Any

from callsheet.bridges.hosted_run import HostedRun
from callsheet.core.time import TimeUnit
from callsheet.trainer.tasks import counts_of


class UnobservedLoop:
    """Yields the remaining batches without firing events, and counts steps and epochs so that training still ends at `max_duration`.

    Args:
        run: the run, which has ended.
        ends_step: returns whether a step is complete after this number of its batches.
        epoch: the epoch that the loop is in or has just left; None before the first.
        was_in_step: whether the loop was in a step when the run ended.
    """

    def __init__(self, run: HostedRun, ends_step: Callable[[int], bool], epoch: int | None, *, was_in_step: bool) -> None:
        self._state, self._ranks = run.state, run.ctx.run.world_size
        self._ends_step = ends_step
        self._epoch = epoch
        self._was_in_step = was_in_step
        # If a signal was received, the loop must end here, because nothing handles the signal after the run's end.
        self.is_over = run.signals.received is not None
        """Whether training has reached `max_duration`, or must end because of a signal."""

    def begin_epoch(self) -> None:
        """Begin the next epoch. If the loop has left the previous epoch with `break`, count that epoch first."""
        self._end_epoch()
        self._epoch = self._state.timestamp.epoch

    def rest_of_epoch(self, batches: Iterator[Any], group: Sequence[Any], given: int) -> Iterator[Any]:
        """Yield the epoch's remaining batches.

        Args:
            batches: the batches that were not fetched yet.
            group: the batches of the current step that were fetched.
            given: how many batches of the current step the loop has received.
        """
        waiting, was_in_step, self._was_in_step = group[given:], self._was_in_step, False
        if not was_in_step and not waiting:
            given = 0
        elif given and self._ends_step(given):
            given = 0
            self._count_step()
        for batch in chain(waiting, batches):
            if self.is_over:
                return
            began = perf_counter()
            given += 1
            yield batch
            self._count(batch, perf_counter() - began)
            if self._ends_step(given):
                given = 0
                self._count_step()
        if given:
            self._count_step()
        self._end_epoch()

    def _count(self, batch: Any, seconds: float) -> None:
        state, longest = self._state, self._state.max_duration
        counts_samples = longest is not None and longest.unit in (TimeUnit.SAMPLE, TimeUnit.TOKEN)
        samples, tokens = counts_of(batch) if counts_samples else (0, 0)
        state.timestamp = state.timestamp.with_counts(samples=samples * self._ranks, tokens=tokens * self._ranks, seconds=seconds)

    def _count_step(self) -> None:
        self._state.timestamp = self._state.timestamp.next_batch()
        self.is_over |= self._state.is_complete

    def _end_epoch(self) -> None:
        """Count the epoch, unless it has been counted already."""
        if self._state.timestamp.epoch == self._epoch:
            self._state.timestamp = self._state.timestamp.next_epoch()
            self.is_over |= self._state.is_complete
