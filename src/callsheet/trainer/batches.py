"""Batches: the training data epoch by epoch, a run's position in the data, and moving batches to the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from callsheet.core.ranks import Ranks
from callsheet.errors import ConfigError
from callsheet.run.process_groups import ProcessGroups
from callsheet.trainer.data import Sharing, sharing_of
from callsheet.trainer.data.loaders import Loader as Loader
from callsheet.trainer.data.loaders import random_state_of, restore_random_state_of
from callsheet.trainer.data.loaders import resolve_loader as resolve_loader
from callsheet.trainer.data.strategies import CountSamples


class TrainBatches:
    """The training batches, epoch by epoch, and the run's position in the data.

    With the position, a resumed run gets the same batches as a run without interruption.

    `callsheet.trainer.data` describes how the ranks share the batches and how a resumed run returns to a position. A single
    process uses its dataloader directly.

    Args:
        groups: the ranks that share the data; None: a single process.
        seed: the seed of order and augmentation if the ranks share the data; the same on all ranks.
        shard: False if each rank's dataloader already yields only that rank's part of the data.
        count_samples: returns how many samples a batch holds.
    """

    def __init__(
        self,
        groups: ProcessGroups | None = None,
        seed: int = 0,
        *,
        shard: bool = True,
        count_samples: CountSamples | None = None,
    ) -> None:
        self._groups = groups or ProcessGroups(Ranks(), torch.device("cpu"), timeout=0)
        self.seed = seed
        """The seed of the order and augmentation of the data. After a resume, it is the seed of the run that was resumed."""
        self._shard = shard
        self._count_samples = count_samples
        self._loader: Iterable[Any] | None = None
        self._argument = ""
        self._sharing: Sharing | None = None
        self._epoch: Iterator[Any] | None = None  # the remaining batches of the current epoch
        self._resumed: Mapping[str, Any] | None = None  # the state that was loaded; None after the next call of `epoch`
        self.taken = 0
        """How many batches of the current epoch this rank has trained on, including fillers. The training loop counts them."""

    @property
    def loader(self) -> Iterable[Any] | None:
        """The dataloader that the user gave, or that the user's factory returned."""
        return self._loader

    @loader.setter
    def loader(self, loader: Loader) -> None:
        """Take the next batches from this dataloader. If `loader` is a function, call it to get the dataloader; see `load`."""
        self.load(loader)

    def load(self, loader: Loader, argument: str = "train_dataloader") -> None:
        """Set the dataloader, or call the factory that returns it. All ranks must call this method.

        Raises:
            ConfigError: the dataloader cannot be iterated over repeatedly, is empty, or cannot be shared between the ranks; or the checkpoint
                to resume was saved in the middle of an epoch that this number of ranks cannot continue.
        """
        several = self._groups.size > 1
        # With several ranks, accept an empty loader here. All ranks together check later whether a rank has no data.
        self._loader = resolve_loader(loader, argument, may_be_empty=several)
        self._argument = argument
        self._choose()

    @property
    def length(self) -> int | None:
        """How many batches a rank gets in an epoch; None if that is not known."""
        return self._sharing.length if self._sharing is not None else None

    @property
    def is_at_end(self) -> bool:
        """Whether all batches of the current epoch have been taken; False if the number of batches in an epoch is not known."""
        return self._sharing is not None and self._sharing.count_remaining(self.taken) == 0

    def epoch(self, number: int) -> Iterator[Any]:
        """Return the batches of epoch `number`, counted from 1, except those that were already trained on.

        The result is the dataloader's own iterator or, if there are several ranks, a `SharedBatches` iterator.

        Raises:
            ConfigError: the data has changed since the checkpoint, and ends before the checkpoint's position.
        """
        assert self._loader is not None
        assert self._sharing is not None
        if self._epoch is not None:  # an earlier call of `fit` stopped in the middle of this epoch
            return self._epoch
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["place"] is not None:
            self._epoch = self._sharing.resume(number, self.taken, resumed["place"], resumed["now"])
            # Creating the iterator has drawn random numbers, so restore the random states afterwards.
            restore_random_state_of(self._loader, resumed["now"])
        else:
            self._epoch = self._sharing.begin(number, resumed["now"] if resumed is not None else None)
        return self._epoch

    def end_epoch(self) -> None:
        """End the epoch. Afterwards, a checkpoint stores no position within an epoch."""
        self._epoch = None
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's random states and its position in the epoch, as plain data and tensors."""
        if self._resumed is not None:  # no batch was drawn since the state was loaded, so this state is still correct
            return dict(self._resumed)
        is_inside = self._epoch is not None and self._sharing is not None
        return {
            "now": random_state_of(self._loader),
            "taken": self.taken,
            "place": self._sharing.position(self.taken) if is_inside and self._sharing is not None else None,
            "strategy": self._sharing.strategy if self._sharing is not None else None,
            "world_size": self._groups.size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned. When the next epoch begins, training continues at the saved position.

        The random states are restored after the dataloader's iterator is created, because creating the iterator changes them.

        The state may come from a run with another world size. Then its random states are those of one rank of that run.
        """
        self._resumed = state
        self.taken, self.seed = state["taken"], state["seed"]
        if self._loader is not None:
            self._choose()

    def _choose(self) -> None:
        resumed, groups = self._resumed, self._groups
        strategy = _strategy_of(resumed) if resumed is not None else None
        assert self._loader is not None
        self._sharing = sharing_of(
            self._loader,
            groups,
            self.seed,
            argument=self._argument,
            shard=self._shard,
            # If one process resumes a run of several ranks, `alone` is False, so that the data keeps the order of those ranks.
            alone=groups.size == 1 and strategy in (None, "presharded"),
            count_samples=self._count_samples,
        )
        if self._sharing.in_all is not None and self._sharing.in_all < groups.size:
            what = "samples" if self._sharing.strategy == "resampled" else "batches"
            raise ConfigError(
                f"{self._argument} has {self._sharing.in_all} {what}, fewer than the {groups.size} ranks that train on them; give more data, "
                "or start fewer ranks"
            )
        if resumed is None or not resumed["place"]:
            return
        is_other_size = "presharded" in (strategy, self._sharing.strategy) and resumed["world_size"] != groups.size
        if strategy != self._sharing.strategy or is_other_size:
            raise ConfigError(
                f"the checkpoint was saved in the middle of an epoch of {self._argument}, which {resumed['world_size']} ranks divided by "
                f"the strategy {strategy!r}; now it is {self._sharing.strategy!r} on {groups.size} ranks: resume with "
                f"{resumed['world_size']} ranks and the same kind of data, or from a checkpoint at the end of an epoch"
            )


def _strategy_of(state: Mapping[str, Any]) -> str | None:
    """Return the strategy's name from a saved state. Old checkpoints have it under another key, with another value."""
    if "way" in state:
        return {"own": "presharded", "split": "resampled", "dealt": "round_robin"}.get(state["way"])
    name: str | None = state["strategy"]
    return name


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device. Containers are copied; other objects are returned unchanged."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return like(batch, [to_device(value, device) for value in batch])
    return batch.to(device) if hasattr(batch, "to") else batch


def like(container: Any, values: list[Any]) -> Any:
    """Return `values` as a list or tuple of the same type as `container`, which may be a named tuple."""
    return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
