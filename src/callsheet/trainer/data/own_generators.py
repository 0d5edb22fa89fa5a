"""Finds the random generators that are attributes of samplers, datasets and loaders, and saves, restores and seeds them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def own_generators(owners: Iterable[Any]) -> list[Any]:
    """Return the random generators (of Python, NumPy or torch) that attributes of the `owners` contain, each generator once."""
    numpy: Any = sys.modules.get("numpy")
    kinds: tuple[Any, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found = [value for owner in owners for value in getattr(owner, "__dict__", {}).values() if isinstance(value, kinds)]
    return list({id(generator): generator for generator in found}.values())


def generator_states(generators: Sequence[Any]) -> list[Any]:
    """Return the state of each generator as plain data, arrays and tensors."""
    return [_state(generator) for generator in generators]


def restore_generators(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Restore the states that `generator_states` returned. Generators for which no state was saved keep their state."""
    for generator, state in zip(generators, states, strict=False):
        if isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:  # a torch.Generator and NumPy's RandomState both have `set_state`
            generator.set_state(state)


def seed_generators(generators: Iterable[Any], number: int) -> None:
    """Seed each of the `generators` with the 64-bit number `number`."""
    for generator in generators:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(number)
        elif isinstance(generator, random.Random):
            generator.seed(number)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = type(generator.bit_generator)(number).state
        else:
            generator.seed(number & 0xFFFFFFFF)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()
