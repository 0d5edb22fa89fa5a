"""Analyses the types of a recipe's keys: which keys take the import paths of classes, and which keys have keys inside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_PLAIN_TYPES = (str, int, float, bool, bytes, complex, type(None), list, tuple, dict, set, frozenset, PurePath, Enum)


def typed_keys(parser: ArgumentParser) -> dict[str, Any]:
    """Return the type of every key that takes a value, in the parser's order."""
    found = {}
    for action in parser._actions:
        if action.option_strings and action.dest not in ("help", "print_config", "config") and not action.dest.endswith(".help"):
            found[action.dest] = getattr(action, "_typehint", action.type)
    return {key: kind for key, kind in found.items() if kind is not None}


def names_code(kind: Any) -> bool:
    """Return whether values of this type are, or contain, import paths of classes or functions."""
    if kind is Any or get_origin(kind) is Literal:
        return False
    if get_origin(kind) in (Callable, type) or kind in (Callable, type):
        return True
    if inspect.isclass(kind) and is_dataclass(kind):
        return any(map(names_code, get_type_hints(kind).values()))
    if inspect.isclass(kind) and get_origin(kind) is None:
        return not issubclass(kind, _PLAIN_TYPES)
    return any(names_code(part) for part in get_args(kind) if part is not Ellipsis and not isinstance(part, list))


def parts_of(kind: Any) -> type | None:
    """Return `kind` if it is a dataclass. For a mapping, list or union type, return the first dataclass in the type, or None."""
    if inspect.isclass(kind) and is_dataclass(kind):
        return kind
    return next(filter(None, map(parts_of, get_args(kind))), None)
