"""What a callback reads of the context, as its source shows: for hosts that refuse by name what needs more than they have to give."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from callsheet.background import inner
from callsheet.callback import Callback

_NAMES = ("ctx", "context")


def reads_of(callback: Callback) -> set[str]:
    """The fields and methods of the context that the methods of its class, and of those it inherits from, name: `loss`, `control.stop`.

    Left out is what it asks for first, with `ctx.has("loss")`. What it hands the context on to is not followed, and a class without
    source says nothing.
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
    """Whether the callback may write files to the run's folder: it says so, or its source reads where that folder is."""
    return inner(callback).writes_to_run_folder or "run.folder" in reads_of(callback)


def _path(node: Any) -> str:
    """`control.stop` of `ctx.control.stop`; empty for what is not of the context."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id in _NAMES else ""


def _tree(kind: type) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # made where there is no source
        return ast.Module([], [])
