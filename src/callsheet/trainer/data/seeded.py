"""Random states for data: random augmentation of a sample depends only on the seed, the epoch and the sample's index."""

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

from callsheet.core.randomness import restore_random_state
from callsheet.errors import ConfigError
from callsheet.trainer.data.loaders import attributes, chain_of, compare_attributes
from callsheet.trainer.data.own_generators import own_generators, seed_generators

_MASK_OF_64_BITS = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Mix several numbers into one number of 64 bits.

    Each bit of the result depends on all of the numbers (splitmix64; Steele, Lea, Flood 2014).
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK_OF_64_BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_OF_64_BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_OF_64_BITS
        state ^= state >> 31
    return state


def seed_states(number: int) -> None:
    """Seed the random states of Python and NumPy, and the CPU's random state of torch.

    NumPy and torch each get one half of the number, because with the same 32 bits as seed both would draw the same numbers.
    `torch.manual_seed` is not used, because it would also seed devices, and takes a hundred times as long.
    """
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number >> 32)
    torch.default_generator.manual_seed(number & 0xFFFFFFFF)


def cpu_random_state() -> dict[str, Any]:
    """Return the random states that `seed_states` overwrites, so that `restore_random_state` can restore them."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


@contextlib.contextmanager
def seeded(number: int, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Seed all random states and the `generators` with `number`. Restore their earlier states when the `with` block ends."""
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
    """A separate set of random states, which is in use while `with stream:` runs."""

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
    """Seeds the random states before a wrapped dataset loads samples. The seed is made of `seed`, the epoch and further numbers.

    The epoch is shared with the workers.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        # Two numbers in shared memory: the epoch, which persistent workers read, and a flag, which a worker sets if its dataset has changed.
        self._shared = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._epoch: int | None = None
        self._own: list[Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from which the random states of this process and of the workers are seeded."""
        self._shared[0] = epoch

    def note(self) -> None:
        """In a worker process, set a flag in shared memory, which says that the worker's dataset has changed."""
        self._shared[1] = 1

    @property
    def is_noted(self) -> bool:
        """Whether a worker has called `note`. A worker does so if its copy of the dataset has changed."""
        return bool(self._shared[1])

    def begin(self, *numbers: int) -> None:
        """Seed all random states with `seed`, the epoch and the given numbers."""
        epoch = int(self._shared[0])
        if self._own is None:
            self._own = own_generators(chain_of(self.dataset))
        if epoch != self._epoch:
            self._epoch = epoch
            # The Trainer cannot call `set_epoch` of a worker's copy of the dataset, so the worker itself calls it here.
            if get_worker_info() is not None:
                for dataset in chain_of(self.dataset):
                    if hasattr(dataset, "set_epoch"):
                        dataset.set_epoch(epoch)
        number = mix(self.seed, epoch, *numbers)
        seed_states(number)
        if self._own:
            seed_generators(self._own, number)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has another dataset object, with other generators, so do not copy the generators of this dataset (`_own`).
        return vars(self) | {"_own": None, "_epoch": None}


class SeededDataset(Dataset[Any]):
    """A map-style dataset that seeds the random states for every sample, from `seed`, the epoch and the sample's index.

    So augmentation draws the same numbers with any number of workers, at any position in the data, and after a resume. The random
    states of training are not affected. Generators in the dataset's attributes (`self.rng`) are seeded too. A dataset that loads
    a whole batch (`__getitems__`) is seeded by the index of the batch's first sample. Attributes that this class does not define
    are read from the wrapped dataset, and setting an attribute sets it on the wrapped dataset.

    The Trainer sets the epoch, also for persistent workers, which then call the dataset's own `set_epoch`. In other loops, call
    `set_epoch` before each epoch. The random states of devices are not changed.

    This costs about 7 µs per sample, and in the main process another 60 µs per batch.

    Args:
        dataset: has `__len__` and `__getitem__`.
        seed: the same on all ranks.

    Raises:
        ConfigError: the dataset is an iterable one, whose samples have no index.

    Examples:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> loader = DataLoader(SeededDataset(TensorDataset(torch.arange(8)), seed=0), batch_size=4, num_workers=0)
    """

    dataset: Any

    def __init__(self, dataset: Any, seed: int) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"SeededDataset({type(dataset).__name__}): seeding a sample requires an index; give a map-style dataset"
            )
        own = vars(self)
        own["dataset"] = dataset
        own["seed"] = seed
        own["_seeds"] = _Seeds(dataset, seed)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose samples are loaded next. Callers may change the epoch only between two epochs.

        Args:
            epoch: the number of the epoch; the Trainer's first epoch has the number 0 here.
        """
        self._seeds.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        with self._preserve_random_state():
            return self._sample(index)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        with self._preserve_random_state():
            if getattr(self.dataset, "__getitems__", None):
                self._seeds.begin(_number(indices[0]))
                return self.dataset.__getitems__(indices)
            return [self._sample(index) for index in indices]

    def _sample(self, index: Any) -> Any:
        self._seeds.begin(_number(index))
        return self.dataset[index]

    @contextlib.contextmanager
    def _preserve_random_state(self) -> Iterator[None]:
        if get_worker_info() is not None:  # a worker only loads samples, so its random states need not be restored
            yield
            return
        outer = cpu_random_state()
        try:
            yield
        finally:
            restore_random_state(outer)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "seed", "_seeds"):  # while the object is unpickled, the attribute does not exist yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Set the attribute on the wrapped dataset, which may need what a `worker_init_fn` stores, such as an open file.
        setattr(self.dataset, name, value)


class SeededStream(IterableDataset[Any]):
    """An iterable dataset that seeds its workers' random states at each epoch's start, from `seed`, the epoch and the worker.

    Without a `SeededStream`, persistent workers keep their random states from one epoch to the next, and no checkpoint stores these
    states. With a `SeededStream`, an epoch can be drawn again without drawing the epochs before it.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        own = vars(self)
        own["dataset"] = dataset
        own["_seeds"] = _Seeds(dataset, seed)
        own["_attributes"] = None

    @property
    def has_changed(self) -> bool:
        """Whether, in some worker, attributes of the dataset have changed since the worker's first epoch."""
        return bool(self._seeds.is_noted)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose samples the workers load from now on."""
        self._seeds.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        worker: Any = get_worker_info()
        self._seeds.begin(worker.id)
        now = attributes(chain_of(self.dataset))
        if self._attributes is None:
            vars(self)["_attributes"] = now
        elif compare_attributes(self._attributes, now):
            self._seeds.note()
        return iter(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ("dataset", "_seeds", "_attributes"):  # while the object is unpickled, these attributes do not exist yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)  # the wrapped dataset may read the attribute


def _number(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError:  # the indices of the dataset are names, not numbers
        return zlib.crc32(repr(index).encode())
