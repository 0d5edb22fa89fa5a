"""Creates importable modules, without files, for Composer's submodules such as `callbacks.early_stopper`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from callsheet.compat.not_offered import not_offered


def offer(package: str, submodules: Mapping[str, str]) -> None:
    """Make each `package.<submodule>` importable, as a module that has the names listed for it in `submodules`.

    `submodules` maps each submodule to names of the package, separated by blanks.
    """
    for path, names in submodules.items():
        found = names.split()

        def find(name: str, found: list[str] = found, path: str = f"{package}.{path}") -> Any:
            if name not in found:
                raise AttributeError(f"{path} has no {name!r}; it offers {', '.join(found)}")
            return getattr(sys.modules[package], name)

        _add(f"{package}.{path}", find, names=found, about=f"`{', '.join(found)}` of `{package}`.")


def offer_nothing(package: str, submodules: Mapping[str, str]) -> None:
    """Make each `package.<submodule>` importable. Any public name can be imported from these modules, and raises `NotSupported` when used.

    The values of `submodules` are the hints of these errors, which say what to do instead.
    """
    for path, instead in submodules.items():
        whole = f"{package}.{path}"

        def find(name: str, whole: str = whole, instead: str = instead) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"module {whole!r} has no attribute {name!r}")
            return not_offered(name, "Composer", instead, whole)

        _add(whole, find, names=[], about=f"Not supported, unlike in Composer: {instead}.")


def _add(path: str, find: Callable[[str], Any], *, names: list[str], about: str) -> None:
    module = ModuleType(path, about)
    vars(module).update(__all__=names, __getattr__=find)
    sys.modules[path] = module
    parent, _, last = path.rpartition(".")
    setattr(sys.modules[parent], last, module)
