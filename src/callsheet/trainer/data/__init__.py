"""The data of a run: which batches each rank takes. All ranks take equally many, and each knows what its batches count.

There are three ways to share the data, chosen once for each dataloader:

- split (`resampled`): a DataLoader over samples with indices gets a batch sampler that gives each rank its own samples.
- dealt (`round_robin`): every rank iterates over all batches of any other iterable, the same on all ranks, and keeps every n-th.
- own (`presharded`): each rank's dataloader already gives its own share. A single process uses this too.

A rank that has no batch while others have one gets a filler: a real batch that counts nothing.
"""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.trainer.data.seeded import SeededDataset
    from callsheet.trainer.data.sharing import SharedLoader, shared, sharing_of
    from callsheet.trainer.data.strategies import SharedBatches, Sharing

__all__ = ["SeededDataset", "SharedBatches", "SharedLoader", "Sharing", "shared", "sharing_of"]
