"""Calls functions when modules are imported for the first time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportWatch(MetaPathFinder):
    """Calls a function for each watched module: right after the module is imported, or at once if it was imported before.

    Args:
        actions: the function for each module, by the module's full name.
    """

    def __init__(self, actions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions
        self._asked: set[str] = set()  # the modules whose spec this finder is now requesting from the other finders

    def install(self) -> None:
        """Watch the imports of the modules in `actions`. For a module that is imported already, call the function now."""
        for name, action in self._actions.items():
            if name in sys.modules:
                action(sys.modules[name])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop watching imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a watched module, and let its loader also call the function in `actions`. For others, return None."""
        if name not in self._actions or name in self._asked:  # avoid a recursion: another finder may ask this one again
            return None
        self._asked.add(name)
        try:
            for finder in sys.meta_path:
                if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                    if spec.loader is not None:
                        spec.loader = _CallingLoader(spec.loader, self._actions[name])
                    return spec
        finally:
            self._asked.discard(name)
        return None


class _CallingLoader(Loader):
    """Wraps a module's own loader, and calls a function with the module after it is loaded."""

    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)
