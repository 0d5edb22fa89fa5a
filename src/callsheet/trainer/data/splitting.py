"""Splits one order of samples between the ranks, in global batches from which every rank takes every n-th sample."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from callsheet.trainer.data.loaders import generators
from callsheet.trainer.data.seeded import mixed, seeded


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank loads of one global batch. If the rank has no sample of it, it loads another rank's as a filler, which counts
    nothing."""

    indices: list[Any]
    samples_in_all: int
    is_filler: bool

    @property
    def samples_here(self) -> int:
        """How many of the samples count."""
        return 0 if self.is_filler else len(self.indices)


@dataclass(frozen=True, slots=True)
class Split:
    """How an order is split: into global batches of `batch_size * world_size`, of which each rank takes every n-th sample.

    The shares of a global batch differ by at most one sample, every sample of the order is in exactly one share, and every rank
    has the same number of shares. If `batch_size` is None, the order consists of whole batches, and each rank takes one of them
    at a time.
    """

    batch_size: int | None
    drop_last: bool
    rank: int
    world_size: int

    @property
    def global_size(self) -> int:
        """How many entries of the order make one global batch."""
        return (self.batch_size or 1) * self.world_size

    def count(self, length: int) -> int:
        """Return how many global batches there are in an order, or in the rest of one, of this length."""
        return length // self.global_size if self.drop_last else math.ceil(length / self.global_size)

    def shares(self, order: Sequence[Any], start: int = 0) -> Iterator[Share]:
        """Yield this rank's shares of the order from `start` on."""
        for first in range(start, start + self.count(len(order) - start) * self.global_size, self.global_size):
            batch = order[first : first + self.global_size]
            part = list(batch[self.rank :: self.world_size])
            is_filler = not part
            if self.batch_size is None:
                yield Share(list(part[0] if part else batch[0]), sum(map(len, batch)), is_filler)
            else:
                yield Share(part or [batch[-1]], len(batch), is_filler)


class ShareSampler:
    """The batch sampler of one rank, with the counts of its batches.

    Args:
        source: the sampler that the order is drawn from or, if `split.batch_size` is None, a batch sampler. It has a length.
        seed: the same on all ranks; the orders depend only on it and the epoch.
    """

    def __init__(self, source: Any, split: Split, seed: int) -> None:
        self._source = source
        self._seed = seed
        self.split = split
        self.order: Sequence[Any] = ()
        """The order of the current epoch; empty before the first."""
        self.start = 0

    @property
    def length(self) -> int:
        """The length of the current epoch's order or, before the first epoch, of the source."""
        return len(self.order or self._source)

    def begin(self, epoch: int | None, start: int = 0) -> None:
        """Draw the order of an epoch; iteration begins at `start`."""
        self.order, self.start = drawn_order(self._source, mixed(self._seed, epoch or 0)), start

    def shares(self) -> Iterator[Share]:
        """Return this rank's shares of the epoch, from its start on."""
        return self.split.shares(self.order, self.start)

    def __iter__(self) -> Iterator[list[Any]]:
        return (share.indices for share in self.shares())

    def __len__(self) -> int:
        return self.split.count(self.length)


def drawn_order(source: Any, seed: int) -> Sequence[Any]:
    """Return what the sampler gives with all random states and its own generators seeded. Their states are restored."""
    if type(source) is SequentialSampler:
        return range(len(source))
    if type(source) is RandomSampler and not source.replacement and source.num_samples == len(source.data_source):
        # the same order as the sampler's, in 8 bytes per sample instead of 40
        permutation: Any = torch.randperm(source.num_samples, generator=torch.Generator().manual_seed(seed)).numpy()
        return memoryview(permutation)
    with seeded(seed, generators(source, getattr(source, "sampler", None))):
        return list(source)


def digest(order: Sequence[Any]) -> int:
    """Return a 32-bit number by which ranks can detect that their orders differ."""
    return zlib.crc32(repr((len(order), list(order[:256]), list(order[-256:]))).encode())
