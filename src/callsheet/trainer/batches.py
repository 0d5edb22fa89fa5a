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
    """The training batches, epoch by epoch, and how to come back to the middle of one.

    A dataloader with `state_dict` and `load_state_dict` keeps its own place. Any other is started again from the random states that
    it started the epoch with, and what was taken is drawn again and dropped: the order is exact, and with `num_workers=0` so is what
    the dataset draws.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.length = length_of(loader)
        self._keeps_place = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self._at_start: dict[str, Any] | None = None

    def epoch(self, number: int) -> Iterator[Any]:
        """The batches of epoch `number`, counted from 1."""
        for sampler in (getattr(self.loader, "sampler", None), getattr(self.loader, "batch_sampler", None)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(number - 1)  # type: ignore[union-attr]  # a sampler that is None has no set_epoch
        self._at_start = random_state()
        return iter(self.loader)

    def epoch_from(self, number: int, taken: int, state: Mapping[str, Any]) -> Iterator[Any]:
        """The rest of epoch `number`, of which `taken` batches were trained on; `state` is what `state_dict` gave then."""
        if self._keeps_place and state.get("loader") is not None:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]  # it keeps its place
            return self.epoch(number)
        if state.get("at_start") is not None:
            restore_random_state(state["at_start"])
        batches, began, told = self.epoch(number), time.monotonic(), False
        for drawn in range(taken):
            if next(batches, None) is None:
                raise ConfigError(
                    f"epoch {number} ended after {drawn} batches, and the checkpoint was saved after {taken}: is this the same data?"
                )
            if not told and time.monotonic() - began > 5:
                told = True
                logger.info("coming back to batch %d of epoch %d: the batches before it are drawn again", taken, number)
        return batches

    def end_epoch(self) -> None:
        """The epoch is over: there is no middle of it to come back to."""
        self._at_start = None

    def state_dict(self) -> dict[str, Any]:
        """Where this epoch began and stands, as plain data and tensors; empty between epochs."""
        if self._at_start is None:
            return {}
        return {
            "at_start": self._at_start,
            "loader": self.loader.state_dict() if self._keeps_place else None,  # type: ignore[attr-defined]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A place in the data is come back to by `epoch_from`, when its epoch begins."""


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
