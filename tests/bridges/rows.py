"""Compares the rows of the matrix with the results of the tests, or, in `make matrix`, writes them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import callsheet.bridges.matrix as matrix
from callsheet.bridges.matrix import Cell, Derived, Framework, frameworks

WRITES = os.environ.get("CALLSHEET_MATRIX") == "write"
FILES = Path(matrix.__file__).parent


def check_or_write_cell(bridge: str, part: str, name: str, found: Cell, loop: Any = None) -> None:
    """Compare a cell of the matrix with `found`, or write it.

    `part` is `callbacks` or `guests`. `loop` is the module of the framework's loop, whose name and version are written.

    Raises:
        AssertionError: the matrix has another value.
    """
    if not WRITES:
        assert getattr(frameworks()[bridge], part).get(name) == found, f"make matrix writes what is found: {found}"
        return
    path = FILES / f"{bridge}.json"
    known = matrix.read(path.read_text("utf-8")) if path.exists() else Framework(bridge, "")
    if loop is not None:
        known = replace(known, name=loop.NAME, version=loop.VERSION, how=getattr(loop, "HOW", ""))
    rows: dict[str, Any] = {part: {**getattr(known, part), name: found}}
    known = replace(known, **rows)
    path.write_text(known.to_json(), "utf-8")


def check_or_write_trainer_cell(name: str, library: str, check: str, found: Cell) -> None:
    """Compare the result of a check of a trainer that is built on the Hugging Face Trainer with its row, or write it.

    `make versions` compares the results of other versions too, so the version is only written, not compared.

    Raises:
        AssertionError: the matrix has another value.
    """
    bridge = "huggingface"
    if not WRITES:
        assert frameworks()[bridge].derived[name].checks.get(check) == found, f"make matrix writes what is found: {found}"
        return
    path = FILES / f"{bridge}.json"
    known = matrix.read(path.read_text("utf-8"))
    checks = known.derived[name].checks if name in known.derived else {}
    derived = {**known.derived, name: Derived(library, {**checks, check: found})}
    path.write_text(replace(known, derived=derived).to_json(), "utf-8")
