"""Counts which batches a loop has received from callsheet, so that a resumed run returns to the same position in the data."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from callsheet.bridges.epoch_position import length_of
from callsheet.core.randomness import random_state, restore_random_state, same_random_state
from callsheet.core.ranks import Ranks
from callsheet.errors import CheckpointError, mark_as_users
from callsheet.run.process_groups import ProcessGroups
from callsheet.trainer.data.loaders import generators_of, random_state_of, restore_random_state_of
from callsheet.trainer.data.presharded import PreshardedData
from callsheet.trainer.data.seeded import mix

logger = logging.getLogger("callsheet")

_LOADER_ARGUMENT = "run.steps(dataloader)"
_MAX_SEED = (1 << 63) - 1


class DataPosition:
    """Counts how many batches of the epoch were used, and saves what a resumed run needs to get the remaining batches.

    Each epoch's batches come from a `PreshardedData`, as in a Trainer of one process. This class provides the dataloader's states
    for checkpoints, and seeds persistent workers. A loop may use one dataloader for all epochs, or make a new one for each epoch.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.is_exhausted = False
        self._length: int | None = None
        self._loader: Any = None  # the dataloader of the latest epoch
        self._data: PreshardedData | None = None  # yields the batches of the latest epoch's dataloader
        self._is_inside = False  # whether the loop is inside an epoch
        self._seed: int | None = None
        self._first: list[Any] = []  # the states of the dataloader's random generators before its first epoch
        self._epochs = 0  # how many epochs have begun with the current dataloader
        self._is_renewed = False  # whether the loop makes a new dataloader for each epoch
        self._restored: Mapping[str, Any] | None = None

    def begin(self, loader: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Return the batches of the epoch with the index `epoch`, without the batches that were used before a resume."""
        restored, self.is_exhausted = self._restored, False
        try:
            self._length = length_of(loader)
        except Exception as error:
            mark_as_users(error)  # end training instead of only logging the error, because training cannot continue without data
            raise
        if restored is not None:
            try:
                return self._restore(loader, restored, epoch)
            except Exception as error:
                mark_as_users(error)  # end training instead of only logging the error, because the requested resume has failed
                raise
        self._set(loader)
        self._is_inside = True
        if self._data is None:
            return _iterator(loader)
        try:
            return self._data.begin(epoch + 1)
        except Exception as error:
            mark_as_users(error)  # end training instead of only logging the error, because training cannot continue without data
            raise

    def begin_unobserved(self, loader: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Return the epoch's batches without saving a position, because an error in callsheet has ended the run."""
        return _iterator(loader) if self._restored is None else self.begin(loader, epoch)

    @contextmanager
    def at_checkpoint(self) -> Iterator[None]:
        """After a resume, run the `with` block with the random states that the checkpoint contains.

        The block is, for example, an evaluation that a signal prevented. It draws the same random numbers as without the resume.

        After `begin`, this context manager does nothing, because `begin` has already restored the states.
        """
        restored = self._restored
        if restored is not None:
            restore_random_state(restored["now"]["global"])
        yield
        if restored is not None:
            self._restored = {**restored, "now": {**restored["now"], "global": random_state()}}

    def end(self) -> None:
        """Reset the position to the first batch, because the epoch has ended."""
        self.taken, self._length, self._is_inside = 0, None, False

    def release(self) -> None:
        """Release the dataloader and its workers, because the run has ended."""
        self._loader = self._data = None

    @property
    def is_at_end(self) -> bool:
        """Whether every batch of the epoch has been used."""
        return self.is_exhausted or self.taken == self._length

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the position in the data, and the states of random generators, dataloader and samplers."""
        if self._restored is not None:  # `begin` was not called since a state was loaded, so return the loaded state
            return dict(self._restored)
        return {
            "taken": self.taken,
            "now": random_state_of(self._loader),
            "place": self._data.position(self.taken) if self._is_inside and self._data is not None else None,
            "seed": self._seed,
            "first": self._first,
            "epochs": self._epochs,
            "is_renewed": self._is_renewed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store a saved position, from which the next call of `begin` continues.

        Raises:
            CheckpointError: an older version of callsheet has written the checkpoint, and stored the position in another form.
        """
        if missing := [key for key in ("now", "place", "seed", "first", "epochs", "is_renewed") if key not in state]:
            raise CheckpointError(
                f"the checkpoint's position in the data has no {', '.join(missing)}: it was written by a version of callsheet 0.1.0 from "
                "before 2026-11-24, which stored the position in another form. Resume it with that version, or start a new run"
            )
        self._restored = state

    def _set(self, loader: Any) -> None:
        """Store the dataloader of an epoch, and record whether the loop makes a new dataloader for each epoch."""
        if self._seed is None:  # use torch's initial seed, because reading it draws no random number
            self._seed = mix(torch.initial_seed()) & _MAX_SEED
        if loader is self._loader:
            self._epochs, self._is_renewed = self._epochs + 1, False
            return
        self._is_renewed = self._loader is not None
        self._loader, self._first, self._epochs = loader, generators_of(loader), 1
        self._data = None
        if self._length != 0:
            # Each rank has a dataloader of its own, so use a process group that contains only this rank.
            groups = ProcessGroups(Ranks(), torch.device("cpu"), timeout=0)
            self._data = PreshardedData(loader, groups, _LOADER_ARGUMENT, self._seed, sets_epoch=False)

    def _restore(self, loader: Any, restored: Mapping[str, Any], epoch: int) -> Iterator[Any]:
        self._seed = restored["seed"]
        self._set(loader)
        fresh, self._restored = self._first, None
        self._first, self._is_renewed = restored["first"], restored["is_renewed"]
        self._epochs = restored["epochs"] + (restored["place"] is None)
        _warn_of_wrapper(loader)
        now, data = restored["now"], self._data
        self._is_inside = True
        if data is None:
            restore_random_state(now["global"])
            return iter(loader)
        if restored["place"] is not None:
            self.taken = restored["taken"]
            batches = data.resume(epoch + 1, self.taken, restored["place"], now)
            # `data.resume` has drawn random numbers, so restore the random states after this call.
            restore_random_state_of(loader, now)
            return batches
        if self._continues_loader(fresh, restored):
            return data.begin(epoch + 1, now)
        restore_random_state(now["global"])
        return data.begin(epoch + 1)

    def _continues_loader(self, fresh: list[Any], restored: Mapping[str, Any]) -> bool:
        """Return whether the loop uses one dataloader for all epochs, so that this dataloader's generator states must be restored."""
        if restored["is_renewed"] or not restored["epochs"]:
            return False
        if restored["epochs"] > 1 or _same(fresh, restored["first"]):
            return True
        logger.warning(
            "%s: the resumed run may not get the batches that an unbroken one would: the generator of the dataloader begins with another "
            "state than in the run's first process, so it is left as it is. Seed it with the same number each time",
            _LOADER_ARGUMENT,
        )
        return False


def _warn_of_wrapper(loader: Any) -> None:
    """Warn if the loader wraps a DataLoader that has its own generator or persistent workers. A resume cannot restore these."""
    if isinstance(loader, DataLoader):
        return
    for inner in getattr(loader, "__dict__", {}).values():
        if isinstance(inner, DataLoader) and (inner.generator is not None or (inner.persistent_workers and inner.num_workers)):
            what = "a generator of its own" if inner.generator is not None else "persistent workers"
            logger.warning(
                "%s: the resumed run may not get the batches that an unbroken one would: %s wraps a %s with %s, which checkpoints do not "
                "hold. Give run.steps the %s itself",
                _LOADER_ARGUMENT,
                type(loader).__name__,
                type(inner).__name__,
                what,
                type(inner).__name__,
            )
            return


def _same(fresh: list[Any], first: list[Any]) -> bool:
    return len(fresh) == len(first) and all(
        same_random_state({"state": one}, {"state": other}) for one, other in zip(fresh, first, strict=True)
    )


def _iterator(loader: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(loader)
    except Exception as error:
        mark_as_users(error)  # end training instead of only logging the error, because training cannot continue without data
        raise
