"""Chooses how the ranks divide the data of a dataloader."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from callsheet.run.process_groups import ProcessGroups
from callsheet.trainer.data.loaders import batching, datasets, has_items, length_of, no_batches, rebuilt, samplers
from callsheet.trainer.data.presharded import PreshardedData
from callsheet.trainer.data.resampled import ResampledData
from callsheet.trainer.data.round_robin import RoundRobinData
from callsheet.trainer.data.strategies import CountSamples, SharedBatches, Sharing

logger = logging.getLogger("callsheet")


def sharing_of(
    loader: Iterable[Any],
    groups: ProcessGroups,
    seed: int,
    *,
    argument: str,
    shard: bool = True,
    alone: bool | None = None,
    count_samples: CountSamples | None = None,
) -> Sharing:
    """Return the strategy (`presharded`, `resampled` or `round_robin`) by which the ranks divide the loader's batches. All ranks must call this function.

    Args:
        seed: the same on all ranks.
        shard: False if each rank's loader already yields only that rank's part of the data.
        alone: True if a single process uses the loader; by default, True if there is only one rank.
        count_samples: returns how many samples a batch holds.

    Raises:
        ConfigError: raised on all ranks if the loader cannot be shared, or some rank has no data.
    """
    sharing: Sharing
    if (groups.size == 1 if alone is None else alone) or not shard or _is_shared_already(loader):
        sharing = PreshardedData(loader, groups, argument, seed)
    elif isinstance(loader, DataLoader) and has_items(loader) and length_of(batching(loader)[0]) is not None:
        sharing = ResampledData(loader, groups, seed, argument)
    elif (node_loader := _split_by_node(loader, groups)) is not None:
        sharing = PreshardedData(node_loader, groups, argument, seed)
    else:
        sharing = RoundRobinData(loader, groups, seed, argument, count_samples)
    if sharing.in_all == 0:
        raise no_batches(argument)
    logger.debug("%s, a %s: its data strategy is %s on %d ranks", argument, type(loader).__name__, sharing.strategy, groups.size)
    return sharing


class SharedLoader:
    """An iterable over this rank's part of a dataloader. Each iteration starts from the beginning; see `share_loader`."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing

    @property
    def length(self) -> int | None:
        """How many batches each rank gets, including fillers; None if that is not known."""
        return self._sharing.length

    def __iter__(self) -> SharedBatches:
        batches = self._sharing.begin(None)
        return batches if isinstance(batches, SharedBatches) else SharedBatches(batches)


def share_loader(
    loader: Iterable[Any],
    groups: ProcessGroups,
    seed: int,
    *,
    argument: str,
    shard: bool = True,
    count_samples: CountSamples | None = None,
) -> SharedLoader:
    """Return this rank's part of a loader. Each iteration over this part starts from the beginning, as evaluations require.

    Each iteration yields the same batches, including fillers. Arguments and errors are those of `sharing_of`.
    """
    return SharedLoader(sharing_of(loader, groups, seed, argument=argument, shard=shard, count_samples=count_samples))


def _is_shared_already(loader: Any) -> bool:
    """Return whether a DistributedSampler or Hugging Face's `split_dataset_by_node` already divides the data among the ranks."""
    has_sampler = any(hasattr(sampler, "num_replicas") for sampler in samplers(loader))
    return has_sampler or any(getattr(dataset, "_distributed", None) is not None for dataset in datasets(loader))


def _split_by_node(loader: Any, groups: ProcessGroups) -> DataLoader[Any] | None:
    """Return a DataLoader over this rank's shards of a Hugging Face stream. Return None for any other loader."""
    hugging_face: Any = sys.modules.get("datasets")
    if hugging_face is None or not isinstance(loader, DataLoader) or not isinstance(loader.dataset, hugging_face.IterableDataset):
        return None
    from datasets.distributed import split_dataset_by_node

    dataset = split_dataset_by_node(loader.dataset, rank=groups.rank, world_size=groups.size)
    _, batch_size, drop_last = batching(loader)
    kind = type(loader) if hasattr(loader, "state_dict") else DataLoader
    return rebuilt(loader, kind, dataset=dataset, batch_size=batch_size, drop_last=drop_last)
