"""Explains why a value cannot be sent to another process as data, and what the user can do about it."""

from __future__ import annotations

import io
import socket
import threading
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

import torch

from callsheet.transport.names import MAIN_MODULE

_HINT = "give plain data or something that has an import path, or set allow_pickle=True to send it as signed cloudpickle"
_LOCK_TYPES = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.Barrier,
)


def explain_rejection(value: Any) -> tuple[str, str, bool]:
    """Return, for a value that cannot be sent as data, a description, a hint, and whether cloudpickle could encode the value."""
    what = f"a {type(value).__module__}.{type(value).__qualname__}".replace("a builtins.", "a ")
    if isinstance(value, io.IOBase) and not isinstance(value, io.StringIO | io.BytesIO):
        return "an open file, which stays in this process", "give its path, and open it in on_run_start", False
    if isinstance(value, _LOCK_TYPES):
        return "a lock, which stays in this process", "make one in the constructor, so that each process has its own", False
    if isinstance(value, threading.Thread | socket.socket | GeneratorType | ModuleType):
        return f"{what}, which stays in this process", "make it in the constructor or in on_run_start", False
    if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
        return f"a tensor on {value.device}", "give it on the CPU, and move it to the rank's device in on_train_start", False
    name = getattr(value, "__qualname__", "")
    if isinstance(value, type | FunctionType):
        use_pickle = "or set allow_pickle=True to send its code as signed cloudpickle"
        if name.endswith("<lambda>"):
            return "a lambda, which has no import path", f"give a function that is defined in a module, {use_pickle}", True
        if "<locals>" in name:
            return (
                f"{name} is made inside a function, where it has no import path",
                f"define it at the top level of a module, {use_pickle}",
                True,
            )
        if value.__module__ == MAIN_MODULE:
            return (
                f"{name} is defined in a notebook or at a prompt, where a worker cannot import it",
                f"put it into a module, {use_pickle}",
                True,
            )
        return (
            f"{value.__module__}.{name} is not the object with that import path",
            f"give the object that is, {use_pickle}",
            True,
        )
    return what, _HINT, True
