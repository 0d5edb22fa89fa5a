"""Finds in the source of the bridges, without importing it, what they use of other packages and is not public API."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import callsheet

SOURCE = Path(callsheet.__file__).parent

_PRIVATE = re.compile(r"_[a-zA-Z]\w*(?<!_)|src")
"""A name, or a component of a dotted one, that is not public. Keras has all that is not public in `keras.src`."""

_DOTTED = re.compile(r"\w+(\.\w+)*")

OURS = frozenset(
    {
        *("self", "cls", "super()", "me", "me()", "host", "hosted", "run", "watch", "self.watch"),
        *("self._guest", "self._unit", "self._model", "self.args", "self.trainer", "facade.step_scheduler"),
    }
)
"""The expressions that are objects of callsheet's own classes, on which the bridges and `callsheet exec` use private names."""

STANDARD_LIBRARY = frozenset({"_replace", "_getframe", "_option_string_actions"})
"""Private names of the standard library that are used."""

_PARTS_OF_NAMES = frozenset({"startswith", "endswith", "removeprefix", "removesuffix"})
"""Methods whose arguments are parts of names, and no names."""


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def own_names(tree: ast.Module) -> frozenset[str]:
    """Return the names that a file defines: functions, classes, variables, arguments, slots, and attributes of `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=slots)):
                found.update(slot.value for slot in slots if isinstance(slot, ast.Constant) and isinstance(slot.value, str))
    return frozenset(found)


def private_uses(tree: ast.Module, own: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private name of another package: an attribute, an import, or a string that is a name.

    A string may be the argument of `getattr`, the name of a method to wrap, or a key.

    Args:
        tree: the file.
        own: the names that callsheet's files define on which this file may build.
    """
    no_names = {id(part) for node in ast.walk(tree) for part in _no_names(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name):
                if not (name in own and ast.unparse(owner) in OURS):
                    yield from _private(node, [name])
            case ast.Constant(value=str(text)) if id(node) not in no_names and _DOTTED.fullmatch(text):
                if text not in own and not text.startswith("callsheet."):
                    yield from _private(node, text.split("."))
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("callsheet"):
                yield from _private(node, [*module.split("."), *(each.name for each in names)])
            case ast.Import(names=names):
                yield from _private(node, [part for each in names for part in each.name.split(".")])


def _private(node: ast.expr | ast.stmt, names: Iterable[str]) -> Iterator[tuple[int, str]]:
    yield from ((node.lineno, name) for name in names if _PRIVATE.fullmatch(name) and name not in STANDARD_LIBRARY)


def _no_names(node: ast.AST) -> list[ast.expr]:
    """Return the strings within the node that are no whole names, such as the parts of an f-string."""
    match node:
        case ast.JoinedStr(values=parts):
            return parts
        case ast.Call(func=ast.Attribute(attr=method), args=parts) if method in _PARTS_OF_NAMES:
            return parts
    return []


@cache
def words(tree: ast.Module) -> frozenset[str]:
    """Return all names and all strings in a file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(attr=word)
                | ast.Name(id=word)
                | ast.FunctionDef(name=word)
                | ast.Constant(value=str(word))
                | ast.alias(name=word)
            ):
                found.update(word.split("."))
    return frozenset(found)


def components(names: Iterable[str]) -> set[str]:
    """Return the components of dotted names."""
    return {part for name in names for part in name.split(".")}


def lists_of(module: object) -> Mapping[str, tuple[str, ...]]:
    """Return the lists of a module `internals`: the names in `HOST` and `GUEST`, and the keys of `WITHOUT` and `EXEC`."""
    return {each: tuple(getattr(module, each, ())) for each in ("HOST", "GUEST", "WITHOUT", "EXEC")}
