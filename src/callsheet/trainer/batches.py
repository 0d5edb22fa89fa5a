"""Batches: where they come from, how they are split and moved, and where in the data a run stands."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from callsheet.errors import ConfigError
from callsheet.randomness import random_state, restore_random_state

logger = logging.getLogger("callsheet")

Loader = Iterable[Any] | Callable[[], Iterable[Any]]


def made(loader: Loader, argument: str) -> Iterable[Any]:
    """The dataloader itself, or what its factory returns.

    Raises:
        ConfigError: it cannot be iterated over again and again, or is known to be empty.
    """
    if callable(loader) and not isinstance(loader, Iterable):
        loader = loader()
    if not isinstance(loader, Iterable):
        raise ConfigError(
            f"{argument} is {type(loader).__name__}, which cannot be iterated over; give a dataloader, or a function that makes one"
        )
    if isinstance(loader, Iterator):
        raise ConfigError(
            f"{argument} is an iterator, which serves one epoch only; give a dataloader, a list, or a function that makes one"
        )
    if length_of(loader) == 0:
        raise ConfigError(f"{argument} has no batches; is the dataset empty, or smaller than a batch with drop_last=True?")
    return loader


def length_of(loader: Iterable[Any]) -> int | None:
    """How many batches an epoch has, or None where nobody knows beforehand."""
    try:
        return len(loader)  # type: ignore[arg-type]  # not all iterables have a length: that is the question
    except (TypeError, NotImplementedError):
        return None


class TrainBatches:
    """The training batches, epoch by epoch, and the place in them: what a resumed run needs to draw what an unbroken one would have.

    A dataloader with `state_dict` and `load_state_dict` keeps its own place within an epoch. Any other is started again from the random
    states that it started the epoch with, and what was taken is drawn again and dropped: the order is exact, and with `num_workers=0`
    so is what the dataset draws. Generators of its own that the dataloader or its sampler has are kept too.
    """

    def __init__(self) -> None:
        self.loader: Iterable[Any] | None = None
        self._epoch: Iterator[Any] | None = None  # the one in progress
        self._at_start: dict[str, Any] | None = None  # its random states
        self._resumed: Mapping[str, Any] | None = None  # until its epoch begins

    @property
    def length(self) -> int | None:
        """How many batches an epoch has, where that is known."""
        return length_of(self.loader) if self.loader is not None else None

    def epoch(self, number: int, taken: int) -> Iterator[Any]:
        """The batches of epoch `number`, counted from 1, but for the `taken` that were trained on already.

        Raises:
            ConfigError: the data has changed since the checkpoint: it ends before its place in it.
        """
        assert self.loader is not None
        if self._epoch is not None:  # an earlier fit stopped in the midst of it
            return self._epoch
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return self._begin(number)
        if not taken:
            self._restore(resumed["now"])
            return self._begin(number)
        if resumed["loader"] is not None and hasattr(self.loader, "load_state_dict"):
            self.loader.load_state_dict(resumed["loader"])
            taken = 0
        self._restore(resumed["at_start"])
        epoch = self._begin(number)
        self._drop(epoch, number, taken)
        self._restore(resumed["now"])  # last: opening the data has drawn from them
        return epoch

    def end_epoch(self) -> None:
        """The epoch is over: there is no middle of it to come back to."""
        self._epoch = self._at_start = None

    def state_dict(self) -> dict[str, Any]:
        """The random states now and at the epoch's start, and the dataloader's own place: plain data and tensors."""
        if self._resumed is not None:  # nothing has been drawn since
            return dict(self._resumed)
        is_inside = self._epoch is not None and hasattr(self.loader, "state_dict")
        return {
            "now": self._random_state(),
            "at_start": self._at_start,
            "loader": self.loader.state_dict() if is_inside else None,  # type: ignore[union-attr]  # it has one, then
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Come back to where `state_dict` was read, when the epoch begins: random states are restored when the data has been opened."""
        self._resumed = state

    def _begin(self, number: int) -> Iterator[Any]:
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number - 1)
        self._at_start = self._random_state()
        self._epoch = iter(self.loader or ())
        return self._epoch

    def _drop(self, epoch: Iterator[Any], number: int, taken: int) -> None:
        began, is_told = time.monotonic(), False
        for drawn in range(taken):
            if next(epoch, None) is None:
                raise ConfigError(
                    f"epoch {number} ended after {drawn} batches, and the checkpoint was saved after {taken}: is this the same data?"
                )
            if not is_told and time.monotonic() - began > 5:
                is_told = True
                logger.info("coming back to batch %d of epoch %d: the batches before it are drawn again", taken, number)

    def _samplers(self) -> list[Any]:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        found = (getattr(self.loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        return [sampler for sampler in found if sampler is not None]

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(owner, "generator", None) for owner in (self.loader, *self._samplers())]
        return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())

    def _random_state(self) -> dict[str, Any]:
        return {"global": random_state(), "generators": [generator.get_state() for generator in self._generators()]}

    def _restore(self, state: Mapping[str, Any]) -> None:
        restore_random_state(state["global"])
        for generator, saved in zip(self._generators(), state["generators"], strict=False):
            generator.set_state(saved)


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
