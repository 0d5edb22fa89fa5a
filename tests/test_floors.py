"""Imports go down the floors, and the core needs the standard library alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import callsheet

SOURCE = Path(callsheet.__file__).parent

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "extras", "familiar_names", "on_demand", "reasons", "working", "time", "lifecycle", "events", "hooks"),
    ("control", "distributed", "randomness", "log_ranks", "lanes", "run_lock", "run_marker", "disk_thread"),
    ("context", "callback", "background"),
    (
        "snapshot",
        "capture",
        "process",
        "lane_process",
        "registration",
        "sheet",
        "delivery",
        "costs",
        "spans",
        "state_calls",
        "manager",
        "lifetime",
        "metrics",
        "signals",
    ),
    ("checkpoint", "transport"),
    ("callbacks", "loggers"),
    ("trainer",),
    ("bridges", "launcher", "testing", "report"),
    ("recipes",),
    ("compat", "commands", "cli", "__main__"),
)
"""DESIGN.md, `## Layers`, from the ground up: a module imports from the floors below it, and on its own floor from what stands before it.
A folder stands for all that is in it."""

CORE = 3
"""Up to this floor nothing but the standard library is imported."""

PLACE = {name: (floor, place) for floor, names in enumerate(FLOORS) for place, name in enumerate(names)}
ROOT = (CORE, len(FLOORS[CORE]))  # callsheet/__init__.py stands on the core, and nothing below may import it

FILES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    """The module in `path`: `checkpoint.seal`; the empty name is the package itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def place_of(module: str) -> tuple[int, int]:
    return PLACE[module.split(".")[0]] if module else ROOT


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def statements(body: list[ast.stmt], *, inside_functions: bool) -> Iterator[ast.stmt]:
    """All statements that run at import, and, where asked for, those inside functions."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions:
            continue
        if isinstance(statement, ast.If) and is_type_checking(statement.test):
            yield from statements(statement.orelse, inside_functions=inside_functions)
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, name, []), inside_functions=inside_functions)
        for handler in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from statements(handler.body, inside_functions=inside_functions)


def imports(path: Path, *, inside_functions: bool = False) -> set[str]:
    """The full names of what `path` imports; of `from package import module`, the module."""
    found: set[str] = set()
    for statement in statements(ast.parse(path.read_text()).body, inside_functions=inside_functions):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{path.name}:{statement.lineno} imports relatively"
            assert statement.module is not None
            for alias in statement.names:
                inner = f"{statement.module}.{alias.name}"
                found.add(inner if inner.removeprefix("callsheet.") in MODULES else statement.module)
    return found


def own(names: set[str]) -> set[str]:
    """Of those, callsheet's, without the package's name."""
    return {name.partition(".")[2] for name in names if name.split(".")[0] == "callsheet"}


def test_the_table_names_nothing_twice() -> None:
    names = [name for floor in FLOORS for name in floor]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_every_module_stands_on_a_floor(module: str) -> None:
    assert module.split(".")[0] in PLACE, f"{module} stands on no floor: write it into FLOORS, and into docs/architecture.md"


@pytest.mark.parametrize("module", [name for name in MODULES if name.split(".")[0] in PLACE or not name])
def test_imports_go_down(module: str) -> None:
    for imported in own(imports(MODULES[module])):
        inside = bool(module) and imported.split(".")[0] == module.split(".")[0]  # within one folder
        assert inside or place_of(imported) < place_of(module), f"{module or 'callsheet'} imports {imported or 'callsheet'}"


@pytest.mark.parametrize("module", [name for name in MODULES if not name or PLACE.get(name.split(".")[0], (99, 0))[0] <= CORE])
def test_the_core_imports_the_standard_library_alone(module: str) -> None:
    names = {name.split(".")[0] for name in imports(MODULES[module], inside_functions=True)}
    assert names - {"callsheet"} <= sys.stdlib_module_names


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, callsheet; print(sorted({'torch', 'numpy', 'yaml'} & sys.modules.keys()), callsheet.Callback.__name__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "[] Callback\n", ran.stderr


def test_what_the_package_promises_is_there() -> None:
    for name in set(callsheet.__all__) - {"Trainer"}:  # it needs torch
        assert getattr(callsheet, name) is not None
    with pytest.raises(AttributeError, match="module 'callsheet' has no attribute 'Nonsense'"):
        _ = callsheet.Nonsense


def test_the_check_finds_an_import_that_goes_up(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "import callsheet.core.manager\n"
        "try:\n    from callsheet import control\nexcept ImportError:\n    import torch.nn\n"
        "if TYPE_CHECKING:\n    from callsheet.core.context import Context\nelse:\n    import json\n"
        "def later():\n    import numpy\n"
    )
    assert imports(file) == {"typing", "callsheet.core.manager", "callsheet.core.control", "torch.nn", "json"}
    assert imports(file, inside_functions=True) >= {"numpy"}
    assert own(imports(file)) == {"manager", "control"}
    assert place_of("manager") > place_of("context") > place_of("control") > place_of("time") > place_of("errors")
