"""Batches: the training data epoch by epoch, where in it a run stands, and how batches are moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from callsheet.distributed import Ranks
from callsheet.errors import ConfigError
from callsheet.trainer.data import Sharing, sharing_of
from callsheet.trainer.data.loaders import Loader as Loader
from callsheet.trainer.data.loaders import made as made
from callsheet.trainer.data.loaders import random_state_of, restore_random_state_of
from callsheet.trainer.data.strategies import CountSamples
from callsheet.trainer.process_groups import ProcessGroups


class TrainBatches:
    """The training batches, epoch by epoch, and the place in them: what a resumed run needs to draw what an unbroken one would have.

    How the ranks share them, and come back to a place in them, is said in `callsheet.trainer.data`. One process draws from its
    dataloader as it is.

    Args:
        world: the ranks that share the data; None is one process.
        seed: of orders and augmentation where data is shared; the same on all ranks.
        shard: False where each rank's dataloader gives its own share already.
        count_samples: how many samples a batch holds.
    """

    def __init__(
        self,
        world: ProcessGroups | None = None,
        seed: int = 0,
        *,
        shard: bool = True,
        count_samples: CountSamples | None = None,
    ) -> None:
        self._world = world or ProcessGroups(Ranks(), torch.device("cpu"), timeout=0)
        self.seed = seed
        """Of orders and augmentation: of the run that is resumed, where one is."""
        self._shard = shard
        self._count_samples = count_samples
        self._loader: Iterable[Any] | None = None
        self._argument = ""
        self._sharing: Sharing | None = None
        self._epoch: Iterator[Any] | None = None  # the one in progress
        self._resumed: Mapping[str, Any] | None = None  # until its epoch begins
        self.taken = 0
        """How many batches of the epoch in hand this rank has trained on, fillers included; whoever trains on them counts them."""

    @property
    def loader(self) -> Iterable[Any] | None:
        """The dataloader as it was given."""
        return self._loader

    @loader.setter
    def loader(self, loader: Loader) -> None:
        """As `load`."""
        self.load(loader)

    def load(self, loader: Loader, argument: str = "train_dataloader") -> None:
        """Take the dataloader, or what its factory makes. A collective.

        Raises:
            ConfigError: it cannot be iterated over again and again, is empty, or cannot be shared between the ranks, or the checkpoint
                that is to be resumed was saved in the midst of an epoch that this world cannot go on with.
        """
        several = self._world.size > 1
        self._loader = made(loader, argument, may_be_empty=several)  # one that is empty on some ranks is an error of all
        self._argument = argument
        self._choose()

    @property
    def length(self) -> int | None:
        """How many batches a rank takes in an epoch, where that is known."""
        return self._sharing.length if self._sharing is not None else None

    @property
    def is_at_end(self) -> bool:
        """All batches of the epoch in hand have been taken, as far as that is known beforehand."""
        return self._sharing is not None and self._sharing.left(self.taken) == 0

    def epoch(self, number: int) -> Iterator[Any]:
        """The batches of epoch `number`, counted from 1, but for those that were trained on already: the dataloader's own iterator, or,
        where data is shared, `SharedBatches`.

        Raises:
            ConfigError: the data has changed since the checkpoint: it ends before its place in it.
        """
        assert self._loader is not None
        assert self._sharing is not None
        if self._epoch is not None:  # an earlier fit stopped in the midst of it
            return self._epoch
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["place"] is not None:
            self._epoch = self._sharing.resume(number, self.taken, resumed["place"], resumed["now"])
            restore_random_state_of(self._loader, resumed["now"])  # last: opening the data has drawn from them
        else:
            self._epoch = self._sharing.begin(number, resumed["now"] if resumed is not None else None)
        return self._epoch

    def end_epoch(self) -> None:
        """The epoch is over: there is no middle of it to come back to."""
        self._epoch = None
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        """This rank's random states, and the place in the epoch: plain data and tensors."""
        if self._resumed is not None:  # nothing has been drawn since
            return dict(self._resumed)
        is_inside = self._epoch is not None and self._sharing is not None
        return {
            "now": random_state_of(self._loader),
            "taken": self.taken,
            "place": self._sharing.place(self.taken) if is_inside and self._sharing is not None else None,
            "way": self._sharing.way if self._sharing is not None else None,
            "world_size": self._world.size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Come back to where `state_dict` was read, when the epoch begins: random states are restored when the data has been opened.

        The place may be that of another world size, and the random states are then those of some rank of it.
        """
        self._resumed = state
        self.taken, self.seed = state["taken"], state["seed"]
        if self._loader is not None:
            self._choose()

    def _choose(self) -> None:
        resumed, world = self._resumed, self._world
        way = resumed["way"] if resumed is not None else None
        assert self._loader is not None
        self._sharing = sharing_of(
            self._loader,
            world,
            self.seed,
            argument=self._argument,
            shard=self._shard,
            alone=world.size == 1 and way in (None, "own"),  # one process goes on with the order that many began
            count_samples=self._count_samples,
        )
        if self._sharing.in_all is not None and self._sharing.in_all < world.size:
            what = "samples" if self._sharing.way == "split" else "batches"
            raise ConfigError(
                f"{self._argument} has {self._sharing.in_all} {what}, fewer than the {world.size} ranks that train on them; give more data, "
                "or start fewer ranks"
            )
        if resumed is None or not resumed["place"]:
            return
        is_other_world = "own" in (way, self._sharing.way) and resumed["world_size"] != world.size
        if way != self._sharing.way or is_other_world:
            raise ConfigError(
                f"the checkpoint was saved in the midst of an epoch of {self._argument} whose batches were {way} on "
                f"{resumed['world_size']} ranks, and are {self._sharing.way} on {world.size}: go on with {resumed['world_size']} ranks and "
                "the same kind of data, or from a checkpoint of an epoch's end"
            )


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on the device; containers are made anew, and what has no device is passed on."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return like(batch, [to_device(value, device) for value in batch])
    return batch.to(device) if hasattr(batch, "to") else batch


def like(container: Any, values: list[Any]) -> Any:
    """`values` in a list or tuple of the kind of `container`; named tuples take them as arguments."""
    return type(container)(*values) if hasattr(container, "_fields") else type(container)(values)
