"""Finds the import paths of classes and functions, including those of the script that was started."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from callsheet.core.spec import import_path
from callsheet.errors import ConfigError, did_you_mean

MAIN_MODULE = "__main__"
# multiprocessing imports a child's main script as `__mp_main__`, so that code under a `__main__` guard does not run.
_IMPORTED_MAIN = "__mp_main__"
# At the beginning of a line, spaces and `|` may come before the name: Python indents the exceptions of a group with them.
_IMPORTED_MAIN_PATTERN = re.compile(rf"^([ |]*){_IMPORTED_MAIN}\.", re.MULTILINE)


def main_script() -> str:
    """Return the path of the script that this process runs; empty in a notebook, at a prompt, and with `python -m` or `-c`."""
    main = sys.modules[MAIN_MODULE]
    spec = getattr(main, "__spec__", None)
    file = getattr(main, "__file__", None)
    if (
        not isinstance(file, str)
        or (spec is not None and spec.name != MAIN_MODULE)
        or not Path(file).is_file()
        or not file.endswith(".py")
    ):
        return ""
    return os.path.abspath(file)


def path_of(thing: object) -> str:
    """Return the import path of the class or function `thing`, or an empty string if `thing` cannot be imported by its path.

    A path `__main__.Name` means that `Name` is defined in the script that was started.
    """
    if not isinstance(thing, type | FunctionType | BuiltinFunctionType):
        return ""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not isinstance(module, str) or not name or "<" in name:
        return ""
    holder: Any = sys.modules.get(module)
    if module in (MAIN_MODULE, _IMPORTED_MAIN):
        spec = getattr(holder, "__spec__", None)
        if spec is not None and spec.name != MAIN_MODULE:
            module = spec.name  # the program was started as `python -m package.module`
        elif main_script():
            module = MAIN_MODULE
        else:
            return ""
    for part in name.split("."):
        holder = getattr(holder, part, None)
    return f"{module}.{name}" if holder is thing else ""


def name_of(kind: Any) -> str:
    """Return the qualified name of a class or function.

    The name is the same in a process that runs the script and in a process that imports the script.
    """
    module = getattr(kind, "__module__", None) or ""
    if module in (MAIN_MODULE, _IMPORTED_MAIN):
        spec = getattr(sys.modules.get(module), "__spec__", None)
        module = spec.name if spec is not None else MAIN_MODULE
    # Cut off the name of the enclosing function, because cloudpickle does not keep this name.
    name = getattr(kind, "__qualname__", type(kind).__qualname__).rpartition("<locals>.")[2]
    return name if module == "builtins" else f"{module}.{name}"


def with_script_names(text: str) -> str:
    """Return the text of an exception, in which classes of the imported script (`__mp_main__`) are named as in the running script.

    Python writes a class of the script without a module where it begins a line, as in `Odd: message`.
    """
    return _IMPORTED_MAIN_PATTERN.sub(r"\1", text).replace(f"{_IMPORTED_MAIN}.", f"{MAIN_MODULE}.")


def find(path: str, script: str) -> Any:
    """Return the class or function at the import path `path`. In the path, `__main__` means the file `script`.

    Raises:
        ConfigError: there is no such class or function.
    """
    module, _, name = path.partition(".")
    if module != MAIN_MODULE:
        return import_path(path)
    found: Any = main_module(script)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{script} has no {part!r}{did_you_mean(part, dir(found))} when it is imported: define it at the top level, outside "
                "`if __name__ == '__main__'`"
            )
        found = getattr(found, part)
    return found


def main_module(script: str) -> ModuleType:
    """Return the module of the file `script`: `__main__` if this process runs the script, otherwise an imported module.

    The import does not run the part of the script under `if __name__ == "__main__"`.
    """
    if not script:
        raise ConfigError("the payload refers to a script, but does not name it")
    for name in (MAIN_MODULE, _IMPORTED_MAIN):
        module = sys.modules.get(name)
        if module is not None and os.path.abspath(getattr(module, "__file__", None) or "") == script:
            return module
    spec = importlib.util.spec_from_file_location(_IMPORTED_MAIN, script)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{script} cannot be imported: it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_IMPORTED_MAIN] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_IMPORTED_MAIN]
        raise
    module.__spec__ = None  # a running script has no spec either; multiprocessing then imports it by its path, not by its name
    return module


def become(script: str) -> None:
    """Import the script as this process's module `__main__`, because the payload refers to the script as `__main__`."""
    sys.modules[MAIN_MODULE] = main_module(script)
