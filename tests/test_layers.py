"""Imports go from higher to lower layers, and the core imports only the standard library."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import callsheet

SOURCE = Path(callsheet.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("core",),
    ("lanes",),
    ("checkpoint", "transport"),
    ("run", "metrics"),
    ("callbacks", "loggers"),
    ("trainer",),
    ("bridges", "launcher", "testing", "report"),
    ("recipes",),
    ("exec",),
    ("compat", "plugins", "cli", "__main__"),
)
"""Folders and files of the package, from the bottom up. One imports from its own folder, and from folders named before it."""

STANDARD_LIBRARY_ONLY = ("errors", "core", "lanes")

PUBLIC = (
    "callsheet",
    "callsheet.errors",
    "callsheet.callbacks",
    "callsheet.loggers",
    "callsheet.trainer",
    "callsheet.checkpoint",
    "callsheet.launcher",
    "callsheet.metrics",
    "callsheet.report",
    "callsheet.transport",
    "callsheet.testing",
    "callsheet.recipes",
)
"""The import paths of users, in addition to the modules in PUBLIC_FOLDERS; docs/architecture.md lists them."""

PUBLIC_FOLDERS = ("bridges", "compat", "plugins")

ORDER = [name for layer in LAYERS for name in layer]
ROOT = ORDER.index("lanes") + 1  # callsheet/__init__.py imports from the core; nothing that it imports may import it
FILES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the name of the module in `path`, such as `checkpoint.seal`. The package itself has the empty name."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def layer_of(module: str) -> int:
    return ORDER.index(module.split(".")[0]) if module else ROOT


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def statements(body: list[ast.stmt], *, inside_functions: bool) -> Iterator[ast.stmt]:
    """Yield all statements that run at import and, with `inside_functions`, those in functions."""
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


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def imports(path: Path, *, inside_functions: bool = False) -> frozenset[str]:
    """Return the full names of what `path` imports. For `from package import module`, this is the module."""
    return names_imported(path, statements(tree_of(path).body, inside_functions=inside_functions))


def imports_for_types(path: Path) -> frozenset[str]:
    """Return the full names of what only type checkers import, below `if TYPE_CHECKING`."""
    blocks = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.If) and is_type_checking(node.test)]
    return names_imported(path, (statement for block in blocks for statement in block.body))


def names_imported(path: Path, body: Iterable[ast.AST]) -> frozenset[str]:
    """Return the full names of what these statements of `path` import."""
    found: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{path.name}:{statement.lineno} imports relatively"
            assert statement.module is not None
            for alias in statement.names:
                inner = f"{statement.module}.{alias.name}"
                found.add(inner if inner.removeprefix("callsheet.") in MODULES else statement.module)
    return frozenset(found)


def own(names: frozenset[str]) -> set[str]:
    """Return those names that are callsheet's, without the package's name."""
    return {name.partition(".")[2] for name in names if name.split(".")[0] == "callsheet"}


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_every_module_has_a_layer(module: str) -> None:
    assert module.split(".")[0] in ORDER, f"{module} is in no layer: write its folder into LAYERS, and into docs/architecture.md"


def test_the_picture_in_the_docs_shows_the_layers() -> None:
    picture = SOURCE.parent.parent / "docs" / "images" / "layers.svg"
    shown = [row.split(", ") for row in re.findall('font-weight="bold">([^<]+)<', picture.read_text())]
    assert [set(row) for row in reversed(shown)] == [set(layer) - {"__main__"} for layer in LAYERS]


@pytest.mark.parametrize("module", list(MODULES))
def test_imports_go_down(module: str) -> None:
    for imported in own(imports(MODULES[module])):
        inside = bool(module) and imported.split(".")[0] == module.split(".")[0]
        assert inside or layer_of(imported) < layer_of(module), f"{module or 'callsheet'} imports {imported or 'callsheet'}"


IMPORTS_THAT_GO_UP = {
    ("core.dispatch_table", "lanes"),  # only a callback that has a lane needs them
    ("launcher.recipe_job", "cli"),  # launch() takes the same recipes as the command line
}
"""Imports inside functions from a higher layer: each module, and the layer that it imports from."""


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_imports_inside_functions_go_down_too(module: str) -> None:
    for imported in own(imports(MODULES[module], inside_functions=True)) - {""}:
        layer = imported.split(".")[0]
        inside = layer == module.split(".")[0]
        assert inside or layer_of(imported) < layer_of(module) or (module, layer) in IMPORTS_THAT_GO_UP, f"{module}: {imported}"


def test_no_module_imports_itself_through_others() -> None:
    """Modules in one folder may import each other, but not in a cycle."""
    inner = {name: {each for each in own(imports(path)) if each in MODULES} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a cycle of imports: {' -> '.join([*path, module])}"
        if module not in done:
            for imported in inner[module] - {module}:
                visit(imported, (*path, module))
            done.add(module)

    for module in inner:
        visit(module, ())


@pytest.mark.parametrize("module", [name for name in MODULES if not name or name.split(".")[0] in STANDARD_LIBRARY_ONLY])
def test_the_core_imports_the_standard_library_alone(module: str) -> None:
    names = {name.split(".")[0] for name in imports(MODULES[module], inside_functions=True)}
    assert names - {"callsheet"} <= sys.stdlib_module_names


@pytest.mark.parametrize("module", [name for name in MODULES if not name or name.split(".")[0] in STANDARD_LIBRARY_ONLY])
def test_type_checkers_import_torch_for_the_core_and_nothing_else(module: str) -> None:
    """The core's fields hold tensors. Their type is `torch.Tensor`, which no module of the core imports when it runs."""
    names = {name.split(".")[0] for name in imports_for_types(MODULES[module]) - {"torch"}}
    assert names - {"callsheet"} <= sys.stdlib_module_names


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, callsheet; print(sorted({'torch', 'numpy', 'yaml'} & sys.modules.keys()), callsheet.Callback.__name__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "[] Callback\n", ran.stderr


def test_the_manager_is_imported_at_its_first_use() -> None:
    """A file of callbacks needs neither the manager nor the state of a run. They take half of the package's import time."""
    code = (
        "import sys, callsheet\n"
        "loaded = lambda: sorted({'callsheet.core.manager', 'callsheet.core.run_state'} & sys.modules.keys())\n"
        "before = loaded()\n"
        "callsheet.CallbackManager, callsheet.TrainState\n"
        "print(before, loaded())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "[] ['callsheet.core.manager', 'callsheet.core.run_state']\n", ran.stderr


def test_lanes_are_imported_when_a_handler_has_one() -> None:
    code = (
        "import sys, callsheet\n"
        "loaded = lambda: any(name.startswith('callsheet.lanes.') for name in sys.modules)\n"
        "class Slow(callsheet.Callback):\n"
        "    def on_train_step_end(self, ctx): pass\n"
        "manager = callsheet.CallbackManager([Slow()])\n"
        "before = loaded()\n"
        "manager.add(callsheet.Background(Slow()))\n"
        "print(before, loaded())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "False True\n", ran.stderr


def test_every_name_in_all_exists() -> None:
    for name in set(callsheet.__all__) - {"Trainer"}:  # Trainer needs torch
        assert getattr(callsheet, name) is not None
    with pytest.raises(AttributeError, match="module 'callsheet' has no attribute 'Nonsense'"):
        _ = callsheet.Nonsense


def test_users_import_from_the_public_modules_only() -> None:
    """The documentation and the examples show no other import path; a change of the layout then changes nothing for a user."""
    root = SOURCE.parent.parent
    texts = [root / "README.md", *sorted((root / "docs").rglob("*.md")), *sorted((root / "examples").rglob("*.py"))]
    if not texts[0].exists():
        pytest.skip("the package is installed without its documentation")
    for path in texts:
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 3 and words[0] == "from" and words[1].split(".")[0] == "callsheet" and words[2] == "import":
                parts = words[1].split(".")
                is_public = words[1] in PUBLIC or (len(parts) == 3 and parts[1] in PUBLIC_FOLDERS) or parts[1] == "compat"
                assert is_public, f"{path.name} shows {line.strip()!r}, which is not a public import path"


def test_the_check_reads_imports_in_every_kind_of_statement(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "import callsheet.core.manager\n"
        "try:\n    from callsheet.core import control\nexcept ImportError:\n    import torch.nn\n"
        "if TYPE_CHECKING:\n    from callsheet.core.context import Context\nelse:\n    import json\n"
        "def later():\n    import numpy\n"
    )
    assert imports(file) == {"typing", "callsheet.core.manager", "callsheet.core.control", "torch.nn", "json"}
    assert imports(file, inside_functions=True) >= {"numpy"}
    assert imports_for_types(file) == {"callsheet.core.context"}
    assert own(imports(file)) == {"core.manager", "core.control"}
    assert layer_of("trainer.loop") > layer_of("run.records") > layer_of("core.context") > layer_of("errors")


def test_the_package_exports_what_a_user_writes() -> None:
    """The other exceptions are in `callsheet.errors`; these two are those that a program would catch."""
    exported = {name: getattr(callsheet, name) for name in callsheet.__all__}
    errors = {name for name, each in exported.items() if isinstance(each, type) and issubclass(each, BaseException)}
    assert errors == {"CallsheetError", "NonFiniteError"}
    assert set(exported) - errors == {
        *("Background", "Callback", "CallbackManager", "CallbackSpec", "CheckpointInfo", "Context"),
        *("CostReport", "Event", "Interval"),
        *("MetricsRecord", "Outcome", "Process", "RunInfo", "Time", "Timestamp", "TrainState", "Trainer"),
        *("at", "attach", "every", "launch", "local_rank_zero_only", "normalize_callbacks", "rank_zero_only", "should_fire"),
    }


def test_import_callsheet_is_enough_for_the_public_modules() -> None:
    """`callsheet.callbacks.SpeedMonitor` works without `import callsheet.callbacks`, and a misspelled name gets one hint."""
    names = sorted([each.partition(".")[2] for each in PUBLIC if "." in each] + [*PUBLIC_FOLDERS])
    assert sorted(callsheet._SUBPACKAGES) == names
    code = f"import callsheet; print([getattr(callsheet, name).__name__ for name in {names}]); callsheet.Calback"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == str([f"callsheet.{name}" for name in names]), ran.stderr
    assert (
        ran.stderr.splitlines()[-1] == "AttributeError: module 'callsheet' has no attribute 'Calback'; did you mean 'Callback'?"
    )
