"""Metrics that are reduced over real ranks, compared with a plain computation."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from callsheet.core.ranks import read_ranks
from callsheet.errors import ConfigError
from callsheet.run.metrics import ACROSS, OVER, MetricLog
from callsheet.run.process_groups import ProcessGroups
from callsheet.testing.ranks import run_ranks

WAYS = [(over, across) for over in OVER for across in ACROSS]
BOUNDARIES, STEPS = 3, 5

Logged = list[tuple[int, str, Any, Any, float, float | None]]
"""Boundary, name, over, across, value, weight."""


def plan(seed: int, rank: int) -> Logged:
    """Return what this rank logs: not every name at every step, in random order, some with weights, of which some are zero."""
    draw = random.Random(100 * seed + rank)
    planned: Logged = []
    for boundary in range(BOUNDARIES):
        for _ in range(STEPS):
            for over, across in draw.sample(WAYS, len(WAYS)):
                if draw.random() < 0.6:
                    weight = draw.choice((None, 0.0, 1.0, 2.5)) if over == "mean" else None
                    name = f"{over}/{across}/{draw.randrange(2)}"
                    planned.append((boundary, name, over, across, draw.uniform(-3, 3), weight))
    return planned


def here() -> tuple[int, MetricLog]:
    ranks = read_ranks()
    groups = ProcessGroups(ranks, torch.device("cpu"), 30)
    return ranks.rank, MetricLog(groups)


def taken(seed: int) -> list[dict[str, float]]:
    rank, log = here()
    planned, found = plan(seed, rank), []
    for boundary in range(BOUNDARIES):
        for at, name, over, across, value, weight in planned:
            if at == boundary:
                given = torch.tensor(value, dtype=torch.float64) if len(name) % 2 else value
                log.log({name: given}, over=over, across=across, weight=weight)
        found.append(log.take())
    return found


def expected(seed: int, size: int) -> list[dict[str, float]]:
    found = []
    for boundary in range(BOUNDARIES):
        record: dict[str, float] = {}
        plans = [[entry for entry in plan(seed, rank) if entry[0] == boundary] for rank in range(size)]
        for name in {entry[1] for planned in plans for entry in planned}:
            over, across, _ = name.split("/")
            parts = []  # the total and the weight of each rank
            for planned in plans:
                values = [
                    (value, 1.0 if weight is None else weight) for _, other, _, _, value, weight in planned if other == name
                ]
                if over == "last":
                    values = [(values[-1][0], 1.0)] if values else []
                elif over == "sum":
                    values = [(sum(value for value, _ in values), 1.0)] if values else []
                weight = sum(weight for _, weight in values)
                if weight:
                    parts.append((sum(value * weight for value, weight in values), weight))
            means = [total / weight for total, weight in parts]
            if not parts:
                continue
            if across == "mean":
                record[name] = sum(total for total, _ in parts) / sum(weight for _, weight in parts)
            else:
                record[name] = sum(means) if across == "sum" else max(means)
        found.append(record)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_reduction_equals_that_of_one_process_with_all_values(size: int) -> None:
    seed = random.randrange(1000)
    first, *others = run_ranks(taken, size, seed)
    assert all(found == first for found in others), seed  # bit by bit
    assert all(list(a) == list(b) for found in others for a, b in zip(found, first, strict=True)), seed  # in the same order
    for found, wanted in zip(first, expected(seed, size), strict=True):
        assert found == pytest.approx(wanted, rel=1e-12), seed


def with_odd_values() -> dict[str, str]:
    rank, log = here()
    log.log({"max": math.nan if rank == 1 else 1.0, "same": math.nan if rank == 2 else 2.0}, across="max")
    log.log({"mean": math.nan if rank == 1 else 1.0})
    log.log({"largest": math.inf if rank == 1 else -math.inf, "smallest": -math.inf}, across="max")
    log.log({"negative": -5.0 - rank}, across="max")
    log.log({"nothing": 1.0}, over="mean", weight=0)
    log.log({"part": float(rank)}, over="mean", weight=0 if rank == 1 else 1)
    if rank == 0:
        log.log({"only/zero": 3.0, "only/summed": 4.0}, across="mean")
        log.log({"only/largest": -1.0}, across="max")
    if rank == 2:
        log.log({"other/two": 5.0}, across="sum")
    return {name: value.hex() for name, value in log.take().items()}


def test_nan_zero_weights_and_names_that_one_rank_logs_are_reduced_correctly() -> None:
    first, *others = run_ranks(with_odd_values, 3)
    assert others == [first, first]
    assert first == {
        "max": "nan",
        "same": "nan",
        "mean": "nan",
        "largest": "inf",
        "smallest": "-inf",
        "negative": (-5.0).hex(),
        "part": (1.0).hex(),  # from ranks 0 and 2
        "only/zero": (3.0).hex(),
        "only/summed": (4.0).hex(),
        "only/largest": (-1.0).hex(),
        "other/two": (5.0).hex(),
    }


def in_two_ways(late: bool) -> str:
    rank, log = here()
    if late and rank == 0:
        log.log({"loss": 1.0})
    if late:
        log.take()
    if rank != 1:
        log.log({"loss": 1.0})
    else:
        log.log({"loss": 1.0}, over="sum", across="max")
    try:
        log.take()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("late", [False, True])
def test_a_name_logged_in_two_ways_fails_on_all_ranks(late: bool) -> None:
    assert set(run_ranks(in_two_ways, 3, late)) == {
        "the metric 'loss' was logged with over='sum', across='max' on rank 1, and with over='last', across='mean' "
        "on rank 0; use one, or another name"
    }


def after_each_other() -> str:
    rank, log = here()
    if rank == 0:
        log.log({"loss": 1.0})
    log.take()
    if rank == 0:
        log.load_state_dict({})  # as a resume does
        log.log({"loss": 1.0}, over="sum")
    try:
        log.take()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_name_that_ranks_reduce_differently_than_before_fails() -> None:
    assert set(run_ranks(after_each_other, 2)) == {
        "the metric 'loss' was logged with over='sum', across='mean' on rank 0, and with over='last', across='mean' "
        "before; use one, or another name"
    }


class CountsCalls:
    """Process groups that record which methods are called."""

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.groups, name)


def collectives_at_boundaries() -> list[list[str]]:
    ranks = read_ranks()
    counted = CountsCalls(ProcessGroups(ranks, torch.device("cpu"), 30))
    log = MetricLog(counted)
    costs = []
    for boundary in range(4):
        log.log({"loss": 1.0})
        if boundary == 2 and ranks.rank == 1:
            log.log({"extra": 1.0})
        log.take()
        costs.append(counted.calls)
        counted.calls = []
    return costs


def test_equal_schemas_cost_one_sum_and_one_maximum() -> None:
    once = ["sum_and_max"]
    assert run_ranks(collectives_at_boundaries, 2) == [[once * 2, once, [*once, "gather", *once], once]] * 2


def one_in_a_tensor(together: int) -> dict[str, float]:
    rank, log = here()
    names = ("x/a", "x/b", "x/c")
    values = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    log.log({names: values} if rank == together else dict(zip(names, values.unbind(), strict=True)), over="mean")
    log.log({("y/a", "y/b"): values[:2]}, across="max")
    return log.take()


def test_ranks_may_log_a_name_alone_or_in_a_tensor() -> None:
    wanted = {"x/a": 1.5, "x/b": 3.0, "x/c": 4.5, "y/a": 2.0, "y/b": 4.0}
    assert run_ranks(one_in_a_tensor, 2, 1) == [wanted, wanted]
