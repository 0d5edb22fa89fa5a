"""The random states of the process: Python's, and those of NumPy and torch if the program has imported them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from callsheet.core.ranks import Ranks


def random_state() -> dict[str, Any]:
    """Return every random state of this process, as plain data, arrays and tensors.

    CUDA's states are read only if CUDA is initialized. Reading them waits until the device has finished its work.
    """
    state: dict[str, Any] = {"python": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    if torch is not None:
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the states that `random_state` returned. States of libraries that this process has not imported are ignored."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    random.setstate(state["python"])
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    if torch is not None and "torch" in state:
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])


def seed_all(seed: int) -> None:
    """Seed the random states of Python, and of NumPy and torch if the program has imported them."""
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    if torch is not None:
        torch.manual_seed(seed)


@contextmanager
def seeded_setup(seed: int | None, ranks: Ranks) -> Iterator[None]:
    """Seed all random states: with `seed` at the start of the `with` block, and at its end with another seed on each rank.

    So the block draws the same random numbers on all ranks, and later code, for example dropout, draws different ones. With one
    rank, the states are seeded only at the start. If `seed` is None, nothing is seeded.
    """
    if seed is not None:
        seed_all(seed)
    yield
    if seed is not None and ranks.world_size > 1:
        seed_all(seed + ranks.rank)


def same_random_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two results of `random_state` are equal. Only the states that both contain are compared."""

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, (tuple, list)):
            return len(a) == len(b) and all(map(equal, a, b))
        same = a == b
        return bool(same.all()) if hasattr(same, "all") else bool(same)

    return all(equal(one[key], other[key]) for key in one.keys() & other.keys())
