"""The matrix of built-in callbacks and hosts agrees with what these tests find. `make matrix` writes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from callsheet import Callback, callbacks, loggers
from callsheet.bridges.matrix import frameworks
from callsheet.testing import Subject

from .cells import cell, loop_of
from .rows import check_or_write_cell

LOOPS = sorted(
    path.stem for path in (Path(__file__).parent / "loops").glob("*.py") if path.stem not in ("__init__", "job", "trainer")
)
BUILT_INS = [
    name
    for module in (callbacks, loggers)
    for name in module.__all__
    if isinstance(kind := getattr(module, name), type) and issubclass(kind, Callback) and kind is not loggers.Logger
]
ALWAYS = (
    "CheckpointSaver",
    "EMA",
    "EarlyStopper",
    "GradientAccumulationScheduler",
    "History",
    "JSONLLogger",
    "OptimizerMonitor",
    "SpeedMonitor",
)
"""One built-in of each kind, which every test run checks. `make slow` and `make matrix` check the others."""


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread: more threads would compete for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.mark.parametrize("where", LOOPS)
@pytest.mark.parametrize("built_in", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in BUILT_INS])
def test_a_built_in_does_in_a_host_what_the_matrix_says(
    where: str, built_in: str, subjects: Mapping[str, Subject], tmp_path: Path, shared: Path
) -> None:
    try:
        it = loop_of(where)
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed here")
    check_or_write_cell(where, "callbacks", built_in, cell(where, built_in, subjects[built_in], tmp_path, shared), it)


def test_the_matrix_has_every_built_in_and_the_version_of_every_framework() -> None:
    assert sorted(frameworks()) == LOOPS
    for where, framework in frameworks().items():
        assert sorted(framework.callbacks) == sorted(BUILT_INS), where
        try:
            it = loop_of(where)
        except ModuleNotFoundError:
            continue  # this test also runs in a separate venv, for the frameworks that need one
        assert (framework.name, framework.version, framework.how) == (it.NAME, it.VERSION, getattr(it, "HOW", ""))
