"""Hides names of a framework from callsheet's code, as if the installed version did not have them.

The framework itself still finds them, so it can train.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from inspect import getattr_static
from types import ModuleType
from typing import Any

_ABSENT: Any = object()


class _Hidden:
    """A class attribute that raises AttributeError if callsheet reads it, and otherwise does what the hidden attribute does."""

    def __init__(self, name: str, given: Any) -> None:
        self._name, self._given = name, given

    def __get__(self, thing: Any, kind: type) -> Any:
        if _is_read_by_callsheet():
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")
        if thing is not None and self._name in getattr(thing, "__dict__", ()):
            return vars(thing)[self._name]
        if self._given is _ABSENT:
            raise AttributeError(self._name)
        return self._given.__get__(thing, kind) if hasattr(self._given, "__get__") else self._given

    def __set__(self, thing: Any, value: Any) -> None:
        vars(thing)[self._name] = value


def _is_read_by_callsheet() -> bool:
    frame = sys._getframe(2)
    return str(frame.f_globals.get("__name__", "")).startswith("callsheet.")


def hide(name: str, where: Any = None) -> Callable[[], None]:
    """Hide the attribute of a module or a class with this dotted name, such as `torch.amp.GradScaler._scale`.

    Args:
        name: the dotted name.
        where: the module or class that has the attribute. None: the one that the name says.

    Returns:
        A function that undoes this.
    """
    owner, _, attribute = name.rpartition(".")
    found = _find(owner) if where is None else where
    if isinstance(found, ModuleType):
        kind = type(found)
        found.__class__ = type("Hiding", (kind,), {attribute: _Hidden(attribute, _ABSENT)})
        return partial(setattr, found, "__class__", kind)
    before = vars(found).get(attribute, _ABSENT)
    setattr(found, attribute, _Hidden(attribute, getattr_static(found, attribute, _ABSENT)))
    return partial(delattr, found, attribute) if before is _ABSENT else partial(setattr, found, attribute, before)


def _find(name: str) -> Any:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)
