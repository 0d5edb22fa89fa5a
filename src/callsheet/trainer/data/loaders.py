"""Functions that inspect a dataloader, or build a copy of it with another dataset or order."""

from __future__ import annotations

import logging
import pickle
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from callsheet.core.randomness import random_state, restore_random_state
from callsheet.errors import ConfigError
from callsheet.trainer.data.own_generators import generator_states, own_generators, restore_generators

logger = logging.getLogger("callsheet")

Loader = Iterable[Any] | Callable[[], Iterable[Any]]

_LOADER_MODULES = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.stateful_dataloader")

_SAMPLER_MODULES = ("torch.utils.data.dataloader", "torchdata.stateful_dataloader.sampler")
_REPEATABLE_SAMPLERS = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
_PLAIN_TYPES = (bool, int, float, str, bytes, tuple, list, dict, set, type(None))
_ITEMS_AT_EACH_END = 1000
_MAX_CHECKSUM_BYTES = 1 << 20  # a checksum covers at most this many bytes of a pickle
_MAX_CHECKSUM_ROWS = 8  # a checksum covers at most this many entries along the first dimension of a tensor

_LOADER_OPTIONS = (
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
"""The options of a DataLoader that a rebuilt DataLoader keeps: all except for dataset and order.

`in_order` is not among them, because only its default gives a reproducible order of batches.
"""


def resolve_loader(loader: Loader, argument: str, *, may_be_empty: bool = False) -> Iterable[Any]:
    """Return the given dataloader or, if a function is given, the dataloader that the function makes.

    A generator function, or another function that returns a new iterator in each call, is called again for each epoch.

    Raises:
        ConfigError: the dataloader cannot be iterated over repeatedly, or is known to be empty.
    """
    if callable(loader) and not isinstance(loader, Iterable):
        function, loader = loader, loader()
        if isinstance(loader, Iterator) and function() is not loader:
            loader = _RepeatedCalls(function)
    if not isinstance(loader, Iterable):
        raise ConfigError(
            f"{argument} is {type(loader).__name__}, which cannot be iterated over; give a dataloader, or a function that makes one"
        )
    if isinstance(loader, Iterator):
        raise ConfigError(
            f"{argument} is an iterator, which lasts for one epoch only; give a dataloader, a list, or a function that makes one"
        )
    if length_of(loader) == 0 and not may_be_empty:
        raise no_batches(argument)
    return loader


class _RepeatedCalls:
    """An iterable whose iterators are the results of calls of a function."""

    def __init__(self, function: Callable[[], Iterable[Any]]) -> None:
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        return iter(self._function())


def no_batches(argument: str) -> ConfigError:
    """Return the error that is raised for a dataloader without batches."""
    return ConfigError(f"{argument} has no batches; is the dataset empty, or smaller than a batch with drop_last=True?")


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a dataloader, or None if it is not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def samplers(loader: Any) -> list[Any]:
    """Return the loader's sampler, its batch sampler, and the sampler inside the batch sampler.

    Samplers that do not exist are left out.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def datasets(loader: Any) -> list[Any]:
    """Return the loader's dataset, and all datasets inside it, such as the dataset that a Subset wraps."""
    return chain_of(loader)[1:]


def chain_of(dataset: Any) -> list[Any]:
    """Return the dataset, and all datasets inside it, such as the dataset that a Subset wraps."""
    found = [dataset]
    while (dataset := getattr(dataset, "dataset", None)) is not None and all(dataset is not one for one in found):
        found.append(dataset)
    return found


def generators(*owners: Any) -> list[torch.Generator]:
    """Return the torch generators that the `owners` have as their attribute `generator`, each generator once."""
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def set_loader_epoch(loader: Any, number: int) -> None:
    """Call `set_epoch` on samplers and datasets that have this method.

    These methods count epochs from 0, and the Trainer counts from 1.
    """
    for owner in (*samplers(loader), *datasets(loader)):
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(number - 1)


def random_state_of(loader: Any) -> dict[str, Any]:
    """Return the random states that determine the batches of the next epoch.

    These are the process's random states, those of generators in attributes of the loader, its samplers and its datasets, and the
    states of samplers that have a `state_dict`.
    """
    return {
        "global": random_state(),
        "generators": generators_of(loader),
        "samplers": [sampler.state_dict() for sampler in _stateful_samplers(loader)],
        "attributes": attributes(_without_state(loader)),
    }


def generators_of(loader: Any) -> list[Any]:
    """Return the states of the random generators that are attributes of the loader, its samplers or its datasets."""
    return generator_states(own_generators((loader, *samplers(loader), *datasets(loader))))


def restore_generators_of(loader: Any, states: Sequence[Any]) -> None:
    """Restore the loader's random generators from `states`, the result of `generators_of`."""
    restore_generators(own_generators((loader, *samplers(loader), *datasets(loader))), states)


def restore_random_state_of(loader: Any, state: Mapping[str, Any]) -> None:
    """Restore the random states that `random_state_of` returned, except those of samplers, which `restore_samplers` restores."""
    restore_random_state(state["global"])
    restore_generators_of(loader, state["generators"])


def restore_samplers(loader: Any, state: Mapping[str, Any], argument: str) -> bool:
    """Restore the samplers from `state`, the result of `random_state_of`. Return whether there are samplers with a state.

    Warn of samplers and iterables without `state_dict` whose attributes changed during training: their batches may differ from
    those of a run without interruption.
    """
    if names := compare_attributes(state["attributes"], attributes(_without_state(loader))):
        logger.warning(
            "%s: the resumed run may not get the batches that an unbroken one would have: %s changed while training, and checkpoints do "
            "not hold it. Give that class the methods state_dict and load_state_dict, or have its order depend on set_epoch(epoch)",
            argument,
            ", ".join(names),
        )
    found = _stateful_samplers(loader)
    for sampler, saved in zip(found, state["samplers"], strict=False):
        sampler.load_state_dict(saved)
    return bool(found)


def is_repeatable(sampler: Any) -> bool:
    """Return whether the sampler is one of torch's own, which gives the same order whenever the random states are the same."""
    return type(sampler) in _REPEATABLE_SAMPLERS or type(sampler).__module__ in _SAMPLER_MODULES


def keeps_position(loader: Any) -> bool:
    """Return whether the loader can save and load its position within an epoch, as a StatefulDataLoader can.

    The result is False for a StatefulDataLoader with a sampler of the user, because after a resume this loader calls `iter` of the
    sampler more often than in a run without interruption. An `Order` then replaces the sampler, as in a plain DataLoader.
    """
    if not hasattr(loader, "state_dict"):
        return False
    is_indexed = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not is_indexed or makes_own_batches(loader) or any(hasattr(one, "state_dict") for one in datasets(loader)):
        return True
    return all(map(is_repeatable, samplers(loader)))


def _stateful_samplers(loader: Any) -> list[Any]:
    """Return the user's own samplers that have a state, unless the loader already saves their state."""
    own = [] if keeps_position(loader) else [one for one in samplers(loader) if not isinstance(one, DistributedSampler)]
    return [sampler for sampler in own if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")]


def _without_state(loader: Any) -> list[Any]:
    """Return the samplers and iterables whose order may change between epochs, but which have no state that could be saved."""
    found = [sampler for sampler in samplers(loader) if not is_repeatable(sampler) and not hasattr(sampler, "state_dict")]
    if not isinstance(loader, DataLoader):
        found += [] if hasattr(loader, "state_dict") else [loader]
    elif isinstance(loader.dataset, IterableDataset) and not loader.num_workers:
        found += datasets(loader)
    return found


def attributes(owners: Iterable[Any]) -> dict[str, int]:
    """Return a checksum for each attribute of `owners` that is a number, text, container or None. `compare_attributes` compares two such results.

    The epoch of an object with `set_epoch` is left out, because the Trainer sets it. Values that cannot be pickled are left out
    too, and so are values whose pickle is larger than a megabyte, not counting tensors and arrays.
    """
    found: dict[str, int] = {}
    for number, owner in enumerate(owners):
        for name, value in getattr(owner, "__dict__", {}).items():
            if not isinstance(value, _PLAIN_TYPES) or (name.strip("_") == "epoch" and hasattr(owner, "set_epoch")):
                continue
            if isinstance(value, (list, tuple)) and len(value) > _ITEMS_AT_EACH_END:
                value = (len(value), value[:_ITEMS_AT_EACH_END], value[-_ITEMS_AT_EACH_END:])
            digest = _Digest()
            try:
                _Pickler(digest).dump(value)
            except Exception:  # pickling a value may raise any error
                continue
            found[f"{number}.{type(owner).__name__}.{name}"] = digest.value
    return found


class _Digest:
    """A file that keeps only the checksum of the bytes written to it. Writing more than `_MAX_CHECKSUM_BYTES` raises OverflowError."""

    def __init__(self) -> None:
        self.value = 0
        self._size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._size += view.nbytes
        if self._size > _MAX_CHECKSUM_BYTES:
            raise OverflowError
        self.value = zlib.crc32(view, self.value)
        return view.nbytes


class _Pickler(pickle.Pickler):
    """Pickles only the type, shape and first numbers of each tensor or array, because pickling all numbers may take long.

    The numbers of a tensor on a device are left out, because reading them would wait for the device.
    """

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_near = value.is_cpu and value.layout is torch.strided
        elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray):
            is_near = value.dtype != object
        else:
            return None
        corner = (slice(_MAX_CHECKSUM_ROWS), *[slice(2)] * (value.ndim - 1))[: value.ndim]
        return type(value).__name__, str(value.dtype), tuple(value.shape), value[corner].tolist() if is_near else None


def compare_attributes(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Compare two results of `attributes`: return the attributes whose checksums differ, as texts `Class.attribute`."""
    return sorted(name.partition(".")[2] for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def drop(batches: Iterator[Any], count: int, epoch: int | None) -> None:
    """Draw `count` batches and discard them, so that a resumed run reaches its position in the epoch.

    Raises:
        ConfigError: the epoch has fewer batches.
    """
    began, is_logged = time.monotonic(), False
    for drawn in range(count):
        if next(batches, None) is None:
            raise ConfigError(
                f"epoch {epoch} ended after {drawn} batches, and the checkpoint was saved after {count}: is this the same data?"
            )
        if not is_logged and time.monotonic() - began > 5:
            is_logged = True
            logger.info(
                "returning to batch %d of epoch %s: the batches before it are loaded again; with the dataset in a "
                "callsheet.trainer.SeededDataset they are skipped",
                count,
                epoch,
            )


def has_items(loader: Any) -> bool:
    """Return whether the loader is a torch DataLoader that makes batches from the samples of a map-style dataset."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None


def batching(loader: DataLoader[Any]) -> tuple[Any, int | None, bool]:
    """Return the loader's sampler, its batch size, and its `drop_last`.

    If the user gave a batch sampler, return it instead of the sampler, with None as the batch size and False as `drop_last`.
    """
    batches: Any = loader.batch_sampler
    # Compare the class by its name, because torchdata has its own `BatchSampler`, which behaves like torch's.
    is_plain = isinstance(batches, BatchSampler) and type(batches).__name__ == "BatchSampler"
    return (batches.sampler, batches.batch_size, batches.drop_last) if is_plain else (batches, None, False)


def makes_own_batches(loader: Any) -> bool:
    """Return whether the loader's class overrides how a DataLoader iterates, so that a plain DataLoader cannot replace it."""
    return any(getattr(type(loader), name).__module__ not in _LOADER_MODULES for name in ("__iter__", "_get_iterator"))


def rebuilt(loader: DataLoader[Any], kind: type[DataLoader[Any]] = DataLoader, **changes: Any) -> DataLoader[Any]:
    """Return a new DataLoader with the options of `loader`, except for those in `changes`, such as the dataset."""
    names = (*_LOADER_OPTIONS, "snapshot_every_n_steps") if kind is not DataLoader else _LOADER_OPTIONS
    options = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    return kind(**(options | {"dataset": loader.dataset} | changes))


def kind_of(loader: DataLoader[Any]) -> type[DataLoader[Any]]:
    """Return the class from which to rebuild the loader: torch's DataLoader or torchdata's StatefulDataLoader."""
    return next(kind for kind in type(loader).__mro__ if kind.__module__ in _LOADER_MODULES)
