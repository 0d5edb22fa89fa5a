"""Every callback class that the docs define passes the conformance checks."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

from callsheet import Callback
from callsheet.testing.conformance import CONFORMANCE

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r'^```python(?: title="(\w+)\.py")?[^\n]*\n(.*?)^```$', re.MULTILINE | re.DOTALL)

OPTIONS: dict[str, dict[str, Any]] = {
    "Kill": {"step": 1_000_000},
    "Outcome": {"loop": "small"},
    "StopBelow": {"limit": 1e-9},
}
"""Arguments of the classes that cannot be created without any."""

NOT_TESTED = {
    "docs/lanes.md": "its async handler needs the lane in which the page puts it",
    "docs/troubleshooting.md": "its callbacks are wrong on purpose",
    "docs/howto/send_callbacks.md": "its callbacks are sent with a state, which no run sets back, or are rejected on purpose",
    "docs/howto/test_a_callback.md": "its first callback is wrong on purpose, and the page tests the second one",
}


def _code_of(page: Path) -> dict[str, str]:
    """Return the page's imports, classes and functions, by module: blocks with a title are files of their own."""
    modules: dict[str, list[str]] = {}
    for title, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        name = title or f"page_{re.sub(r'[^a-z0-9]', '_', str(page.relative_to(ROOT)).lower())}"
        found = modules.setdefault(name, [])
        found += [
            ast.unparse(node)
            for node in ast.parse(block).body
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)) and not node_is_decorated(node)
        ]
    return {name: "\n".join(code) for name, code in modules.items()}


def node_is_decorated(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and bool(node.decorator_list)


def _defined() -> list[tuple[str, str, str]]:
    """Return a page, the module and the name of each class in the docs that derives from a class of callsheet."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {
        ast.unparse(node): (str(page.relative_to(ROOT)), module, node.name)  # several pages have the same class
        for page in pages
        if str(page.relative_to(ROOT)) not in NOT_TESTED
        for module, code in _code_of(page).items()
        for node in ast.parse(code).body
        if isinstance(node, ast.ClassDef) and {"Callback", "Logger"} & {ast.unparse(base) for base in node.bases}
    }
    return list(found.values())


DEFINED = _defined()


def test_the_callbacks_of_the_docs_are_found() -> None:
    names = {name for _, _, name in DEFINED}
    assert {"LossCurve", "PlateauStopper", "StopBelow", "Plateau", "LossPrinter", "TextLogger"} <= names
    assert all((ROOT / page).exists() for page in NOT_TESTED)


@pytest.mark.test_all
@pytest.mark.parametrize(("page", "module", "name"), DEFINED, ids=lambda value: value)
def test_a_callback_of_the_docs_passes_the_checks_on_one_rank(
    page: str, module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = _code_of(ROOT / page)
    for file, text in code.items():
        (tmp_path / f"{file}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, file, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    kind = getattr(importlib.import_module(module), name)
    try:
        if not issubclass(kind, Callback):
            pytest.skip("the class derives from a class of another framework")
        for check in CONFORMANCE:
            if check.__name__ != "runs_on_ranks":  # the other process could not import the page's class
                try:
                    check(partial(kind, **OPTIONS[name]) if name in OPTIONS else kind, tmp_path)
                except SkipTest:
                    pass
    finally:
        for file in code:
            sys.modules.pop(file, None)
