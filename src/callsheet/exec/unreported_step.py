"""The open step of an observed training loop, if it was not reported to the lifecycle driver, to save time."""

from __future__ import annotations

from callsheet.bridges.hosted_run import HostedRun
from callsheet.exec.loop_counts import LoopCounts
from callsheet.exec.loop_guard import LoopGuard


class UnreportedStep:
    """An open step whose start was not reported to the lifecycle driver, because no handler listens to the step.

    `LoopBackwardWatch` begins such a step with its loss, by storing the numbers of samples and tokens. `LoopOptimizerHooks` counts
    the step when it ends. If anything needs the open step earlier, `report` reports the step's start.

    Args:
        run: the run of the loop.
        counts: counts the samples and tokens of steps that are reported.
        guard: handles errors.
    """

    def __init__(self, run: HostedRun, counts: LoopCounts, guard: LoopGuard) -> None:
        self._driver = run.driver
        self._loop_counts = counts
        self._guard = guard
        self.is_allowed = False
        """Whether steps may be unreported: the model's calls are not observed, and no handler listens to events within a step."""
        self.counts: tuple[int, int] | None = None
        """The numbers of samples and tokens of the open step, if this is an unreported step; otherwise None."""

    def report(self) -> None:
        """Report the start of the open step to the lifecycle driver, if that was not done when the step began."""
        if (counts := self.counts) is not None:
            self.counts = None
            self._guard.call(self._driver.start_step)
            self._loop_counts.set(counts)

    def remove(self) -> None:
        """Forget the step, because the observation is over."""
        self.counts = None
