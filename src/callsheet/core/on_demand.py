"""Package attributes that are imported at their first use, and hints for names that a package does not have."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from types import FrameType
from typing import Any

from callsheet.core.optional import needed_by
from callsheet.errors import did_you_mean

_PACKAGES = ("callsheet", "callsheet.callbacks", "callsheet.loggers")
"""The packages that are searched for a name that was imported from the wrong package."""


def attributes(package: str, modules: Mapping[str, str], subpackages: Collection[str] = ()) -> Callable[[str], Any]:
    """Return a `__getattr__` function for a package. It imports each attribute at first use, from the module given in `modules`.

    If an optional package is missing, the error names the command that installs it. An unknown attribute raises AttributeError,
    or ImportError in `from package import name`; the message says which name callsheet uses instead, or which package has it.

    Args:
        package: the package's name.
        modules: the module of each attribute.
        subpackages: the modules of the package that can be read as its attributes without importing them first.
    """

    def get(name: str) -> Any:
        if name in modules:
            with needed_by(f"{package}.{name}"):
                found = getattr(importlib.import_module(modules[name]), name)
            # Store the attribute in the package, so that `__getattr__` is called only once for each attribute.
            setattr(sys.modules[package], name, found)
            return found
        if name in subpackages:
            # The import of a submodule also stores the submodule as an attribute of the package.
            return importlib.import_module(f"{package}.{name}")
        hint = _hint(package, name)
        if hint and _is_import_from(sys._getframe(1)):
            # `from package import name` turns an AttributeError into an ImportError without the hint. So raise the ImportError here.
            raise ImportError(f"cannot import name {name!r} from {package!r}; {hint}", name=package)
        # With the argument `name`, Python prints only this message, and adds no suggestion of its own.
        raise AttributeError(f"module {package!r} has no attribute {name!r}{f'; {hint}' if hint else ''}", name=name)

    return get


def _hint(package: str, name: str) -> str:
    if name.startswith("_"):
        return ""
    from callsheet.core.familiar_names import CALLBACKS

    here = CALLBACKS.get(name, name)
    names = {each: importlib.import_module(each).__all__ for each in _PACKAGES}
    found = next((each for each in names if here in names[each] and (each != package or here != name)), "")
    if found:
        called = f"it is called {here} here" if here != name else f"it is in {found}"
        return f"{called}: from {found} import {here}"
    return did_you_mean(name, names.get(package, ()), cutoff=0.75).removeprefix("; ")


def _is_import_from(frame: FrameType) -> bool:
    import dis

    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]
