"""The matrix of built-ins and hosts says what is found when they are run; `make matrix` writes what is found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import callsheet.bridges.matrix as matrix
from callsheet.bridges.matrix import Framework, frameworks
from callsheet.testing import Subject

from .cells import cell, home

HOMES = sorted(
    path.stem for path in (Path(__file__).parent / "homes").glob("*.py") if path.stem not in ("__init__", "job", "trainer")
)
WRITES = os.environ.get("CALLSHEET_MATRIX") == "write"
FILES = Path(matrix.__file__).parent


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """More would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.mark.parametrize("where", HOMES)
def test_a_built_in_does_in_a_host_what_the_matrix_says(
    where: str, built_in: str, subjects: Mapping[str, Subject], tmp_path: Path, shared: Path
) -> None:
    if built_in == "Logger":
        pytest.skip("the base of the others")
    try:
        it = home(where)
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed here")
    found = cell(where, built_in, subjects[built_in], tmp_path, shared)
    if WRITES:
        path = FILES / f"{where}.json"
        known = matrix.read(path.read_text("utf-8")) if path.exists() else Framework(it.NAME, it.VERSION)
        cells = {**known.callbacks, built_in: found}
        path.write_text(
            replace(known, name=it.NAME, version=it.VERSION, how=getattr(it, "HOW", ""), callbacks=cells).to_json(), "utf-8"
        )
    else:
        said = frameworks()[where].callbacks
        assert said.get(built_in) == found, "make matrix writes what is found"
