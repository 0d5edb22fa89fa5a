"""The data of a run: which rank gets which batches.

All ranks get equally many batches, and each rank knows how many samples of each of its batches are counted.

There are three strategies for dividing the data among the ranks. The Trainer chooses one for each dataloader:

- `resampled`: a DataLoader over a map-style dataset gets a batch sampler that gives each rank its own samples.
- `round_robin`: for any other iterable, every rank iterates over the same batches, and each of n ranks keeps every n-th.
- `presharded`: each rank's dataloader already yields only that rank's part of the data. A single process uses this strategy too.

A rank that has no batch while others have one gets a filler: a real batch whose samples are not counted.
"""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.trainer.data.seeded import SeededDataset
    from callsheet.trainer.data.sharing import SharedLoader, share_loader, sharing_of
    from callsheet.trainer.data.strategies import SharedBatches, Sharing

__all__ = ["SeededDataset", "SharedBatches", "SharedLoader", "Sharing", "share_loader", "sharing_of"]
