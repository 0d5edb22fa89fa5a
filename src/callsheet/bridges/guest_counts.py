"""Counts of samples and tokens that guests report to a framework's callbacks."""

from __future__ import annotations

from callsheet.core.context import Context
from callsheet.trainer.tasks import counts_of


def counts_in_all(ctx: Context) -> tuple[int, int]:
    """Return how many samples and tokens all ranks have in this batch of an evaluation.

    The numbers are estimated from this rank's batch, except for the samples if the loop knows their number. A filler (a batch that
    only keeps the ranks in step) counts as other batches in the estimates, so that these are the same on all ranks.
    """
    world_size = ctx.run.world_size
    samples, tokens = counts_of(ctx.batch)
    return samples * world_size if ctx.samples_in_all is None else ctx.samples_in_all, tokens * world_size
