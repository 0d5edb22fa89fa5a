"""Every public name says what it is, and the examples in docstrings run."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

from callsheet.checkpoint import Folder
from callsheet.trainer.data import Sharing

SOURCE = Path(__file__).resolve().parent.parent / "src"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__main__.py")


PROTOCOLS = {name.__name__: set(dir(name)) for name in (Folder, Sharing)}
"""What these say of their methods, they say of those of every class that derives from them."""


def undocumented(tree: ast.Module) -> list[str]:
    missing = [] if ast.get_docstring(tree) else ["module"]

    def look(body: list[ast.stmt], prefix: str, inherited: set[str]) -> None:
        for node in body:
            if getattr(node, "name", "") in inherited:
                continue
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            # what the first of them says, or the getter, the others do not repeat
            is_another = any(
                getattr(mark, "id", "") == "overload" or getattr(mark, "attr", "") == "setter" for mark in node.decorator_list
            )
            if not is_another and not ast.get_docstring(node):
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                bases = [getattr(base, "id", "") for base in node.bases]
                look(node.body, f"{prefix}{node.name}.", set().union(*(PROTOCOLS.get(base, set()) for base in bases)))

    look(tree.body, "", set())
    return missing


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_public_name_has_a_docstring(path: Path) -> None:
    assert undocumented(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "name",
    [
        "callsheet.core.callback",
        "callsheet.core.manager",
        "callsheet.testing.grammar",
        "callsheet.core.time",
        "callsheet.trainer.trainer",
    ],
)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert found.attempted
    assert not found.failed
