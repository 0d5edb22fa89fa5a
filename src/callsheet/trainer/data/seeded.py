"""Random states that belong to the data: what a sample's augmentation draws depends on seed, epoch and index, and on nothing else."""

from __future__ import annotations

import contextlib
import operator
import random
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from callsheet.errors import ConfigError
from callsheet.randomness import restore_random_state
from callsheet.trainer.data.loaders import attributes, chain_of, changed
from callsheet.trainer.data.own_generators import own_generators, seed_generators

_BITS = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """One number of 64 bits from several, every bit of which depends on all of theirs (splitmix64; Steele, Lea, Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _BITS
        state ^= state >> 31
    return state


def seed_states(number: int) -> None:
    """Seed Python's, NumPy's and torch's random states, of the CPU alone.

    NumPy's and torch's would draw the same from the same 32 bits, and so get a half each. `torch.manual_seed` would seed devices too,
    and costs a hundred times as much.
    """
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number >> 32)
    torch.default_generator.manual_seed(number & 0xFFFFFFFF)


def cpu_random_state() -> dict[str, Any]:
    """What `seed_states` overwrites, for `restore_random_state`."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


@contextlib.contextmanager
def seeded(number: int, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """All random states seeded, and these generators; as they were afterwards."""
    outer, before = cpu_random_state(), [generator.get_state() for generator in generators]
    seed_states(number)
    for generator in generators:
        generator.manual_seed(number)
    try:
        yield
    finally:
        restore_random_state(outer)
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


class RandomStream:
    """Random states of something's own, in force while it draws: `with stream: ...`."""

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self.state = cpu_random_state()
        self._outer: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._outer = cpu_random_state()
        restore_random_state(self.state)

    def __exit__(self, *error: object) -> None:
        self.state = cpu_random_state()
        restore_random_state(self._outer)


class _Seeds:
    """What a wrapped dataset draws from: random states seeded anew, and its own generators; and the epoch, which workers share."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._shared = torch.zeros(
            2, dtype=torch.int64
        ).share_memory_()  # with workers, persistent ones too: epoch, and what is noted
        self._told: int | None = None
        self._own: list[Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, in the workers too."""
        self._shared[0] = epoch

    def note(self) -> None:
        """Note something that the process with the loader is to see."""
        self._shared[1] = 1

    @property
    def is_noted(self) -> bool:
        """Whether some worker called `note`."""
        return bool(self._shared[1])

    def begin(self, *numbers: int) -> None:
        """Seed everything by the seed, the epoch and these numbers."""
        epoch = int(self._shared[0])
        if self._own is None:
            self._own = own_generators(chain_of(self.dataset))
        if epoch != self._told:
            self._told = epoch
            if get_worker_info() is not None:  # its copy of the dataset is not the one that the Trainer told
                for dataset in chain_of(self.dataset):
                    if hasattr(dataset, "set_epoch"):
                        dataset.set_epoch(epoch)
        number = mixed(self.seed, epoch, *numbers)
        seed_states(number)
        if self._own:
            seed_generators(self._own, number)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_own": None, "_told": None}  # generators are found again in the copy


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose samples draw from random states of their own, seeded by `seed`, the epoch and the sample's index.

    So what augmentation draws is the same with any number of workers, at any place in the data, and in a run that was resumed; the
    training's own random states do not notice it. Generators that the dataset holds in attributes (`self.rng`) are seeded too.
    A dataset that loads a batch at once (`__getitems__`) is seeded by the batch's
    first index. Everything else is the dataset's own: other attributes are read and set there.

    The Trainer sets the epoch, also inside persistent workers, where `set_epoch` of the dataset itself is called too; in other loops
    call `set_epoch`. Devices' random states are left alone.

    Costs about 7 µs a sample, and in the main process 60 µs a batch more.

    Args:
        dataset: with `__len__` and `__getitem__`.
        seed: the same on all ranks.

    Raises:
        ConfigError: the dataset is an iterable one: its samples have no index.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(SeededDataset(TensorDataset(torch.arange(8)), seed=0), batch_size=4, num_workers=0)
    """

    dataset: Any

    def __init__(self, dataset: Any, seed: int) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"SeededDataset({type(dataset).__name__}): samples need an index to be seeded by; give a map-style dataset"
            )
        own = vars(self)
        own["dataset"] = dataset
        own["seed"] = seed
        own["_seeds"] = _Seeds(dataset, seed)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that samples are drawn for from now on; while no loader is in the midst of another."""
        self._seeds.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        with self._put_back():
            return self._sample(index)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        with self._put_back():
            if getattr(self.dataset, "__getitems__", None):
                self._seeds.begin(_number(indices[0]))
                return self.dataset.__getitems__(indices)
            return [self._sample(index) for index in indices]

    def _sample(self, index: Any) -> Any:
        self._seeds.begin(_number(index))
        return self.dataset[index]

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        if get_worker_info() is not None:  # a worker does nothing but load samples
            yield
            return
        outer = cpu_random_state()
        try:
            yield
        finally:
            restore_random_state(outer)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "seed", "_seeds"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)  # a worker_init_fn opens files and sets them there


class SeededStream(IterableDataset[Any]):
    """An iterable dataset whose workers begin each epoch with random states seeded by `seed`, the epoch and the worker.

    Persistent workers keep their random states from one epoch to the next, which no checkpoint holds. With this, an epoch can be drawn
    again without those before it.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        own = vars(self)
        own["dataset"] = dataset
        own["_seeds"] = _Seeds(dataset, seed)
        own["_attributes"] = None

    @property
    def has_changed(self) -> bool:
        """Whether attributes of the dataset were others in a worker's later epoch than in its first."""
        return bool(self._seeds.is_noted)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the workers draw from now on."""
        self._seeds.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker: Any = get_worker_info()
        self._seeds.begin(worker.id)
        now = attributes(chain_of(self.dataset))
        if self._attributes is None:
            vars(self)["_attributes"] = now
        elif changed(self._attributes, now):
            self._seeds.note()
        return iter(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "_seeds", "_attributes"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)  # as in a SeededDataset


def _number(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:  # a dataset of named samples
        return zlib.crc32(repr(index).encode())
