"""One order of samples, split between the ranks: global batches of it, of which every rank takes every so many-th sample."""

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
    """What one rank loads of one global batch. A filler is another rank's sample, loaded because this rank has none: it counts nothing."""

    indices: list[Any]
    samples_in_all: int
    is_filler: bool

    @property
    def samples_here(self) -> int:
        """How many of them count."""
        return 0 if self.is_filler else len(self.indices)


@dataclass(frozen=True, slots=True)
class Split:
    """How an order is split: global batches of `batch_size * world_size`, dealt out sample by sample.

    The shares of a global batch differ by one sample at most, every sample of the order is in just one of them, and every rank has the
    same number. Where `batch_size` is None, the order is one of whole batches, and each rank takes one of them at a time.
    """

    batch_size: int | None
    drop_last: bool
    rank: int
    world_size: int

    @property
    def global_size(self) -> int:
        """How much of the order is one global batch."""
        return (self.batch_size or 1) * self.world_size

    def count(self, length: int) -> int:
        """How many global batches there are in an order, or a rest of one, of this length."""
        return length // self.global_size if self.drop_last else math.ceil(length / self.global_size)

    def shares(self, order: Sequence[Any], start: int = 0) -> Iterator[Share]:
        """This rank's, of the order from `start` on."""
        for first in range(start, start + self.count(len(order) - start) * self.global_size, self.global_size):
            batch = order[first : first + self.global_size]
            part = list(batch[self.rank :: self.world_size])
            is_filler = not part
            if self.batch_size is None:
                yield Share(list(part[0] if part else batch[0]), sum(map(len, batch)), is_filler)
            else:
                yield Share(part or [batch[-1]], len(batch), is_filler)


class ShareSampler:
    """The batch sampler of one rank, and what there is to know of the batches it gives.

    Args:
        source: the sampler that the order is drawn from, or, where `split.batch_size` is None, a batch sampler; it has a length.
        seed: the same on all ranks; the orders depend on it and the epoch alone.
    """

    def __init__(self, source: Any, split: Split, seed: int) -> None:
        self._source = source
        self._seed = seed
        self.split = split
        self.order: Sequence[Any] = ()
        """Of the epoch in hand; empty before the first."""
        self.start = 0

    @property
    def length(self) -> int:
        """How much there is in the order: of the epoch in hand, or, before the first, as the source says."""
        return len(self.order or self._source)

    def begin(self, epoch: int | None, start: int = 0) -> None:
        """Draw the order of an epoch; iteration gives what it holds from `start` on."""
        self.order, self.start = drawn_order(self._source, mixed(self._seed, epoch or 0)), start

    def shares(self) -> Iterator[Share]:
        """This rank's shares of the epoch, from its start on."""
        return self.split.shares(self.order, self.start)

    def __iter__(self) -> Iterator[list[Any]]:
        return (share.indices for share in self.shares())

    def __len__(self) -> int:
        return self.split.count(self.length)


def drawn_order(source: Any, seed: int) -> Sequence[Any]:
    """What the sampler gives when all random states, and generators of its own, are seeded; they are put back."""
    if type(source) is SequentialSampler:
        return range(len(source))
    if type(source) is RandomSampler and not source.replacement and source.num_samples == len(source.data_source):
        # as the sampler would, in 8 bytes a sample rather than 40
        permutation: Any = torch.randperm(source.num_samples, generator=torch.Generator().manual_seed(seed)).numpy()
        return memoryview(permutation)
    with seeded(seed, generators(source, getattr(source, "sampler", None))):
        return list(source)


def digest(order: Sequence[Any]) -> int:
    """A number of 32 bits by which ranks can see that their orders are not the same."""
    return zlib.crc32(repr((len(order), list(order[:256]), list(order[-256:]))).encode())
