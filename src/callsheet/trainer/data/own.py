"""Own: each rank's dataloader gives its own share already; also the way of a single process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from callsheet.trainer.data.loaders import (
    datasets,
    drop,
    has_items,
    length_of,
    makes_own_batches,
    random_state_of,
    rebuilt,
    restore_random_state_of,
    tell_epoch,
)
from callsheet.trainer.data.seeded import SeededDataset
from callsheet.trainer.data.ways import SharedBatches, empty_ranks
from callsheet.trainer.world import Pending, World

logger = logging.getLogger("callsheet")

_END: Any = object()


class OwnData:
    """The rank's own dataloader, as it is.

    One with `state_dict` and `load_state_dict` keeps its own place within an epoch. Any other is started again from the random
    states that it started the epoch with, and what was taken is drawn again and dropped; or, where a DataLoader's dataset is a
    `SeededDataset`, skipped.
    """

    way = "own"
    in_all = None

    def __init__(self, loader: Any, world: World, argument: str) -> None:
        self._loader = loader
        self._world = world
        self._argument = argument
        self._at_start: dict[str, Any] | None = None
        self._shared: _OwnBatches | None = None
        self._is_warned = False
        self.length = self._agreed_length()

    def begin(self, epoch: int | None) -> Iterator[Any]:
        """An epoch from its beginning; what it is drawn from is kept."""
        return self._shared_out(self._open(epoch), 0)

    def resume(self, epoch: int, taken: int, place: Mapping[str, Any]) -> Iterator[Any]:
        """The rest of an epoch; see the class for how it comes there."""
        loader = self._loader
        restore_random_state_of(loader, place["at_start"])
        if place["has_ended"]:  # on this rank: others had more
            self._at_start = place["at_start"]
            return self._shared_out(iter(()), taken, has_ended=True)
        if place["loader"] is not None and hasattr(loader, "load_state_dict"):
            self._warn_of_augmentation()
            loader.load_state_dict(place["loader"])
            return self._shared_out(self._open(epoch), taken)
        if taken and self._can_skip():
            self._at_start = place["at_start"]
            rest: Any = self._rest_of_order(taken, epoch)
            return self._shared_out(iter(rebuilt(loader, batch_sampler=rest)), taken)
        batches = self._open(epoch)
        drop(batches, taken, epoch)
        return self._shared_out(batches, taken)

    def place(self, taken: int) -> dict[str, Any]:
        """The random states of the epoch's start, and the dataloader's own state where it has one."""
        has_ended = self._shared is not None and self._shared.ended_after is not None and self._shared.ended_after <= taken
        keeps_place = hasattr(self._loader, "state_dict") and not has_ended
        return {
            "at_start": self._at_start,
            "loader": self._loader.state_dict() if keeps_place else None,
            "has_ended": has_ended,
        }

    def left(self, taken: int) -> int | None:
        """What the agreed length leaves."""
        return self.length - taken if self.length is not None else None

    def _open(self, epoch: int | None) -> Iterator[Any]:
        if epoch is not None:
            tell_epoch(self._loader, epoch)
        self._at_start = random_state_of(self._loader)
        return iter(self._loader)

    def _rest_of_order(self, taken: int, epoch: int) -> Iterator[Any]:
        """What the batch sampler gives of an epoch whose random states are in force, after the batches that were taken."""
        tell_epoch(self._loader, epoch)
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)  # a loader first draws the seed of workers
        batches: Iterator[Any] = iter(self._loader.batch_sampler)
        drop(batches, taken, epoch)
        return batches

    def _shared_out(self, batches: Iterator[Any], taken: int, *, has_ended: bool = False) -> Iterator[Any]:
        if self._world.size == 1:
            return batches
        self._shared = _OwnBatches(batches, self._world, self._argument, length_of(self._loader), taken, self._first_again)
        self._shared.ended_after = taken if has_ended else None
        return self._shared

    def _first_again(self) -> Any:
        """The first batch of the epoch in hand, once this rank has drawn all of it."""
        now = random_state_of(self._loader)
        restore_random_state_of(self._loader, self._at_start or now)
        first = next(iter(self._loader))
        restore_random_state_of(self._loader, now)
        return first

    def _can_skip(self) -> bool:
        loader = self._loader
        return has_items(loader) and isinstance(loader.dataset, SeededDataset) and not makes_own_batches(loader)

    def _warn_of_augmentation(self) -> None:
        has_workers = has_items(self._loader) and self._loader.num_workers > 0
        if has_workers and not self._is_warned and not any(isinstance(one, SeededDataset) for one in datasets(self._loader)):
            self._is_warned = True
            logger.warning(
                "%s: resumed with its order exact, augmentation not: what its %d workers draw is not kept by a %s; wrap its dataset "
                "in callsheet.trainer.SeededDataset(dataset, seed) to have both",
                self._argument,
                self._loader.num_workers,
                type(self._loader).__name__,
            )

    def _agreed_length(self) -> int | None:
        length = length_of(self._loader)
        longest, is_unknown, is_empty = self._world.max([length or 0, length is None, length == 0])
        if is_empty:
            raise empty_ranks(self._world, self._argument, length == 0)
        return None if is_unknown else int(longest)


class _OwnBatches(SharedBatches):
    """A rank's own batches, and then, until all ranks have run out, its first one as a filler: that one a resumed run can find again.

    Where all lengths are known they are agreed on at the first batch. Else every batch is: whoever has one goes on at once, since then
    the answer is known; only ranks that have none wait for it, as they would for the others' gradients.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        world: World,
        argument: str,
        length: int | None,
        taken: int,
        first_again: Callable[[], Any],
    ) -> None:
        super().__init__(batches)
        self._world = world
        self._argument = argument
        self._length = length
        self._is_agreed = False
        self._fetched = taken
        self._first = _END
        self._first_again = first_again
        self._answer: Pending | None = None
        self.ended_after: int | None = None
        """How many batches this rank had of its own, once that is known."""

    def __next__(self) -> Any:
        if self._is_agreed and self._fetched == self._length:
            raise StopIteration
        batch = next(self._batches, _END) if self.ended_after is None else _END
        self.is_filler = batch is _END
        if self.is_filler and self.ended_after is None:
            self.ended_after = self._fetched
        if not self._any_has(not self.is_filler):
            raise StopIteration
        if not self._fetched:
            self._first = batch
        self._fetched += 1
        self.samples_here = 0 if self.is_filler else None
        if self.is_filler and self._first is _END:
            self._first = self._first_again()
        return self._first if self.is_filler else batch

    def _any_has(self, has: bool) -> bool:
        """Whether any rank has a batch, of which this one may be a part."""
        if not self._is_agreed:
            return self._agree(has)
        if self._length is not None:
            return True
        if self._answer is not None:
            self._answer.wait()  # to the batch before: long since there
        self._answer = answer = self._world.begin_max([has])
        if has:
            return True
        self._answer = None
        return answer.wait()[0] > 0

    def _agree(self, has: bool) -> bool:
        is_empty = not has and not self._fetched
        longest, is_unknown, any_empty, any_has = self._world.max([self._length or 0, self._length is None, is_empty, has])
        if any_empty:
            raise empty_ranks(self._world, self._argument, is_empty)
        self._is_agreed = True
        self._length = None if is_unknown else int(longest)
        return bool(any_has) if self._length is None else self._fetched < self._length
