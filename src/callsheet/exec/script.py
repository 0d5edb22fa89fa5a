"""Runs a script or a module in this interpreter as if Python had been started with it."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import zipfile
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from callsheet.errors import ConfigError

_OURS = (str(Path(__file__).resolve().parents[1]), runpy.__file__, "<frozen runpy>")
"""Where the frames between Python's start and the script come from."""


@dataclass(frozen=True)
class Script:
    """A script, given by its path, or a module, given by its name, with its arguments.

    Args:
        target: the path or the name.
        arguments: the script's own arguments.
        is_module: whether `target` is a module, as after `python -m`.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool

    def __post_init__(self) -> None:
        if not self.is_module and not Path(self.target).exists():
            raise ConfigError(f"there is no script {self.target}; give a path, or -m and the name of a module")

    @property
    def name(self) -> str:
        """The script's name without folder and ending; for `package.train` it is `train`."""
        last = self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem
        return last if last not in ("", "__main__") else Path(self.target).resolve().parent.name

    def run(self) -> None:
        """Run it with its own `sys.argv`, `sys.path[0]` and `__main__`. What it raises is raised here."""
        sys.argv = [self.target, *self.arguments]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd() if self.is_module else str(Path(self.target).resolve().parent)
        if self.is_module:
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
        elif Path(self.target).is_file() and not zipfile.is_zipfile(self.target):
            self._run_file(os.path.abspath(self.target))
        else:
            runpy.run_path(self.target, run_name="__main__")

    def _run_file(self, path: str) -> None:
        """Run a source file. Unlike `runpy`, Python keeps `sys.argv[0]` as given, and keeps the module for what runs at its exit."""
        module = ModuleType("__main__")
        module.__dict__.update(__file__=path, __spec__=None, __loader__=SourceFileLoader("__main__", path), __builtins__=builtins)
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)


def hide_our_frames(error: BaseException) -> None:
    """Let the traceback of `error` begin in the script, also when Python prints it at its end."""
    error.__traceback__ = _from_script(error.__traceback__)
    shown = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
        trace = _from_script(trace)
        return shown(kind, value.with_traceback(trace), trace)

    sys.excepthook = show


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    begin = trace
    while begin is not None and begin.tb_frame.f_code.co_filename.startswith(_OURS):
        begin = begin.tb_next
    # Without a frame of the script, as after a syntax error in it, Python shows the place in the error itself.
    return begin
