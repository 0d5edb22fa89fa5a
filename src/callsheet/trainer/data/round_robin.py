"""The data strategy `round_robin`: every rank iterates over all batches of an iterable, and keeps every n-th, for n ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from callsheet.errors import ConfigError
from callsheet.run.process_groups import ProcessGroups
from callsheet.trainer.data.loaders import (
    drop,
    generators,
    length_of,
    restore_random_state_of,
    restore_samplers,
    samplers,
    set_loader_epoch,
)
from callsheet.trainer.data.seeded import RandomStream, mix
from callsheet.trainer.data.strategies import CountSamples, SharedBatches


class RoundRobinData:
    """The strategy `round_robin`: all ranks iterate over the same iterable. Of every n batches, each of the n ranks keeps one.

    The iteration has its own random states, which are seeded by `seed` and the epoch. So the batches are the same on all ranks,
    even if the ranks draw different random numbers elsewhere.
    """

    strategy = "round_robin"

    def __init__(self, loader: Any, groups: ProcessGroups, seed: int, argument: str, count_samples: CountSamples | None) -> None:
        self._loader = loader
        self._groups = groups
        self._seed = seed
        self._argument = argument
        self._count_samples = count_samples
        self._batches: _RoundRobinBatches | None = None
        self.in_all = length_of(loader)
        self.length = math.ceil(self.in_all / groups.size) if self.in_all is not None else None
        known = -1 if self.in_all is None else self.in_all
        longest, shortest = groups.max([known, -known])
        if longest != -shortest:
            raise ConfigError(
                f"{argument} has {self.in_all} batches on rank {groups.rank}, and not the same number on all ranks; "
                "give the same data on every rank, or shard_data=False where each rank has its own share of it"
            )

    def begin(self, epoch: int | None, start: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Begin an epoch and return this rank's batches."""
        if start is not None:
            restore_random_state_of(self._loader, start)
            restore_samplers(self._loader, start, self._argument)
        return self._open(epoch, RandomStream(mix(self._seed, epoch or 0)), 0)

    def resume(self, epoch: int, taken: int, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Any]:
        """After a resume, load the dataloader's position or draw the earlier batches again, and return the epoch's remaining batches.

        The number of ranks may have changed since the epoch began.
        """
        keeps_position = saved["loader"] is not None and hasattr(self._loader, "load_state_dict")
        if keeps_position:
            self._loader.load_state_dict(saved["loader"])
        stream = RandomStream(mix(self._seed, epoch))
        batches = self._open(epoch, stream, saved["drawn"])
        if keeps_position:
            stream.state = dict(saved["stream"])
        else:
            batches.drop(saved["drawn"], epoch)
        return batches

    def position(self, taken: int) -> dict[str, Any]:
        """Return the position in the epoch: how many batches were drawn, the dataloader's state, and random states."""
        assert self._batches is not None
        return {
            "drawn": self._batches.drawn,
            "loader": self._loader.state_dict() if hasattr(self._loader, "state_dict") else None,
            "stream": self._batches.stream.state,
        }

    def count_remaining(self, taken: int) -> int | None:
        """Return how many batches of the epoch this rank has left."""
        drawn = self._batches.drawn if self._batches is not None else 0
        return math.ceil((self.in_all - drawn) / self._groups.size) if self.in_all is not None else None

    def _open(self, epoch: int | None, stream: RandomStream, drawn: int) -> _RoundRobinBatches:
        if epoch is not None:
            set_loader_epoch(self._loader, epoch)
        for generator in generators(self._loader, *samplers(self._loader)):
            generator.manual_seed(mix(self._seed, epoch or 0))
        with stream:
            batches = iter(self._loader)
        self._batches = _RoundRobinBatches(batches, stream, self._groups, drawn, self._count_samples)
        return self._batches


class _RoundRobinBatches(SharedBatches):
    def __init__(
        self, batches: Iterator[Any], stream: RandomStream, groups: ProcessGroups, drawn: int, count_samples: CountSamples | None
    ) -> None:
        super().__init__(batches)
        self._groups = groups
        self._count_samples = count_samples
        self.stream = stream
        self.drawn = drawn

    def drop(self, count: int, epoch: int) -> None:
        with self.stream:
            drop(self._batches, count, epoch)

    def __next__(self) -> Any:
        rank = self._groups.rank
        with self.stream:
            turn = list(islice(self._batches, self._groups.size))
        if not turn:
            raise StopIteration
        self.drawn += len(turn)
        self.is_filler = rank >= len(turn)
        if self._count_samples is not None:
            counts = [self._count_samples(batch) for batch in turn]
            self.samples_here, self.samples_in_all = 0 if self.is_filler else counts[rank], sum(counts)
        return turn[0 if self.is_filler else rank]
