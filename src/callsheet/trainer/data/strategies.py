"""The interface of the three strategies (`presharded`, `resampled`, `round_robin`) for dividing the data among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from callsheet.errors import ConfigError
from callsheet.run.process_groups import ProcessGroups

CountSamples = Callable[[Any], int]


class SharedBatches(Iterator[Any]):
    """This rank's batches of one epoch. The attributes describe the batch that `next` returned last."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.samples_here: int | None = None
        """The number of samples in this rank's batch, or 0 for a filler. None if the batch itself must be inspected to find it."""
        self.samples_in_all: int | None = None
        """The number of samples in the batches of all ranks, without fillers. None if only a collective can find this number."""
        self.is_filler = False
        """Whether the batch is a filler, which is not counted. A rank gets a filler if other ranks have one more batch."""

    def __next__(self) -> Any:
        return next(self._batches)


class Sharing(Protocol):
    """The interface of a strategy for dividing the batches of one dataloader among the ranks."""

    strategy: str

    @property
    def length(self) -> int | None:
        """How many batches each rank gets in a whole epoch; None if that is not known."""

    @property
    def in_all(self) -> int | None:
        """How many samples or batches an epoch has for all ranks together.

        None if that is not known, or if the ranks divide nothing because each has its own data.
        """

    def begin(self, epoch: int | None, start: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Return the batches of an epoch.

        The number `epoch` counts from 1. It is None for an evaluation, in which the batches are the same each time.

        `start` is the dataloader's state (`random_state_of`) from a checkpoint that was saved at the end of the previous epoch.
        """

    def resume(self, epoch: int, taken: int, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Any]:
        """Return the remaining batches of an epoch, beginning at the saved position `saved`.

        This rank had trained on `taken` batches at that position, and its random states were `now`.
        """

    def position(self, taken: int) -> dict[str, Any]:
        """Return the position in the epoch after `taken` batches, as plain data and tensors."""

    def count_remaining(self, taken: int) -> int | None:
        """Return how many batches this rank has left in the epoch."""


def empty_ranks(groups: ProcessGroups, argument: str, is_empty: bool) -> ConfigError:
    """Return the error to raise on all ranks because some ranks have no batch. All ranks must call this function."""
    ranks = [rank for rank, has_none in enumerate(groups.gather(is_empty)) if has_none]
    named = f"rank {ranks[0]}" if len(ranks) == 1 else f"the ranks {', '.join(map(str, ranks))}"
    return ConfigError(
        f"{argument} has no batches on {named} of {groups.size}; give every rank some of the data, or the whole data to all ranks "
        "(shard_data=True), which then divide it"
    )
