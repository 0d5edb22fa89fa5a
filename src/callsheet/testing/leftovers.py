"""Finds what a run leaves behind in its process and on its model."""

from __future__ import annotations

import builtins
import contextlib
import gc
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.modules import module as modules

PATIENCE_SECONDS = 5.0
"""How many seconds a thread or a process may take to end after a run."""
_HOOKS_PATTERN = re.compile(r"_(forward|backward|full_backward|state_dict|load_state_dict|post_accumulate_grad)_?\w*hooks?$")


@dataclass(frozen=True)
class Surroundings:
    """A snapshot of the things in a process that a run can leave behind.

    `settings` are settings that a process has only once, such as `sys.stdout`. `variables` are the environment variables.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    threads: tuple[threading.Thread, ...] = ()
    processes: tuple[psutil.Process, ...] = ()
    files: Counter[str] = field(default_factory=Counter)
    variables: dict[str, str] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Surroundings:
        """Return the settings, threads, processes, open files and variables that this process has now."""
        gc.collect()  # free unreachable objects, because they do not count as left behind
        return cls(_settings(), tuple(threading.enumerate()), _processes(), _files(), dict(os.environ))


def settings_left(before: Surroundings) -> list[str]:
    """Return, as texts, the settings of the process that have changed since the snapshot `before`."""
    now = _settings()
    return [f"{name} is {_short(now[name])}, but was {_short(was)}" for name, was in before.settings.items() if now[name] != was]


def more_left(before: Surroundings) -> list[str]:
    """Return the threads, processes, open files and environment variables that did not exist in the snapshot `before`.

    Wait up to `PATIENCE_SECONDS` seconds, so that threads and processes can end.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while found := _more(before):
        if time.monotonic() > deadline:
            return found
        time.sleep(0.02)
    return []


def model_things(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return what is attached to a model and its optimizer besides the weights: hooks, replaced methods, modes, frozen parameters."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        own = vars(module)
        found[f"the hooks of {where}"] = _hooks(own)
        found[f"the attributes of {where}"] = sorted(own.keys() - {"training"})
        found[f"the submodules of {where}"] = {child: type(kept).__name__ for child, kept in module.named_children()}
        found[f"the mode of {where}"] = "training" if module.training else "evaluation"
    for name, parameter in model.named_parameters():
        found[f"the hooks of parameter {name!r}"] = len(parameter._backward_hooks or ()) + len(
            getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
        )
        found[f"the mode of parameter {name!r}"] = "trained" if parameter.requires_grad else "frozen"
    if optimizer is not None:
        found["the hooks of the optimizer"] = {
            name: len(kept) for name, kept in vars(optimizer).items() if name.endswith("_hooks") and kept
        }
        found["the attributes of the optimizer"] = sorted(vars(optimizer))
    return found


def _more(before: Surroundings) -> list[str]:
    now = Surroundings.now()
    found = [f"the thread {thread.name!r}" for thread in now.threads if thread not in before.threads and thread.is_alive()]
    found += [f"the process {_command(process)}" for process in now.processes if process not in before.processes]
    found += [f"open: {name}" for name in (now.files - before.files)]
    found += [
        f"the variable {name} of the environment" for name, value in now.variables.items() if before.variables.get(name) != value
    ]
    return found + [f"no variable {name} of the environment" for name in before.variables.keys() - now.variables.keys()]


def _settings() -> dict[str, Any]:
    root, ours = logging.getLogger(), logging.getLogger("callsheet")
    found: dict[str, Any] = {
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
        "sys.excepthook": sys.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "threading.excepthook": threading.excepthook,
        "print": builtins.print,
        "the trace function": sys.gettrace(),
        "the profile function": sys.getprofile(),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "the working directory": os.getcwd(),
        "the root logger": (root.level, tuple(root.handlers), root.disabled),
        "the logger 'callsheet'": (ours.level, tuple(ours.handlers), ours.disabled, ours.propagate, tuple(ours.filters)),
        "logging.disable": root.manager.disable,
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's anomaly detection": torch.is_anomaly_enabled(),
        "torch's default type": torch.get_default_dtype(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's profiler": torch._C._autograd._profiler_enabled(),
    }
    found |= {f"torch's {name}": len(kept) for name, kept in vars(modules).items() if name.endswith("_hooks")}
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            found[f"the handler of signal {number}"] = signal.getsignal(number)
    return found


def _processes() -> tuple[psutil.Process, ...]:
    return tuple(process for process in psutil.Process().children(recursive=True) if process.is_running())


def _files() -> Counter[str]:
    """Return the number of file descriptors that this process has open on each path.

    Pipes and sockets are listed by type, because their numbers differ. The result is empty on systems that do not list
    descriptors.
    """
    found: Counter[str] = Counter()
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the list also contains the descriptor that `listdir` used, which is closed by now
            found[re.sub(r":\[\d+\]$", "", os.readlink(f"/proc/self/fd/{descriptor}"))] += 1
    return found


def _hooks(own: dict[str, Any]) -> dict[str, int]:
    return {name: len(kept) for name, kept in own.items() if _HOOKS_PATTERN.match(name) and kept}


def _command(process: psutil.Process) -> str:
    return _value_or("that has ended", lambda: f"{process.pid}, {' '.join(process.cmdline())[:80] or process.name()}")


def _value_or(otherwise: str, ask: Callable[[], str]) -> str:
    try:
        return ask()
    except psutil.Error:
        return otherwise


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
