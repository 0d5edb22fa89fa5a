"""The data of a run: which of the batches each rank takes, so that all take equally many and each knows what its batches count.

There are three ways, chosen once for each dataloader:

- split: a DataLoader over samples with indices is made again with a batch sampler of ours; no rank loads what another trains on.
- dealt: any other iterable, the same on all ranks, is drawn whole on each, and its batches are dealt out like cards.
- own: each rank's dataloader gives its own share already. Also the way of a single process.

Where a rank has no batch and others have, it takes a filler: a real batch, which counts nothing.
"""

from callsheet.extras import needed_by

with needed_by(__name__):
    from callsheet.trainer.data.seeded import SeededDataset
    from callsheet.trainer.data.sharing import SharedLoader, shared, sharing_of
    from callsheet.trainer.data.strategies import SharedBatches, Sharing

__all__ = ["SeededDataset", "SharedBatches", "SharedLoader", "Sharing", "shared", "sharing_of"]
