"""Counts of samples and tokens that guests report to a framework's callbacks."""

from __future__ import annotations

from callsheet.core.context import Context
from callsheet.trainer.tasks import counts_of


def counts_in_all(ctx: Context) -> tuple[int, int]:
    """Return how many samples and tokens all ranks have in this batch of an evaluation.

    Fillers (batches that only keep the ranks in step) are not counted. The numbers are estimated from this rank's batch, except for
    the samples if the loop knows their number.
    """
    world_size = ctx.run.world_size
    samples, tokens = (0, 0) if ctx.is_filler else counts_of(ctx.batch)
    return samples * world_size if ctx.samples_in_all is None else ctx.samples_in_all, tokens * world_size
