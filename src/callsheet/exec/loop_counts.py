"""Counts the samples and tokens of an observed training loop's steps."""

from __future__ import annotations

from callsheet.bridges.hosted_run import HostedRun
from callsheet.exec.loop_batches import NO_DATA, LoopBatches

_UNKNOWN = (0, 0)
"""The numbers of samples and tokens if they are unknown."""


class LoopCounts:
    """Counts the samples and tokens of the open step in `run.counted`: those of all microbatches whose losses were not discarded.

    Args:
        run: the run of the loop.
        batches: the batches of the loop.
    """

    def __init__(self, run: HostedRun, batches: LoopBatches) -> None:
        self._run = run
        self._batches = batches
        # The numbers of samples and tokens of the latest microbatch, and those of the latest microbatch whose loss was discarded.
        self._of_microbatch = self._discarded = _UNKNOWN

    def begin_step(self) -> None:
        """Count a new step from zero."""
        self._run.counted = self._of_microbatch = self._discarded = _UNKNOWN

    def set(self, counts: tuple[int, int]) -> None:
        """Set the samples and tokens of the open step, which has one microbatch."""
        self._run.counted = self._of_microbatch = counts

    def add_microbatch(self, *, keeps_batch: bool, is_in_closure: bool) -> bool:
        """Count the samples and tokens of a new batch. Without a new batch, count the batch whose loss was discarded last.

        Args:
            keeps_batch: whether a callback may read the batch during the step.
            is_in_closure: whether the optimizer is calling a closure.

        Returns:
            Whether the batch is new, and its number of samples is known.
        """
        batches, counts = self._batches, _UNKNOWN
        if batches.new is not None:
            counts = batches.counts_of(batches.new)
            batches.latest, batches.new = batches.new if keeps_batch and batches.new is not NO_DATA else None, None
        is_known = counts != _UNKNOWN
        if is_known:
            self._of_microbatch = counts
        else:
            counts = self._discarded
        before = self._run.counted
        if before == _UNKNOWN:
            self._run.counted = counts
        elif not is_in_closure:  # the optimizer may call a closure several times, so count the samples once
            self._run.counted = before[0] + counts[0], before[1] + counts[1]
        self._discarded = _UNKNOWN
        return is_known

    def discard(self, *, is_in_microbatch: bool) -> None:
        """Exclude earlier microbatches from the step, because the script has discarded the gradients of their losses.

        If `is_in_microbatch`, keep the counts of the open microbatch, because its loss is still to come.
        """
        if is_in_microbatch:
            self._run.counted = self._of_microbatch
        else:
            self._run.counted, self._discarded = _UNKNOWN, self._of_microbatch

    def restore_discarded(self) -> None:
        """Count the microbatch whose loss was discarded, if there is one, because `backward` is called on another loss of its outputs."""
        if self._discarded != _UNKNOWN:
            self._run.counted, self._discarded = self._discarded, _UNKNOWN
