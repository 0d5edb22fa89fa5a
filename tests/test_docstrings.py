"""Every public name has a docstring, and the examples in docstrings run."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__main__.py")

TREES = {path: ast.parse(path.read_text()) for path in MODULES}


def named(node: ast.expr) -> str:
    """`Base` for the base class `Base`, `module.Base` or `Base[T]`."""
    if isinstance(node, ast.Subscript):
        return named(node.value)
    return getattr(node, "id", "") or getattr(node, "attr", "")


COMMON = {"load_state_dict"}
"""Methods that mean the same in every class: this one loads what `state_dict` of the class returned."""

BASES: dict[str, set[str]] = {}
DOCUMENTED: dict[str, set[str]] = {}
for tree in TREES.values():
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef):
            BASES.setdefault(each.name, set()).update(map(named, each.bases))
            methods = [node for node in each.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
            DOCUMENTED.setdefault(each.name, set()).update(node.name for node in methods if ast.get_docstring(node))


def inherited(name: str) -> set[str]:
    """The methods that base classes in the package document: an override repeats that only if it has something to add."""
    return set().union(*(DOCUMENTED[base] | inherited(base) for base in BASES[name] if base in BASES and base != name))


def undocumented(tree: ast.Module) -> list[str]:
    missing = [] if ast.get_docstring(tree) else ["module"]

    def look(body: list[ast.stmt], prefix: str, documented: set[str]) -> None:
        for node in body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            # the first overload and the getter have the docstring for the others
            is_another = any(
                getattr(mark, "id", "") == "overload" or getattr(mark, "attr", "") == "setter" for mark in node.decorator_list
            )
            if not is_another and node.name not in documented and not ast.get_docstring(node):
                missing.append(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{prefix}{node.name}.", COMMON | inherited(node.name))

    look(tree.body, "", set())
    return missing


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_public_name_has_a_docstring(path: Path) -> None:
    assert undocumented(TREES[path]) == []


REFERENCE = SOURCE.parent / "docs" / "reference"
API = {
    name
    for page in REFERENCE.glob("*.md")
    for name in re.findall(r"^::: callsheet[\w.]*\.(\w+)$", page.read_text(), re.MULTILINE)
}
"""The names that have a place in the API reference."""


def documented_arguments(docstring: str) -> list[str]:
    """The names in the section Args, where one entry may describe several: `run_name, runs_folder: ...`."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n|\n)*)", docstring + "\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*):", section[1], re.MULTILINE) if section else []
    return [name.strip("*") for entry in entries for name in entry.split(", ")]


def wrong_sections(tree: ast.Module) -> list[str]:
    """Functions whose Args are not their parameters, and sections under another name than Google's."""
    wrong = []
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in API]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in API]
    of_the_api = {id(node) for node in (*functions, *(method for each in classes for method in each.body))}
    for node in ast.walk(tree):
        docstring = (
            ast.get_docstring(node)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            else None
        )
        if not docstring:
            continue
        name = getattr(node, "name", "module")
        if other := re.search(r"^(Example|Arguments|Parameters|Params|Return|Yield|Raise|Throws):$", docstring, re.MULTILINE):
            wrong.append(f"{name}: the section {other[0]}")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (described := documented_arguments(docstring)):
            given = node.args
            parameters = [
                each.arg for each in (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg) if each
            ]
            public = {each for each in parameters if each not in ("self", "cls", "ctx") and not each.startswith("_")}
            wrong += [f"{name}: Args describe {each}, which is no parameter" for each in described if each not in parameters]
            if id(node) in of_the_api:
                wrong += [f"{name}: Args leave out {each}" for each in sorted(public.difference(described))]
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_sections_of_docstrings_are_google_s_and_args_are_the_parameters(path: Path) -> None:
    """A function may describe its parameters in a sentence. If a public one has a section Args, the section is complete."""
    assert wrong_sections(TREES[path]) == []


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
