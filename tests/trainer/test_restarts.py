"""If ranks die under torch's own launcher, it restarts all of them, and the run ends with the weights of an uninterrupted one.

The long version, with random deaths and a table, is `make restarts`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .restarts import Death, restarted

ONE, SEVERAL = [Death(1, 5)], [Death(0, 4), Death(1, 9, "os._exit"), Death(0, 14, "an error")]


def check(folder: Path, rendezvous: str, ranks: int, deaths: list[Death], wanted: Any = None, **options: Any) -> None:
    wanted = wanted or restarted(folder / "undisturbed", "standalone", ranks, []).weights
    assert wanted is not None
    found = restarted(folder / "disturbed", rendezvous, ranks, deaths, **options)
    assert found.attempts == len(deaths) + 1, found.output
    assert found.weights == wanted, found.output


@pytest.mark.test_all
def test_a_run_restarted_by_torchrun_has_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    check(tmp_path, "standalone", 2, ONE)


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["standalone", "c10d", "static", "two machines", "launch"])
def test_a_run_restarted_several_times_has_the_weights_of_an_uninterrupted_one(rendezvous: str, tmp_path: Path) -> None:
    """Each machine counts its own restarts: a rank dies first on one machine, then on the other."""
    check(tmp_path, rendezvous, 2, SEVERAL)


@pytest.mark.slow
def test_launch_restarts_a_function_that_makes_a_group_itself(tmp_path: Path) -> None:
    check(tmp_path, "launch", 2, ONE, has_group=True)
