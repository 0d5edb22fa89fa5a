"""Ranks and rank gates. The tests of gathering start two processes."""

import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callsheet.core.ranks import Ranks, check_gate, gather, initialized_distributed, read_ranks
from callsheet.errors import ConfigError
from forked import python  # type: ignore[import-not-found]  # pytest has its folder on the path

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_a_single_process_is_rank_0_of_1() -> None:
    assert read_ranks() == Ranks(0, 0, 0, 1)


def test_ranks_are_read_from_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in zip(VARIABLES, ("5", "8", "1", "2"), strict=True):
        monkeypatch.setenv(variable, value)
    assert read_ranks() == Ranks(rank=5, local_rank=1, node_rank=2, world_size=8)


def test_the_local_rank_is_the_rank_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert read_ranks().local_rank == 3


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", ["two", "-1", "1.5"])
def test_a_variable_that_is_not_a_number_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{variable} should be a whole number, not '{value}'"):
        read_ranks()


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "")
    assert read_ranks().rank == 0


@pytest.mark.parametrize(
    ("gate", "passing"),
    [
        ("all", [(0, 0), (1, 1), (2, 0), (3, 1)]),
        ("zero", [(0, 0)]),
        ("local_zero", [(0, 0), (2, 0)]),
        ({1, 2}, [(1, 1), (2, 0)]),
        (frozenset({9}), []),
    ],
)
def test_a_gate_passes_the_expected_ranks(gate: Any, passing: list[tuple[int, int]]) -> None:
    two_machines = [Ranks(rank, rank % 2, rank // 2, 4) for rank in range(4)]
    assert [(ranks.rank, ranks.local_rank) for ranks in two_machines if ranks.passes(gate)] == passing


@given(st.sets(st.integers(0, 100), min_size=1), st.integers(0, 100))
def test_a_gate_that_is_a_set_passes_the_ranks_in_it(gate: set[int], rank: int) -> None:
    assert Ranks(rank=rank).passes(check_gate(gate)) == (rank in gate)


@pytest.mark.parametrize("gate", ["all", "zero", "local_zero"])
def test_check_gate_returns_a_known_word_unchanged(gate: str) -> None:
    assert check_gate(gate) == gate


def test_check_gate_returns_a_collection_as_a_frozenset() -> None:
    ranks = [3, 1, 3]
    stored = check_gate(ranks)
    ranks.append(7)
    assert stored == frozenset({1, 3})


def test_an_unknown_gate_names_the_nearest_one() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown ranks 'local_zer0'; did you mean 'local_zero'\? \(one of all, zero, local_zero"
    ):
        check_gate("local_zer0")


@pytest.mark.parametrize("gate", [set(), [], 0, None, {-1}, {True}, {"0"}, {1.0}])
def test_a_value_that_is_not_a_gate_is_rejected(gate: object) -> None:
    with pytest.raises(ConfigError, match=r"unknown ranks .*set of rank numbers like"):
        check_gate(gate)


def test_gather_in_a_single_process_returns_its_value() -> None:
    assert gather("x") == ["x"]
    assert initialized_distributed() is None


PROGRAM = """
import sys, torch.distributed as dist
from callsheet.core.ranks import gather, initialized_distributed, read_ranks
rank = int(sys.argv[1])
before = read_ranks()
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
assert initialized_distributed() is dist
print(before.rank, before.world_size, read_ranks().rank, read_ranks().world_size, gather({"rank": rank}))
dist.destroy_process_group()
"""


@pytest.mark.test_all
def test_two_processes_gather_in_rank_order_and_the_process_group_overrides_the_environment(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    meet = f"file://{tmp_path_factory.mktemp('meet') / 'store'}"
    started = [
        subprocess.Popen([python(), "-c", PROGRAM, str(rank), meet], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    for rank, (out, errors) in enumerate(ended):
        assert out == f"0 1 {rank} 2 [{{'rank': 0}}, {{'rank': 1}}]\n", errors
