"""Runs a script or a module in this interpreter as if Python had been started with it."""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
import zipfile
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from callsheet.errors import ConfigError


@dataclass(frozen=True)
class Script:
    """What to run: the path of a script or the name of a module, and its command-line arguments.

    Args:
        target: the path or the name.
        arguments: the script's own arguments.
        is_module: whether `target` is a module, as after `python -m`.

    Raises:
        ConfigError: there is no such script, or the folder has no `__main__.py`.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool

    def __post_init__(self) -> None:
        if self.is_module:
            return
        if not (path := Path(self.target)).exists():
            raise ConfigError(f"there is no script {self.target}; give a path, or -m and the name of a module")
        if path.is_dir() and not (path / "__main__.py").exists():
            raise ConfigError(f"the folder {self.target} has no __main__.py; give the path of a script")

    @property
    def name(self) -> str:
        """The script's name without folder and extension, or the last part of the module's name: `train` for `package.train`."""
        last = self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem
        return last if last not in ("", "__main__") else Path(self.target).resolve().parent.name

    def run(self) -> None:
        """Run the script with its own `sys.argv`, `sys.path[0]` and `__main__`. Its errors are raised unchanged.

        Raises:
            SystemExit: there is no such module; the message names it.
        """
        sys.argv = [self.target, *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd() if self.is_module else str(Path(self.target).resolve().parent)
        path = os.path.abspath(self.target)
        if self.is_module:
            spec = _spec_of(self.target)
            code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]  # `_spec_of` has checked it
            sys.argv[0] = spec.origin or self.target
            _run(
                code, __spec__=spec, __package__=spec.parent, __file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader
            )
        elif Path(path).is_dir() or zipfile.is_zipfile(path):
            runpy.run_path(self.target, run_name="__main__")
        else:
            code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
            _run(
                code,
                __spec__=None,
                __package__=None,
                __file__=path,
                __cached__=None,
                __loader__=SourceFileLoader("__main__", path),
            )


def _spec_of(name: str) -> ModuleSpec:
    """Return the import spec of the module `name`. If the module is a package, return the spec of its `__main__`."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        raise SystemExit(f"callsheet exec: -m {name}: {error}") from None
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise SystemExit(f"callsheet exec: -m {name}: there is no such module, or it cannot be run")
    return spec


def _run(code: CodeType, **attributes: Any) -> None:
    """Run the code as the module `__main__`. The module stays in `sys.modules` for code that runs when Python exits."""
    module = ModuleType("__main__")
    module.__dict__.update(attributes, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # in a spawned process, objects of `__main__` are pickled with this module name
        sys.modules["__mp_main__"] = module
    exec(code, module.__dict__)


def is_from_script(error: BaseException) -> bool:
    """Return whether the script has raised the error, and not callsheet or Python before the script's first line was executed."""
    begin = _from_script(error.__traceback__)
    return begin is not None and begin.tb_frame.f_globals.get("__name__") == "__main__"


def hide_our_frames(error: BaseException) -> None:
    """Make Python print the uncaught `error` with a traceback that begins in the script, without callsheet's frames."""
    begin = _from_script(error.__traceback__)
    shown = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
        if value is error:  # print this error without callsheet's frames; leave other errors unchanged
            trace = begin
        return shown(kind, value.with_traceback(trace), trace)

    sys.excepthook = show


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of the traceback that begins in the script, after the frames of callsheet and `runpy`.

    After a syntax error in the script there is no such part, but the error itself contains the file and the line.
    """
    begin, each = trace, trace
    while each is not None:
        if each.tb_frame.f_code is _run.__code__ or each.tb_frame.f_code is Script.run.__code__:
            begin = each.tb_next
        each = each.tb_next
    while begin is not None and begin.tb_frame.f_code.co_filename in (runpy.__file__, "<frozen runpy>"):
        begin = begin.tb_next
    return begin
