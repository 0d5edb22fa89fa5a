"""Makes questions and answers about Python functions from their docstrings. The source files are parsed, not executed."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from callsheet.errors import ConfigError
from callsheet.recipes.data.tables import Row, Table

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages"})

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Documented(Table):
    """A table of conversations about functions. Each row has a question about a function, and the function's docstring as the answer.

    The user gives the module and the signature, and the assistant answers with the docstring's first line.
    """

    def __init__(self, rows: list[tuple[str, Row]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index][1]

    def place(self, index: int) -> str:
        """Return the file and the line at which the function of a row is defined."""
        return self._rows[index][0]


@dataclass
class Docstrings:
    """The documented functions of a folder of Python files.

    Some files are held out for validation. A file's name decides whether the file is held out, so the split is always the same.

    Args:
        folder: the folder of Python files; None is the standard library of the running Python, without its tests.
        held_out_percent: the percentage of files for validation.
        longest_signature: the maximum number of characters of a signature; functions with a longer signature are left out.
    """

    folder: str | None = None
    held_out_percent: int = 10
    longest_signature: int = 100

    def __post_init__(self) -> None:
        if not 0 < self.held_out_percent < 100:
            raise ConfigError(f"docstrings.held_out_percent={self.held_out_percent}: give more than 0 and less than 100")

    @property
    def train(self) -> Documented:
        """Return the training rows, which are the functions and methods of files that are not held out."""
        return self._tables["train"]

    @property
    def validation(self) -> dict[str, Documented]:
        """Return the rows of the held-out files as two datasets, named `functions` and `methods`."""
        return {name: self._tables[name] for name in ("functions", "methods")}

    @cached_property
    def _tables(self) -> dict[str, Documented]:
        root = Path(self.folder if self.folder is not None else sysconfig.get_path("stdlib"))
        rows: dict[str, list[tuple[str, Row]]] = {"train": [], "functions": [], "methods": []}
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if _TEST_FOLDERS & set(inside.parts):
                continue
            is_held_out = int(sha256(inside.as_posix().encode()).hexdigest(), 16) % 100 < self.held_out_percent
            for owner, function in _find_functions(path):
                signature = f"{owner}{function.name}({ast.unparse(function.args)})"
                answer = (ast.get_docstring(function) or "").strip().partition("\n")[0].strip()
                if not answer or len(signature) > self.longest_signature:
                    continue
                module = ".".join(inside.with_suffix("").parts)
                messages = [
                    {"role": "user", "content": f"{module}: {signature}"},
                    {"role": "assistant", "content": answer},
                ]
                name = "train" if not is_held_out else "methods" if owner else "functions"
                rows[name].append((f"{path}:{function.lineno}", {"messages": messages}))
        if missing := [name for name, found in rows.items() if not found]:
            raise ConfigError(
                f"docstrings.folder: {root} has no documented functions for {', '.join(missing)}; give a folder with more files"
            )
        return {name: Documented(found) for name, found in rows.items()}


def _find_functions(path: Path) -> Iterator[tuple[str, _Function]]:
    """Yield each function of a file with its class prefix (`Class.`, or an empty string), except functions inside functions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hide warnings of invalid escapes in third-party source
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # skip a file that cannot be parsed, such as a template or source for another version of Python
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        owner, node = stack.pop()
        if isinstance(node, _Function):
            yield owner, node
        else:
            inside = f"{node.name}." if isinstance(node, ast.ClassDef) else owner
            stack.extend((inside, child) for child in reversed(list(ast.iter_child_nodes(node))))
