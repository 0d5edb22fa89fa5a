"""Which fields and methods of the context a callback uses, read from its source code.

Hosts use this to reject callbacks that need something the host does not support.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from callsheet.core.background import inner
from callsheet.core.callback import Callback

_NAMES = ("ctx", "context")


def reads_of(callback: Callback) -> set[str]:
    """Return the fields and methods of the context that the callback's class and its base classes use, such as `loss` or `control.stop`.

    Fields that the class checks with `ctx.has("loss")` are left out. Functions that receive the context are not searched, and a class
    without source code has none.
    """
    found, asked = set(inner(callback).snapshot_fields), set[str]()
    for kind in type(inner(callback)).__mro__:
        if kind is Callback:
            break
        for node in ast.walk(_tree(kind)):
            if isinstance(node, ast.Attribute):
                found.add(_path(node))
            elif (
                isinstance(node, ast.Call) and _path(node.func) == "has" and node.args and isinstance(node.args[0], ast.Constant)
            ):
                asked.add(str(node.args[0].value))
    return {path for path in found if path and path.split(".")[0] not in asked}


def writes_to_run_folder(callback: Callback) -> bool:
    """Return whether the callback may write files to the run's folder: it declares so, or its source code reads `run.folder`."""
    return inner(callback).writes_to_run_folder or "run.folder" in reads_of(callback)


def _path(node: Any) -> str:
    """Return `control.stop` for `ctx.control.stop`, and an empty string for an expression without the context."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id in _NAMES else ""


def _tree(kind: type) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # the class has no source file
        return ast.Module([], [])
