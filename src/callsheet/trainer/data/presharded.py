"""The data strategy `presharded`, for a dataloader that already yields only its rank's part of the data.

A single process uses this strategy too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe

from callsheet.core.randomness import same_random_state
from callsheet.run.process_groups import Pending, ProcessGroups
from callsheet.trainer.data.loaders import (
    datasets,
    drop,
    is_repeatable,
    keeps_position,
    kind_of,
    length_of,
    makes_own_batches,
    random_state_of,
    rebuilt,
    restore_random_state_of,
    restore_samplers,
    samplers,
    set_loader_epoch,
)
from callsheet.trainer.data.order import Order
from callsheet.trainer.data.seeded import SeededDataset, SeededStream, cpu_random_state, mix
from callsheet.trainer.data.strategies import SharedBatches, empty_ranks

logger = logging.getLogger("callsheet")

_END_OF_DATA: Any = object()
_GENERATOR_NAMES = {"python": "Python's random state", "numpy": "NumPy's random state", "torch": "torch's random state"}


class PreshardedData:
    """The strategy `presharded`: each rank uses its own dataloader. Its dataset or sampler is wrapped if a resume requires that.

    A dataloader with `state_dict` and `load_state_dict` saves its position within an epoch. For any other dataloader, a resumed
    run restores the random states of the epoch's start, draws the batches that were already trained on, and discards them. If the
    dataset of a DataLoader is a `SeededDataset`, these batches are skipped instead.

    Persistent workers keep their random states from one epoch to the next, because a DataLoader seeds workers only when it starts
    them. So if workers are persistent, the dataset is wrapped in a `SeededDataset` or a `SeededStream`, and the loader draws the
    workers' seeds from a separate generator. The sampler of a map-style dataset is replaced by an `Order`, which calls `iter` of
    the sampler once per epoch.

    Args:
        seed: the seed of augmentation in persistent workers.
        sets_epoch: whether to call `set_epoch` of the user's samplers and datasets; False if the user's training loop does so.
    """

    strategy = "presharded"
    in_all = None

    def __init__(self, loader: Any, groups: ProcessGroups, argument: str, seed: int = 0, *, sets_epoch: bool = True) -> None:
        self._given = loader
        self._groups = groups
        self._argument = argument
        self._seed = seed
        self._sets_epoch = sets_epoch
        self._order: Order | None = None
        self._wrapper: SeededDataset | SeededStream | None = None
        self._loader = self._repeatable(loader)
        self._at_start: dict[str, Any] | None = None
        self._shared: _PreshardedBatches | None = None
        self._warned: set[str] = set()
        self.length = self._agree_on_length()

    def begin(self, epoch: int | None, start: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Return the batches of an epoch, and store the random states at its start."""
        if start is None:
            return self._share_batches(self._open(epoch), 0)
        restore_random_state_of(self._given, start)
        has_states = restore_samplers(self._given, start, self._argument)
        self._warn_of_workers(is_new_epoch=True)
        if epoch is not None and epoch > 1 and self._loader is not self._given and hasattr(self._loader, "state_dict"):
            # Starting persistent workers draws random numbers. An uninterrupted run starts its workers only in the first epoch.
            # Therefore, start the workers here, and then restore the random states.
            iter(self._loader)
            restore_random_state_of(self._given, start)
        return self._share_batches(self._open(epoch, start if has_states else None), 0)

    def resume(self, epoch: int, taken: int, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Any]:
        """After a resume, return the remaining batches of an epoch. The class docstring says how the position is reached."""
        loader, start = self._given, saved["at_start"]
        restore_random_state_of(loader, start)
        if saved["has_ended"]:  # when the state was saved, this rank had no batches left in the epoch, but other ranks had
            self._at_start = start
            return self._share_batches(iter(()), taken, has_ended=True)
        if saved["loader"] is not None and hasattr(loader, "load_state_dict") and not self._must_redraw(saved["loader"]):
            self._warn_of_workers(is_new_epoch=False)
            self._loader.load_state_dict(saved["loader"])
            return self._share_batches(self._open(epoch), taken)
        restored = start if restore_samplers(loader, start, self._argument) else None
        self._warn_of_workers(is_new_epoch=False)
        if taken and self._can_skip():
            batches = self._open(epoch, restored, skipped=taken)
        else:
            batches = self._open(epoch, restored)
            self._draw_again(batches, taken, epoch, now)
        self._at_start = start
        if self._order is not None and not self._order.is_at(saved["order"]):
            self._warn_of_order()
        return self._share_batches(batches, taken)

    def position(self, taken: int) -> dict[str, Any]:
        """Return the position in the epoch, for a checkpoint.

        The position contains the random states at the epoch's start, and the dataloader's state if there is one.
        """
        has_ended = self._shared is not None and self._shared.ended_after is not None and self._shared.ended_after <= taken
        keeps_position = hasattr(self._loader, "state_dict") and not has_ended
        return {
            "at_start": self._at_start,
            "loader": self._loader.state_dict() if keeps_position else None,
            "has_ended": has_ended,
            "order": self._order.position(taken) if self._order is not None else None,
        }

    def count_remaining(self, taken: int) -> int | None:
        """Return how many batches of the epoch are left, or None if the length is unknown.

        The length is that of the rank with the most batches; the other ranks get fillers.
        """
        return self.length - taken if self.length is not None else None

    def _repeatable(self, loader: Any) -> Any:
        """Return the loader or, if it cannot repeat an epoch after a resume, a copy with a wrapped dataset or sampler."""
        if (
            not isinstance(loader, DataLoader)
            or makes_own_batches(loader)
            or isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
        ):
            return loader
        is_persistent = loader.persistent_workers and loader.num_workers > 0
        is_stream = isinstance(loader.dataset, IterableDataset)
        has_state = keeps_position(loader)
        is_checked = not is_stream and not has_state and not all(map(is_repeatable, samplers(loader)))
        if not is_persistent and not is_checked and not isinstance(loader.dataset, SeededDataset):
            return loader
        source: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        changes: dict[str, Any] = {}
        if has_state:
            if not is_persistent:
                return loader
        elif is_stream:
            changes["dataset"] = self._wrapper = SeededStream(loader.dataset, mix(self._seed, self._groups.rank))
        else:
            source = self._order = Order(source, is_checked=is_checked)
            if is_persistent and not isinstance(loader.dataset, SeededDataset):
                changes["dataset"] = self._wrapper = SeededDataset(loader.dataset, self._seed)
        if is_persistent:
            changes["generator"] = torch.Generator().manual_seed(mix(self._seed))
        if is_stream:
            changes |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_sampler is not None:
            changes["batch_sampler"] = source
        else:
            changes |= {"sampler": source, "batch_size": None}
        return rebuilt(loader, kind_of(loader) if has_state else DataLoader, **changes)

    def _open(self, epoch: int | None, restored: Mapping[str, Any] | None = None, *, skipped: int = 0) -> Iterator[Any]:
        """Begin an epoch of the dataloader, and return an iterator over its batches.

        `restored` holds the random states at the epoch's start if a sampler has loaded a state, and otherwise is None.
        """
        if epoch is not None:
            if self._sets_epoch:
                set_loader_epoch(self._given, epoch)
            if self._wrapper is not None:
                self._wrapper.set_epoch(epoch - 1)
        self._at_start = random_state_of(self._given)
        if self._order is not None:
            self._order.begin(partial(restore_random_state_of, self._given, restored) if restored is not None else None)
            if skipped:
                # A loader draws a seed for its workers before it draws the order. Draw such a seed here too, to get the same order.
                if self._loader.generator is self._given.generator:
                    torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
                self._order.skip(skipped, epoch)
        batches: Iterator[Any] = iter(self._loader)
        if isinstance(self._wrapper, SeededStream) and self._wrapper.has_changed:
            self._warn(
                f"a resumed run will not get the same batches: {type(self._given.dataset).__name__} has changed attributes of its own in "
                "persistent workers, and checkpoints do not hold them. Have it depend on set_epoch(epoch), or use persistent_workers=False"
            )
        return batches

    def _draw_again(self, batches: Iterator[Any], taken: int, epoch: int, now: Mapping[str, Any]) -> None:
        """Draw and discard the batches that were already trained on. Warn if they may differ from those of the earlier run."""
        drop(batches, min(taken, 1), epoch)
        first = cpu_random_state()
        drop(batches, taken - 1, epoch)
        if isinstance(self._loader, DataLoader) and not isinstance(self._loader.dataset, IterableDataset):
            return  # no warning is needed: the samples of a map-style dataset are independent, and their order was checked
        last, then = cpu_random_state(), now["global"]
        shared = [
            _GENERATOR_NAMES[name]
            for name in last.keys() & then.keys()
            if not same_random_state({name: first[name]}, {name: last[name]})
            and not same_random_state({name: last[name]}, {name: then[name]})
        ]
        if shared:
            self._warn(
                f"{type(self._given).__name__} draws from {' and '.join(sorted(shared))} while it is iterated over, and so does training. "
                "The batches are exact only if what is drawn for one does not depend on what was drawn for those before it, as in a "
                "shuffle buffer. Have it draw from a generator in an attribute of its own, or give it state_dict and load_state_dict"
            )

    def _must_redraw(self, state: Mapping[str, Any]) -> bool:
        """Return whether a resume must draw the earlier batches again, instead of loading the dataloader's saved `state`.

        This is so for a StatefulDataLoader without workers over an iterable dataset without state. The loader would also draw the
        batches again, but only the caller checks them.
        """
        loader = self._given
        if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset) or loader.num_workers:
            return False
        fetched: Any = state.get("fetcher_state") or {}
        return state.get("dataset_state") is None and fetched.get("dataset_iter_state") is None

    def _can_skip(self) -> bool:
        return self._order is not None and isinstance(self._loader.dataset, SeededDataset)

    def _warn_of_order(self) -> None:
        own = [type(sampler).__name__ for sampler in samplers(self._given) if not is_repeatable(sampler)]
        self._warn(
            f"{' and '.join(own)} did not repeat the batches that it gave before the checkpoint, so samples are seen twice "
            "or not at all in this epoch. Have it draw from a generator in an attribute of its own, such as self.generator, or give "
            "it state_dict and load_state_dict"
        )

    def _warn_of_workers(self, *, is_new_epoch: bool) -> None:
        """Warn if the loader's workers cannot give the same batches again in a resumed run."""
        loader = self._given
        if not isinstance(loader, DataLoader) or not loader.num_workers:
            return
        name, count = type(loader).__name__, loader.num_workers
        if not getattr(loader, "in_order", True):
            self._warn(
                f"{name}(in_order=False) returns batches as they become ready, so their order is not reproducible. Leave in_order out"
            )
        if any(isinstance(one, SeededDataset) for one in datasets(loader)):
            return
        if keeps_position(loader):
            if not is_new_epoch or loader.persistent_workers:
                advice = (
                    "let its dataset draw from generators that its state_dict holds"
                    if isinstance(loader.dataset, IterableDataset)
                    else "wrap its dataset in callsheet.trainer.SeededDataset(dataset, seed) to make both exact"
                )
                self._warn(
                    f"the order is resumed exactly, augmentation is not: a {name} does not save the random states of its {count} workers; {advice}"
                )
        elif loader.persistent_workers and self._loader is loader:
            self._warn(
                f"the batches of its {count} persistent workers may differ from those of an unbroken run: a {name} over a "
                f"{type(loader.dataset).__name__} loads them in its own way. Use a plain DataLoader, or persistent_workers=False"
            )

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s: %s", self._argument, what)

    def _share_batches(self, batches: Iterator[Any], taken: int, *, has_ended: bool = False) -> Iterator[Any]:
        if self._groups.size == 1:
            return batches
        self._shared = _PreshardedBatches(batches, self._groups, self._argument, length_of(self._given), taken, self._first_again)
        self._shared.ended_after = taken if has_ended else None
        return self._shared

    def _first_again(self) -> Any:
        """Return the epoch's first batch again. It is the filler of a rank that has no more batches while other ranks still do."""
        now = random_state_of(self._given)
        restore_random_state_of(self._given, self._at_start or now)
        if self._order is not None:
            self._order.begin()
        first = next(iter(self._loader))
        restore_random_state_of(self._given, now)
        return first

    def _agree_on_length(self) -> int | None:
        length = length_of(self._given)
        longest, is_unknown, is_empty = self._groups.max([length or 0, length is None, length == 0])
        if is_empty:
            raise empty_ranks(self._groups, self._argument, length == 0)
        return None if is_unknown else int(longest)


