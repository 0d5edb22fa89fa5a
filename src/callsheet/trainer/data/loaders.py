"""Dataloaders: what can be known of one, and how one is made again with another dataset or order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from callsheet.errors import ConfigError
from callsheet.randomness import random_state, restore_random_state

logger = logging.getLogger("callsheet")

Loader = Iterable[Any] | Callable[[], Iterable[Any]]

_MADE_BY = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")

_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
"""Of a DataLoader, but for dataset and order. `in_order` is not among them: batches that come as they are ready are no order."""


def made(loader: Loader, argument: str, *, may_be_empty: bool = False) -> Iterable[Any]:
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
    if length_of(loader) == 0 and not may_be_empty:
        raise no_batches(argument)
    return loader


def no_batches(argument: str) -> ConfigError:
    """The error for data that is known to be empty."""
    return ConfigError(f"{argument} has no batches; is the dataset empty, or smaller than a batch with drop_last=True?")


def length_of(loader: Any) -> int | None:
    """How many there are, or None where nobody knows beforehand."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def samplers(loader: Any) -> list[Any]:
    """The sampler, the batch sampler and the sampler in it, as far as there are any."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def datasets(loader: Any) -> list[Any]:
    """The dataset, and those that stand in it: a Subset's, a wrapper's."""
    found: list[Any] = []
    while (loader := getattr(loader, "dataset", None)) is not None and all(loader is not one for one in found):
        found.append(loader)
    return found


def generators(*owners: Any) -> list[torch.Generator]:
    """The owners' own random generators, each once."""
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def tell_epoch(loader: Any, number: int) -> None:
    """`set_epoch` of samplers and datasets that have it; they count from 0, and the Trainer from 1."""
    for owner in (*samplers(loader), *datasets(loader)):
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(number - 1)


def random_state_of(loader: Any) -> dict[str, Any]:
    """The random states that its next epoch would be drawn from: the process's, and those of generators of its own."""
    own = generators(loader, *samplers(loader))
    return {"global": random_state(), "generators": [generator.get_state() for generator in own]}


def restore_random_state_of(loader: Any, state: Mapping[str, Any]) -> None:
    """Put back what `random_state_of` read."""
    restore_random_state(state["global"])
    for generator, saved in zip(generators(loader, *samplers(loader)), state["generators"], strict=False):
        generator.set_state(saved)


def drop(batches: Iterator[Any], count: int, epoch: int | None) -> None:
    """Draw `count` batches for nothing.

    Raises:
        ConfigError: there are fewer.
    """
    began, is_told = time.monotonic(), False
    for drawn in range(count):
        if next(batches, None) is None:
            raise ConfigError(
                f"epoch {epoch} ended after {drawn} batches, and the checkpoint was saved after {count}: is this the same data?"
            )
        if not is_told and time.monotonic() - began > 5:
            is_told = True
            logger.info(
                "coming back to batch %d of epoch %s: the batches before it are drawn again; with the dataset in a "
                "callsheet.trainer.SeededDataset they would be skipped",
                count,
                epoch,
            )


def has_items(loader: Any) -> bool:
    """Whether it is a torch DataLoader that puts samples of a map-style dataset together to batches."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None


def batching(loader: DataLoader[Any]) -> tuple[Any, int | None, bool]:
    """What the order is drawn from, samples a batch, and whether an incomplete last batch is dropped.

    Of a batch sampler of the user's own only its batches are known: they are the order, and the second is None.
    """
    batches: Any = loader.batch_sampler
    is_plain = isinstance(batches, BatchSampler) and type(batches).__name__ == "BatchSampler"  # torchdata has one of its own
    return (batches.sampler, batches.batch_size, batches.drop_last) if is_plain else (batches, None, False)


def makes_own_batches(loader: Any) -> bool:
    """Whether a subclass of DataLoader iterates in a way of its own, which another DataLoader would not repeat."""
    return any(getattr(type(loader), name).__module__ not in _MADE_BY for name in ("__iter__", "_get_iterator"))


def rebuilt(loader: DataLoader[Any], kind: type[DataLoader[Any]] = DataLoader, **changes: Any) -> DataLoader[Any]:
    """A DataLoader with the options of this one, but for `changes`, which say what dataset and what order."""
    options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
    return kind(**(options | {"dataset": loader.dataset} | changes))
