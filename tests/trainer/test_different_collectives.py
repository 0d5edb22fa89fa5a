"""Ranks that call different collectives at the same time get an error; gloo alone would end the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from callsheet.core.ranks import read_ranks
from callsheet.errors import DistributedError
from callsheet.run.process_groups import ProcessGroups
from callsheet.testing import run_ranks


def sum_here(groups: ProcessGroups) -> None:
    groups.sum([1.0, 2.0])


def sum_there(groups: ProcessGroups) -> None:
    groups.sum([3.0, 4.0])


CASES: dict[str, tuple[Callable[[ProcessGroups], Any], Callable[[ProcessGroups], Any]]] = {
    "numbers and a pickle": (lambda groups: groups.sum([1.0]), lambda groups: groups.gather("x")),
    "a sum and a maximum": (lambda groups: groups.sum([1.0]), lambda groups: groups.max([1.0])),
    "few and many numbers": (lambda groups: groups.sum([1.0]), lambda groups: groups.sum([1.0] * 500)),
    "many and more numbers": (lambda groups: groups.sum([1.0] * 100), lambda groups: groups.sum([1.0] * 500)),
    "a broadcast and a gather": (lambda groups: groups.of_rank_zero("x"), lambda groups: groups.gather("x")),
    "the same sum in two functions": (sum_here, sum_there),
}


def call_different(case: str) -> str:
    groups = ProcessGroups(read_ranks(), torch.device("cpu"), 20)
    call = CASES[case][groups.rank > 0]
    groups.max([0.0])
    with pytest.raises(DistributedError) as raised:
        call(groups)
    return str(raised.value)


@pytest.mark.parametrize("case", CASES)
def test_different_collectives_are_an_error_on_all_ranks(case: str) -> None:
    for rank, message in enumerate(run_ranks(call_different, 2, case)):
        assert message.startswith(f"the ranks call different collectives at the same time: rank {rank} a ")
        assert "run on some ranks only?" in message


def test_one_of_four_ranks_that_calls_another_collective_is_found() -> None:
    assert len(set(run_ranks(call_different, 4, "the same sum in two functions"))) == 4


def exchange() -> None:
    groups = ProcessGroups(read_ranks(), torch.device("cpu"), 20)
    rank, size = groups.rank, groups.size
    for count in (0, 1, 60, 61, 62, 1000):
        assert groups.sum([rank] * count) == [sum(range(size))] * count
        assert groups.max([-rank] * count) == [0.0] * count
        assert groups.sum_and_max([1.0] * count, [rank]) == ([float(size)] * count, [size - 1.0])
        values = [{"rank": each, "text": "ä" * each * count} for each in range(size)]
        assert groups.gather(values[rank]) == values
        assert groups.of_rank_zero(values[-1] if rank == 0 else "not sent") == values[-1]
    first = groups.begin_max([rank])
    assert groups.begin_max([rank, 3]).wait() == [size - 1.0, 3]
    assert first.wait() == [size - 1.0]


@pytest.mark.parametrize("size", [2, 4])
def test_values_of_any_length_are_exchanged(size: int) -> None:
    run_ranks(exchange, size)
