"""What stands in a run's folder when the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from callsheet.context import Context


def records_before(ctx: Context, steps: Sequence[int], counted: int | None) -> int:
    """How many of the records that stand in the run's folder, by their steps, are of this run's past; told at `on_checkpoint_load_end`.

    `counted` is how many the checkpoint says. Without that the steps have to do; and none is, where the run begins anew or is a fork.
    """
    resumed = ctx.checkpoint
    if resumed is None or not _is_own(ctx, resumed.path):
        return 0
    if counted is not None:
        return min(counted, len(steps))  # the machine may have lost some that the checkpoint counts
    return sum(step <= resumed.step for step in steps)


def _is_own(ctx: Context, checkpoint: str) -> bool:
    """Whether a checkpoint is this run's: it stands in its folder, or where its checkpoints are kept."""
    run = ctx.run
    if "://" in run.checkpoints:
        return checkpoint.startswith(f"{run.checkpoints.rstrip('/')}/")
    places = [Path(place).absolute() for place in (run.folder, run.checkpoints) if place]
    return "://" not in checkpoint and any(Path(checkpoint).absolute().is_relative_to(place) for place in places)
