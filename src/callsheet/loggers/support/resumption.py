"""Finds out which metrics records in a run's folder are still valid after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from callsheet.core.context import Context


def records_before(ctx: Context, steps: Sequence[int], counted: int | None) -> int:
    """Return how many metrics records in the run's folder were logged before the loaded checkpoint was saved.

    Call this function at `on_checkpoint_load_end`.

    `steps` are the steps of the records.

    `counted` is the number that the checkpoint stores; if it is None, steps are compared instead. If the run starts from the
    beginning or is a fork, the result is 0.
    """
    resumed = ctx.checkpoint
    if resumed is None or not _is_own(ctx, resumed.path):
        return 0
    if counted is not None:
        return min(counted, len(steps))  # the file has fewer records if some were lost when the machine crashed
    return sum(step <= resumed.step for step in steps)


def _is_own(ctx: Context, checkpoint: str) -> bool:
    """Return whether a checkpoint is in this run's folder or in the run's folder of checkpoints."""
    run = ctx.run
    if "://" in run.checkpoints:
        return checkpoint.startswith(f"{run.checkpoints.rstrip('/')}/")
    places = [Path(place).absolute() for place in (run.folder, run.checkpoints) if place]
    return "://" not in checkpoint and any(Path(checkpoint).absolute().is_relative_to(place) for place in places)
