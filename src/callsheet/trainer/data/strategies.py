"""What the three ways of sharing data have in common: an epoch's batches that say what each counts, and a place in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from callsheet.errors import ConfigError
from callsheet.trainer.process_groups import ProcessGroups

CountSamples = Callable[[Any], int]


class SharedBatches(Iterator[Any]):
    """This rank's batches of one epoch. What stands in its attributes is of the batch that `next` gave last."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.samples_here: int | None = None
        """How many samples of the batch count, 0 for a filler; None where only the batch itself can tell."""
        self.samples_in_all: int | None = None
        """How many samples count in this rank's and the others' batches together; None where nobody can tell without asking them."""
        self.is_filler = False
        """The batch counts nothing: it is there because other ranks have one more."""

    def __next__(self) -> Any:
        return next(self._batches)


class Sharing(Protocol):
    """One of the three ways, for one dataloader."""

    way: str

    @property
    def length(self) -> int | None:
        """How many batches each rank takes in a whole epoch, where that is known."""

    @property
    def in_all(self) -> int | None:
        """How many samples, or batches, there are to be shared in an epoch; None where that is not known, or they are not shared."""

    def begin(self, epoch: int | None, start: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """The batches of an epoch, counted from 1; None for an evaluation, which is the same each time.

        `start` is what a checkpoint at the end of the epoch before holds of the dataloader (`random_state_of`).
        """

    def resume(self, epoch: int, taken: int, place: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Any]:
        """The batches of an epoch from a place in it, where this rank had taken so many, and its random states were `now`."""

    def place(self, taken: int) -> dict[str, Any]:
        """Where in its epoch the data is once so many batches have been taken: plain data and tensors."""

    def left(self, taken: int) -> int | None:
        """How many batches this rank has still to take in the epoch."""


def empty_ranks(world: ProcessGroups, argument: str, is_empty: bool) -> ConfigError:
    """The error for all ranks where some have no batch. A collective."""
    ranks = [rank for rank, has_none in enumerate(world.gather(is_empty)) if has_none]
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"the ranks {', '.join(map(str, ranks))}"
    return ConfigError(
        f"{argument} has no batches on {named} of {world.size}; give every rank some of the data, or the whole data to all ranks "
        "(shard_data=True), which are then given their shares"
    )
