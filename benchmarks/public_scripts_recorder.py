"""What `public_scripts.py` adds to every Python process of a public script, in the same way in both variants.

`public_scripts.py` puts a copy of this file, called `sitecustomize.py`, on `PYTHONPATH`, so Python imports it at its start. It
does not use callsheet. It sets the seeds when torch is imported, accepts stand-in data for torchvision's CIFAR10, adds a name that
accelerate has removed, and records what the script does with torch: each loss whose `backward` is called, the optimizers that got
gradients from it, `zero_grad`, the optimizers' steps, and at the end of the process hashes of the optimizers' parameters and of
torch's random state.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

SEED = 20
FOLDER = os.environ.get("PUBLIC_SCRIPTS_RECORDS", "")
"""The folder for the records, a file for each process that trains."""


class Recorder:
    """Records the losses, gradients and steps of this process. Optimizers are numbered in the order of their creation."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._optimizers: list[Any] = []
        self._stepped: set[int] = set()  # the numbers of the optimizers that have stepped
        self._events: list[tuple[str, Any, Any]] = []
        self._times: list[float] = []
        self._is_in_backward = False
        self._process = os.getpid()

    def install(self) -> None:
        """Wrap the functions of torch, and write the record when the process ends."""
        torch = self._torch
        self._wrap(torch.Tensor, "backward", self._backward)
        self._wrap(torch.optim.Optimizer, "__init__", self._create)
        self._wrap(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self._wrap(torch.nn.Module, "zero_grad", self._zero_grad)
        hooks = importlib.import_module("torch.optim.optimizer")
        hooks.register_optimizer_step_pre_hook(self._step_begins)
        hooks.register_optimizer_step_post_hook(self._step_ends)
        atexit.register(self.write)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        given = getattr(owner, name)

        @wraps(given)
        def wrapper(*args: Any, **options: Any) -> Any:
            return around(given, *args, **options)

        setattr(owner, name, wrapper)

    def _create(self, given: Callable[..., Any], optimizer: Any, *args: Any, **options: Any) -> None:
        given(optimizer, *args, **options)
        self._number(optimizer)

    def _backward(self, given: Callable[..., Any], loss: Any, *args: Any, **options: Any) -> Any:
        if self._is_in_backward or loss.numel() != 1 or os.getpid() != self._process:
            return given(loss, *args, **options)
        self._is_in_backward = True
        before = [_gradients(optimizer) for optimizer in self._optimizers]
        try:
            result = given(loss, *args, **options)
        finally:
            self._is_in_backward = False
        changed = [number for number, each in enumerate(before) if _gradients(self._optimizers[number]) != each]
        self._events.append(("backward", loss.detach().float().item(), changed))
        return result

    def _zero_grad(self, given: Callable[..., Any], owner: Any, *args: Any, **options: Any) -> Any:
        first = owner.param_groups[0]["params"][0] if hasattr(owner, "param_groups") else _first_parameter(owner)
        self._events.append(("zero_grad", None, [n for n, each in enumerate(self._optimizers) if _has(each, first)]))
        return given(owner, *args, **options)

    def _step_begins(self, optimizer: Any, args: Any, options: Any) -> None:
        self._events.append(("step_begins", None, self._number(optimizer)))

    def _step_ends(self, optimizer: Any, args: Any, options: Any) -> None:
        number = self._number(optimizer)
        self._stepped.add(number)
        self._events.append(("step_ends", None, number))
        self._times.append(time.perf_counter())

    def _number(self, optimizer: Any) -> int:
        for number, each in enumerate(self._optimizers):
            if each is optimizer:
                return number
        self._optimizers.append(optimizer)
        return len(self._optimizers) - 1

    def write(self) -> None:
        """Write the record of this process, unless no optimizer has stepped in it."""
        if not self._stepped or os.getpid() != self._process or not FOLDER:
            return
        random_state = self._torch.get_rng_state().numpy().tobytes()
        record = {
            "rank": int(os.environ.get("RANK") or 0),
            "events": self._events,
            "optimizers": [type(each).__name__ for each in self._optimizers],
            "weights": {number: _hash_of(self._optimizers[number]) for number in sorted(self._stepped)},
            "random_state": hashlib.sha256(random_state).hexdigest(),
            "seconds_of_steps": self._times[-1] - self._times[0] if self._times else 0.0,
        }
        Path(FOLDER).mkdir(parents=True, exist_ok=True)
        Path(FOLDER, f"{os.getpid()}.json").write_text(json.dumps(record))


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradients(optimizer: Any) -> list[tuple[int, int] | None]:
    """Return, for each parameter, the id and the version of its gradient: one of them changes when a gradient is written."""
    return [
        None if (gradient := parameter.grad) is None else (id(gradient), gradient._version)
        for parameter in _parameters(optimizer)
    ]


def _has(optimizer: Any, parameter: Any) -> bool:
    return any(each is parameter for each in _parameters(optimizer))


def _first_parameter(module: Any) -> Any:
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                return parameter
    return None


def _hash_of(optimizer: Any) -> str:
    """Return a hash of the bytes of all parameters; of a sharded parameter, those of this rank's shard."""
    torch = sys.modules["torch"]
    found = hashlib.sha256()
    for parameter in _parameters(optimizer):
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        found.update(local.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# --- actions when a module is imported ---


def _after_torch(torch: ModuleType) -> None:
    import numpy as np

    np.random.seed(SEED)
    torch.manual_seed(SEED)
    Recorder(torch).install()


def _before_torchvision(module: ModuleType) -> None:
    """Declare the operators of torchvision that its import needs, if its compiled operators do not go with this torch."""
    import torch

    try:
        ctypes.CDLL(str(Path(str(module.__file__)).parent / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        module.__dict__["_declared_operators"] = library


def _after_torchvision_utils(utils: ModuleType) -> None:
    """Accept stand-in data: a file is valid if it exists."""
    utils.__dict__["check_integrity"] = lambda fpath, md5=None: os.path.isfile(fpath)


def _after_accelerate(dataclasses: ModuleType) -> None:
    """Add the name that accelerate removed in version 1.0. `run_clm_no_trainer.py` of transformers compares with it."""
    dataclasses.__dict__["DistributedType"].TPU = "TPU"


Action = Callable[[ModuleType], None]

BEFORE: dict[str, Action] = {"torchvision": _before_torchvision}
AFTER: dict[str, Action] = {
    "torch": _after_torch,
    "accelerate.utils.dataclasses": _after_accelerate,
    "torchvision.datasets.utils": _after_torchvision_utils,
}


class ImportActions(MetaPathFinder):
    """Calls the functions of `BEFORE` and `AFTER` when their modules are executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in BEFORE and name not in AFTER:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ActingLoader(spec.loader)
                return spec
        return None


class _ActingLoader(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        if module.__name__ in BEFORE:
            BEFORE[module.__name__](module)
        self._loader.exec_module(module)
        if module.__name__ in AFTER:
            AFTER[module.__name__](module)


if FOLDER:
    random.seed(SEED)
    sys.meta_path.insert(0, ImportActions())
