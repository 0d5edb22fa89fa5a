"""Warnings about mistakes in a hand-written loop, above all about a loop that continues after its training has ended."""

from __future__ import annotations

from callsheet.bridges.hosted_run import HostedRun
from callsheet.run.lifetime import stop_reason


class LoopWarnings:
    """Warns about mistakes in a hand-written loop. Each warning is logged once, on rank 0.

    Args:
        run: the run of the loop.
    """

    def __init__(self, run: HostedRun) -> None:
        self._run = run
        self.is_end_logged = False
        """Whether a message has already said that training has ended, or that the resumed run was already complete."""

    def warn_of_repeated_epochs(self) -> None:
        """Warn that the loop of a resumed run does not leave out the epochs that were complete before the resume."""
        done = self._run.state.baseline.epoch
        self._warn(
            f"the run was resumed after {done} complete epoch{'s' * (done > 1)}. A loop `for epoch in range(n):` does not leave these out, and "
            "trains too long: write `for epoch in run.epochs(n):`"
        )

    def warn_of_complete_run(self, why: str, longer: str) -> None:
        """Warn that nothing is trained, because the resumed run was already complete."""
        run, self.is_end_logged = self._run.ctx.run, True
        self._warn(
            f"{run.folder or run.name} is complete at step {self._run.ctx.step}: {why}, and no further step is taken. To train longer, give "
            f"{longer}. To train from the start, leave out resume= and give another run_name"
        )

    def warn_of_end(self) -> None:
        """Warn that `steps` yields no batches because training has ended."""
        if self.is_end_logged:
            return
        self.is_end_logged = True
        run = self._run
        stop, received = run.control.stop_requested, run.agreement.signal
        if stop is not None:
            why = stop_reason(stop)
        else:
            why = f"signal {received.name}" if received is not None else f"reached max_duration, {run.state.max_duration}"
        self._warn(
            f"training has ended at step {run.ctx.step} ({why}), so run.steps() yields no more batches, but the loop around it continues. Write "
            "`for epoch in run.epochs(n):` instead of `for epoch in range(n):`, or leave the loop if run.is_over"
        )

    def warn_of_ignored_results(self) -> None:
        """Warn that an evaluation's results are ignored, unless another warning has already said that training has ended."""
        if not self.is_end_logged:
            self._warn(
                "run.evaluated() was called a second time without a training step in between, so its results are ignored. Give the results of "
                "all datasets in one call: run.evaluated({'validation': {...}, 'test': {...}})"
            )

    def warn_of_early_step(self, given: int, batches: int) -> None:
        """Warn that the loop steps the optimizer more often than `gradient_accumulation_steps=` says."""
        self._warn(
            f"the loop has stepped the optimizer after batch {given} of {batches}. With gradient_accumulation_steps={batches}, callsheet counts "
            f"{batches} batches of an epoch as one step, so its counts and losses differ from the loop's. Give the number of batches after "
            "which the loop steps the optimizer, and begin each epoch with a new step"
        )

    def _warn(self, message: str) -> None:
        if self._run.ctx.run.is_world_process_zero:
            self._run.driver.warn_once(message)
