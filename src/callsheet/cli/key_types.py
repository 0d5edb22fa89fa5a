"""Describes the types of a recipe's keys in words, and determines whether their values are import paths of code."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from torch.optim import Optimizer

from callsheet.core.callback import Callback

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


def class_of(kind: Any) -> tuple[type | None, int]:
    """For a type whose values name classes, return their base class, and how many arguments the recipe's code passes to them.

    If the type is a `Callable`, the base class is its return type, and the recipe's code passes the arguments of the `Callable`, such
    as the model's parameters for an optimizer. Return `(None, 0)` for other types.
    """
    if get_origin(kind) is Callable:
        arguments, made = get_args(kind)
        return (made if inspect.isclass(made) else None), len(arguments)
    if inspect.isclass(kind) and get_origin(kind) is None:
        return (kind if names_code(kind) else None), 0
    return next((found for found in map(class_of, get_args(kind)) if found[0]), (None, 0))


def parts_of(kind: Any) -> type | None:
    """Return `kind` if it is a dataclass. For a mapping, list or union type, return the first dataclass in the type, or None."""
    if inspect.isclass(kind) and is_dataclass(kind):
        return kind
    return next(filter(None, map(parts_of, get_args(kind))), None)


def item_of(kind: Any, container: type) -> Any:
    """Return the item type of `kind`, such as int for `list[int]` or `list[int] | None`. Return None for other types."""
    if get_origin(kind) is container:
        return get_args(kind)[-1]
    is_union = get_origin(kind) in (Union, types.UnionType)
    return next(filter(None, (item_of(part, container) for part in get_args(kind) if is_union)), None)


def in_words(kind: Any) -> str:
    """Return a description of the type in words, such as `int or null`."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is None or kind is type(None):
        return "null"
    if origin in (Union, types.UnionType):
        words = [in_words(part) for part in parts]
        return " or ".join([*(word for word in words if word != "null"), *(word for word in words if word == "null")])
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin is Callable:
        return f"class of {in_words(parts[1])}"
    if origin is dict:
        return f"mapping from {in_words(parts[0])} to {in_words(parts[1])}"
    if origin is not None and parts:
        name = getattr(origin, "__name__", str(origin))
        return f"{name} of {' and '.join(in_words(part) for part in parts if part is not Ellipsis)}"
    return str(getattr(kind, "__name__", kind)).removeprefix("typing.")


def words_of(kind: Any) -> list[str]:
    """Return the allowed words of a type that has a fixed set of them, such as a `Literal`."""
    if get_origin(kind) is Literal:
        return [part for part in get_args(kind) if isinstance(part, str)]
    return [word for part in get_args(kind) for word in words_of(part)] if get_origin(kind) in (Union, types.UnionType) else []


def example_of(base: type | None) -> str:
    """Return, as an example, the import path of a subclass of `base`."""
    known = {Callback: "callsheet.callbacks.SpeedMonitor", Optimizer: "torch.optim.AdamW"}
    return next((path for kind, path in known.items() if base is not None and issubclass(base, kind)), "package.module.Class")
