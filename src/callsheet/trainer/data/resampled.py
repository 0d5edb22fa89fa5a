"""The data strategy `resampled`: the samples of a map-style DataLoader are split between the ranks by a batch sampler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from callsheet.errors import ConfigError
from callsheet.run.process_groups import ProcessGroups
from callsheet.trainer.data.loaders import (
    batching,
    makes_own_batches,
    rebuilt,
    restore_random_state_of,
    restore_samplers,
    set_loader_epoch,
)
from callsheet.trainer.data.seeded import SeededDataset
from callsheet.trainer.data.splitting import Share, ShareSampler, Split, digest
from callsheet.trainer.data.strategies import SharedBatches


class ResampledData:
    """The strategy `resampled`: a DataLoader's samples are split between the ranks, in an order that depends on `seed` and epoch.

    The dataset is wrapped in a `SeededDataset`. The position in an epoch is the number of samples that all ranks together have
    trained on. So any number of ranks can continue from the position, and a resume loads no samples to reach it.
    """

    strategy = "resampled"

    def __init__(self, loader: DataLoader[Any], groups: ProcessGroups, seed: int, argument: str) -> None:
        if makes_own_batches(loader):
            raise ConfigError(
                f"{argument} is a {type(loader).__name__}, which overrides how batches are made, so it cannot be split between "
                "the ranks; let each rank's loader give its own share (with a torch DistributedSampler), and set shard_data=False"
            )
        self._groups = groups
        self._given = loader
        self._argument = argument
        source, batch_size, drop_last = batching(loader)
        self._split = Split(batch_size, drop_last, groups.rank, groups.size)
        self._sampler = ShareSampler(source, self._split, seed)
        dataset: Any = loader.dataset
        self._loader = rebuilt(
            loader,
            dataset=dataset if isinstance(dataset, SeededDataset) else SeededDataset(dataset, seed),
            batch_sampler=self._sampler,
        )
        self._taken_before = 0
        """How many batches this rank had trained on when the current epoch was begun or resumed."""
        if self.in_all and not self.length:
            raise ConfigError(
                f"{argument} has {self.in_all} samples, not enough for one batch of {batch_size} on each of {groups.size} ranks, and "
                "drop_last=True; give more data, smaller batches, fewer ranks, or drop_last=False"
            )

    @property
    def length(self) -> int:
        """The number of global batches (the batches of all ranks together) in an epoch."""
        return self._split.count(self._sampler.length)

    @property
    def in_all(self) -> int:
        """The number of samples in an epoch or, if the user's batch sampler makes the batches, the number of batches."""
        return self._sampler.length

    def begin(self, epoch: int | None, start: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Begin an epoch and return this rank's batches."""
        if start is not None:
            restore_random_state_of(self._given, start)
            restore_samplers(self._given, start, self._argument)
        self._draw(epoch, 0, 0)
        return self._open()

    def resume(self, epoch: int, taken: int, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Any]:
        """After a resume, return the remaining batches of an epoch. The number of ranks may have changed since the epoch began.

        Raise ConfigError if the order of the data has changed.
        """
        self._draw(epoch, taken, saved["position"])
        if saved["order"] != digest(self._sampler.order):
            raise ConfigError(
                f"{self._argument} has {self._sampler.length} samples in epoch {epoch}, in another order than the {saved['in_all']} of the "
                "checkpoint that was saved in the middle of it: is this the same dataset and sampler?"
            )
        return self._open()

    def position(self, taken: int) -> dict[str, Any]:
        """Return the position in the epoch, for a checkpoint: how many samples were trained on, and a digest of the order."""
        return {"position": self._position(taken), "in_all": self.in_all, "order": digest(self._sampler.order)}

    def count_remaining(self, taken: int) -> int:
        """Return the number of global batches that are left in the epoch."""
        return self._split.count(self._sampler.length - self._position(taken))

    def _position(self, taken: int) -> int:
        position = self._sampler.start + (taken - self._taken_before) * self._split.global_size
        return min(position, self._sampler.length)

    def _draw(self, epoch: int | None, taken: int, position: int) -> None:
        if epoch is not None:
            set_loader_epoch(self._given, epoch)
            set_loader_epoch(self._loader, epoch)
        self._taken_before = taken
        self._sampler.begin(epoch, position)
        self._check_order()

    def _open(self) -> Iterator[Any]:
        return _ResampledBatches(iter(self._loader), self._sampler.shares())

    def _check_order(self) -> None:
        """Raise ConfigError if the order of the data differs between ranks.

        The orders can differ if a sampler depends on more than the seed, or if samples are still being added to the dataset.
        """
        found = digest(self._sampler.order)
        largest, smallest = self._groups.max([found, -found])
        if largest != -smallest:
            raise ConfigError(
                f"{self._argument}: the order of the samples ({self._sampler.length} on rank {self._groups.rank}) is not the same on all "
                "ranks; give the same dataset and sampler on every rank, or shard_data=False where each rank has its own share of the data"
            )


class _ResampledBatches(SharedBatches):
    def __init__(self, batches: Iterator[Any], shares: Iterator[Share]) -> None:
        super().__init__(batches)
        self._shares = shares

    def __next__(self) -> Any:
        batch = next(self._batches)
        share = next(self._shares)
        self.samples_here, self.samples_in_all, self.is_filler = share.samples_here, share.samples_in_all, share.is_filler
        return batch
