"""The ranks of this process, and rank gates (on which ranks a handler is called). Only `gather` communicates with other ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import Any, Literal, NamedTuple, get_args

from callsheet.errors import ConfigError, did_you_mean

NamedGate = Literal["all", "zero", "local_zero"]
GATES: tuple[NamedGate, ...] = get_args(NamedGate)

RankGate = NamedGate | Collection[int]
"""Selects ranks: `"all"`, `"zero"` (the first process of all), `"local_zero"` (the first process of each machine), or a set of ranks."""


class Ranks(NamedTuple):
    """The rank, local rank and node rank of this process, and the world size. A single process is rank 0 of 1."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1

    def passes(self, gate: RankGate) -> bool:
        """Return whether a handler that is limited to the ranks of `gate` (such as `"zero"`) is called on this rank."""
        if gate == "all":
            return True
        if gate == "zero":
            return self.rank == 0
        if gate == "local_zero":
            return self.local_rank == 0
        return self.rank in gate


def read_ranks() -> Ranks:
    """Return the ranks of this process: from torch.distributed if it is initialized, else from torchrun's environment variables.

    Ranks are read when a run starts and not when a module is imported, because the process group may be made in between.

    Raises:
        ConfigError: an environment variable does not hold a whole number.
    """

    def number(variable: str, default: int) -> int:
        text = os.environ.get(variable, "")
        if text and not text.isdigit():
            raise ConfigError(f"the environment variable {variable} should be a whole number, not {text!r}; unset or correct it")
        return int(text) if text else default

    rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    distributed = initialized_distributed()
    if distributed is not None:
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    return Ranks(rank, number("LOCAL_RANK", rank), number("GROUP_RANK", 0), world_size)


def initialized_distributed() -> Any | None:
    """Return the module torch.distributed if the program has imported it and has made a process group, otherwise None."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed
    return None


def gather(value: Any) -> list[Any]:
    """Return the `value` of every rank, in the order of ranks. This is a collective: every rank must call it."""
    distributed = initialized_distributed()
    if distributed is None or distributed.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def check_gate(gate: object) -> NamedGate | frozenset[int]:
    """Check a rank gate, the option that limits a handler to some ranks, and return it. A set of ranks becomes a frozenset.

    Raises:
        ConfigError: the gate is neither `"all"`, `"zero"`, `"local_zero"` nor a non-empty set of ranks.
    """
    if isinstance(gate, str):
        if gate in GATES:
            return GATES[GATES.index(gate)]
        raise ConfigError(
            f"unknown ranks {gate!r}{did_you_mean(gate, GATES)} (one of {', '.join(GATES)}, or a set like {{3, 7}})"
        )
    if isinstance(gate, Collection) and gate:
        if all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in gate):
            return frozenset(gate)
    raise ConfigError(f"unknown ranks {gate!r} (one of {', '.join(GATES)}, or a set of rank numbers like {{3, 7}})")