class _PreshardedBatches(SharedBatches):
    """One rank's batches, followed by fillers (repeated batches that are not counted) until all ranks have used their batches.

    The filler is the rank's first batch, because a resumed run can find that batch again.

    If all lengths are known, the ranks agree on the length at the first batch. Otherwise, a reduction at every batch finds out
    whether any rank still has a batch. A rank that has a batch continues at once, because it knows that the answer is yes. Only
    ranks without a batch wait for the reduction.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        groups: ProcessGroups,
        argument: str,
        length: int | None,
        taken: int,
        first_again: Callable[[], Any],
    ) -> None:
        super().__init__(batches)
        self._groups = groups
        self._argument = argument
        self._length = length
        self._is_agreed = False
        self._fetched = taken
        self._first = _END_OF_DATA
        self._first_again = first_again
        self._answer: Pending | None = None
        self.ended_after: int | None = None
        """How many batches this rank had in the epoch, without fillers; None until its dataloader has ended."""

    def __next__(self) -> Any:
        if self._is_agreed and self._fetched == self._length:
            raise StopIteration
        batch = next(self._batches, _END_OF_DATA) if self.ended_after is None else _END_OF_DATA
        self.is_filler = batch is _END_OF_DATA
        if self.is_filler and self.ended_after is None:
            self.ended_after = self._fetched
        if not self._any_has(not self.is_filler):
            raise StopIteration
        if not self._fetched:
            self._first = batch
        self._fetched += 1
        self.samples_here = 0 if self.is_filler else None
        if self.is_filler and self._first is _END_OF_DATA:
            self._first = self._first_again()
        return self._first if self.is_filler else batch

    def _any_has(self, has: bool) -> bool:
        """Return whether any rank still has a batch. `has` says whether this rank has a batch."""
        if not self._is_agreed:
            return self._agree(has)
        if self._length is not None:
            return True
        if self._answer is not None:
            self._answer.wait()  # the reduction that was begun for the previous batch must end before a new reduction begins
        self._answer = answer = self._groups.begin_max([has])
        if has:
            return True
        self._answer = None
        return answer.wait()[0] > 0

    def _agree(self, has: bool) -> bool:
        is_empty = not has and not self._fetched
        longest, is_unknown, any_empty, any_has = self._groups.max([self._length or 0, self._length is None, is_empty, has])
        if any_empty:
            raise empty_ranks(self._groups, self._argument, is_empty)
        self._is_agreed = True
        self._length = None if is_unknown else int(longest)
        return bool(any_has) if self._length is None else self._fetched < self._length
