"""Splits an epoch's samples into global batches (the batches of all n ranks together). Each rank gets every n-th sample."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from callsheet.trainer.data.loaders import generators
from callsheet.trainer.data.seeded import mix, seeded


@dataclass(frozen=True, slots=True)
class Share:
    """The samples of one global batch (the batch of all ranks together) that one rank loads.

    If the batch has no sample for this rank, the rank loads a sample of another rank as a filler, which is not counted.
    """

    indices: list[Any]
    samples_in_all: int
    is_filler: bool

    @property
    def samples_here(self) -> int:
        """How many samples this rank adds to the run's counts; 0 for a filler, whose samples another rank counts."""
        return 0 if self.is_filler else len(self.indices)


@dataclass(frozen=True, slots=True)
class Split:
    """How the samples of an epoch, in a given order, are divided into global batches of `batch_size * world_size` samples.

    Each of the n ranks gets every n-th sample of a global batch. These samples are the rank's share.

    The shares of a global batch differ by at most one sample. Every sample of a global batch is in exactly one share, and every
    rank has the same number of shares. If `batch_size` is None, the items of the order are whole batches, and a share is one batch.
    """

    batch_size: int | None
    drop_last: bool
    rank: int
    world_size: int

    @property
    def global_size(self) -> int:
        """How many items of the order form one global batch. An item is a sample or, if `batch_size` is None, a whole batch."""
        return (self.batch_size or 1) * self.world_size

    def count(self, length: int) -> int:
        """Return how many global batches `length` samples form."""
        return length // self.global_size if self.drop_last else math.ceil(length / self.global_size)

    def shares(self, order: Sequence[Any], start: int = 0) -> Iterator[Share]:
        """Yield this rank's part of each global batch, beginning at position `start` of the order."""
        for first in range(start, start + self.count(len(order) - start) * self.global_size, self.global_size):
            batch = order[first : first + self.global_size]
            part = list(batch[self.rank :: self.world_size])
            is_filler = not part
            if self.batch_size is None:
                yield Share(list(part[0] if part else batch[0]), sum(map(len, batch)), is_filler)
            else:
                yield Share(part or [batch[-1]], len(batch), is_filler)


class ShareSampler:
    """The batch sampler of one rank. For each global batch (of all ranks together), it yields the indices of the rank's samples.

    Args:
        source: the sampler from which the order is drawn or, if `split.batch_size` is None, a batch sampler. It must have a
            length.
        seed: the same on all ranks; the orders depend only on the seed and the epoch.
    """

    def __init__(self, source: Any, split: Split, seed: int) -> None:
        self._source = source
        self._seed = seed
        self.split = split
        self.order: Sequence[Any] = ()
        """The order of the samples in the current epoch; empty before the first epoch."""
        self.start = 0

    @property
    def length(self) -> int:
        """The number of samples in the current epoch's order. Before the first epoch, it is the length of the sampler."""
        return len(self.order or self._source)

    def begin(self, epoch: int | None, start: int = 0) -> None:
        """Draw the order of an epoch. The next iteration begins at position `start` of the order."""
        self.order, self.start = draw_order(self._source, mix(self._seed, epoch or 0)), start

    def shares(self) -> Iterator[Share]:
        """Yield this rank's part of each global batch of the epoch, from the position that was passed to `begin`."""
        return self.split.shares(self.order, self.start)

    def __iter__(self) -> Iterator[list[Any]]:
        return (share.indices for share in self.shares())

    def __len__(self) -> int:
        return self.split.count(self.length)


def draw_order(source: Any, seed: int) -> Sequence[Any]:
    """Return the order that the sampler yields after all random states and the sampler's generators have been seeded.

    The states are restored afterwards.
    """
    if type(source) is SequentialSampler:
        return range(len(source))
    if type(source) is RandomSampler and not source.replacement and source.num_samples == len(source.data_source):
        # `torch.randperm` gives the same order as the sampler, but needs 8 bytes per sample instead of 40.
        permutation: Any = torch.randperm(source.num_samples, generator=torch.Generator().manual_seed(seed)).numpy()
        return memoryview(permutation)
    with seeded(seed, generators(source, getattr(source, "sampler", None))):
        return list(source)


def digest(order: Sequence[Any]) -> int:
    """Return a 32-bit checksum of an order of samples, by which ranks can detect that their orders differ."""
    return zlib.crc32(repr((len(order), list(order[:256]), list(order[-256:]))).encode())
