"""Logs statistics of the outputs of the model's modules."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.errors import ConfigError
from callsheet.run.copies import add_hook

logger = logging.getLogger("callsheet")

_WHOLE_MODEL = "(model)"
_STATISTICS = ("mean", "std", "l2_norm", "kurtosis", "zeros")
# Collect outputs of the same shape until they have this many elements in total. Then compute their statistics in one go.
_BATCHED_ELEMENTS = 2**20
_lock = threading.Lock()  # DataParallel runs its replicas in several threads, so hooks may be called at the same time


class ActivationMonitor(Callback):
    """Log statistics of the outputs of modules, at an interval of steps.

    For every module that returns floating-point tensors, five statistics are logged as means over the step's microbatches and all
    ranks: `activations/mean/<module>`, `activations/std/<module>`, `activations/l2_norm/<module>` (the mean norm of the vectors
    along the last dimension), `activations/kurtosis/<module>` (3 for a normal distribution, 0 for a constant) and
    `activations/zeros/<module>` (the fraction that is exactly zero). `activations/max/<module>` is the largest magnitude in all
    microbatches and on all ranks. The model itself is logged as `(model)`. If a module returns several tensors, `.0`, `.1`, ...
    is appended to its name. With sharding or tensor parallelism, each rank measures only its own part. If the callback has a
    `name`, the name replaces `activations`.

    Hooks are registered only during the forward passes of the measured steps. Nothing waits for the device, but the measured
    steps compute more and keep copies of small outputs until the end of the forward pass: at most 2^20 numbers of each shape and
    type. Compiled code runs no hooks. For a compiled model only `(model)` is logged, and the callback warns about that once.

    Args:
        batch_log_interval: the number of steps from one measurement to the next.
        modules: patterns of module names, such as `"layers.*.mlp"`; None means all modules.
        ignore_types: names of module classes to leave out, such as `Dropout`.

    Raises:
        ConfigError: an argument is invalid, or, when training starts, a pattern matches no module.
    """

    required_fields = ("model",)

    def __init__(
        self, *, batch_log_interval: int = 200, modules: Iterable[str] | None = None, ignore_types: Iterable[str] = ()
    ) -> None:
        if batch_log_interval < 1:
            raise ConfigError(f"batch_log_interval={batch_log_interval}: give at least one batch")
        if isinstance(modules, str) or isinstance(ignore_types, str):
            raise ConfigError("modules and ignore_types are lists of names; put one name into a list")
        self._interval = batch_log_interval
        self._patterns = tuple(modules) if modules is not None else None
        self._ignore_types = frozenset(ignore_types)
        self._remove_hooks: list[Callable[[], None]] = []
        self._seen: dict[torch.device, _Seen] = {}
        # The last recorded tensor, its version counter, and its index in `_Seen`, to notice if a parent module returns it again.
        self._last: tuple[weakref.ref[Tensor], int, int] | None = None
        self._greatest: dict[tuple[str, ...], Tensor] = {}
        self._step = 0  # the last step whose activations were measured
        self._has_seen = self._has_warned = False

    def on_train_start(self, ctx: Context) -> None:
        """Raise ConfigError if a pattern of the argument `modules` matches no module of the model."""
        self._step = 0
        names = [name for name, _ in ctx.model.named_modules()]
        for pattern in self._patterns or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"no module's name matches {pattern!r}; this model has {', '.join(names[1:6])}, ...")

    def on_forward_start(self, ctx: Context) -> None:
        """Register forward hooks on the modules if outputs are measured in this step.

        The hooks stay registered for one forward pass, so that recomputation in the backward pass is not counted.
        """
        if ahead := -ctx.step % self._interval:
            ctx.mute(self, "on_forward_start", "on_forward_end", until=ctx.step + ahead)
            return
        for name, module in ctx.model.named_modules():
            if self._is_wanted(name, module):
                self._remove_hooks.append(add_hook(module.register_forward_hook, self._hook(name or _WHOLE_MODEL)))

    def on_forward_end(self, ctx: Context) -> None:
        """Remove the forward hooks, and log the statistics of the modules' outputs."""
        if self._remove_hooks:
            count = len(self._remove_hooks)
            self._unhook()
            if not self._has_seen and not self._has_warned and count > 1:
                self._has_warned = True
                logger.warning("%s: no module inside the model ran its hooks; compiled modules do not run them", label_of(self))
            self._log(ctx)

    def on_exception(self, ctx: Context) -> None:
        self._unhook()
        self._seen = {}

    def _unhook(self) -> None:
        for remove in self._remove_hooks:
            remove()
        self._remove_hooks, self._last = [], None

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        return type(module).__name__ not in self._ignore_types and (
            self._patterns is None or any(fnmatchcase(name, pattern) for pattern in self._patterns)
        )

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._has_seen = self._has_seen or name != _WHOLE_MODEL
            tensors = list(_tensors(outputs))
            for i, tensor in enumerate(tensors):
                self._add(name if len(tensors) == 1 else f"{name}.{i}", tensor)

        return look

    def _add(self, name: str, tensor: Tensor) -> None:
        """Record an output under a module's name. A module that is called several times in a forward pass has several outputs."""
        here = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if not here.numel():
            return
        version = -1 if tensor.is_inference() else tensor._version  # tensors created in inference mode have no version counter
        with _lock:
            seen = self._seen.setdefault(here.device, _Seen())
            if version < 0 or self._last is None or tensor is not self._last[0]() or version != self._last[1]:
                # Remember the tensor, so that it is not recorded twice if a parent module returns its child's output unchanged.
                self._last = weakref.ref(tensor), version, seen.add(here)
            seen.places.setdefault(name, []).append(self._last[2])

    @torch.no_grad()
    def _log(self, ctx: Context) -> None:
        """Compute and log the statistics of all modules' outputs. The outputs on one device are processed together."""
        if self._step != ctx.step:
            self._step, self._greatest = ctx.step, {}  # `_greatest`: maxima over the step's microbatches so far
        family, seen, self._seen = self.name or "activations", self._seen, {}
        for each in seen.values():
            names, times = list(each.places), [len(several) for several in each.places.values()]
            mean, variance, fourth, l2_norm, filled, least, most = each.sums().T
            kurtosis = torch.where(variance == 0, 0.0, fourth / variance.square())
            found, greatest = torch.stack([mean, variance.sqrt(), l2_norm, kurtosis, 1 - filled]), torch.maximum(-least, most)
            if max(times) > 1:
                found = torch.stack([part.mean(1) for part in found.split(times, 1)], 1)
                greatest = torch.stack([part.amax() for part in greatest.split(times)])
            ctx.log({tuple([f"{family}/{kind}/{name}" for kind in _STATISTICS for name in names]): found.flatten()}, over="mean")
            most_of = tuple([f"{family}/max/{name}" for name in names])
            self._greatest[most_of] = torch.maximum(self._greatest[most_of], greatest) if most_of in self._greatest else greatest
        ctx.log(self._greatest if len(self._greatest) == 1 else _by_name(self._greatest), across="max")


def _by_name(greatest: dict[tuple[str, ...], Tensor]) -> dict[str, Tensor]:
    """Return the maximum of each metric, by name. The keys of `greatest` are tuples of metric names, its values tensors of maxima.

    `greatest` has several keys if microbatches used different modules, or if the modules are on several devices.
    """
    apart: dict[str, Tensor] = {}
    for names, values in greatest.items():
        for name, value in zip(names, values.unbind(), strict=True):
            apart[name] = torch.maximum(apart[name], value) if name in apart else value
    return apart


class _Seen:
    """Collects the outputs of modules in one forward pass on one device, and computes statistics of these outputs.

    Small tensors of one shape are kept, and their statistics are computed together.
    """

    def __init__(self) -> None:
        self.places: dict[str, list[int]] = {}  # module name -> indices (returned by `add`) of the module's outputs
        self._waiting: dict[Any, list[tuple[int, Tensor]]] = {}
        self._sums: list[Tensor] = []
        self._order: list[int] = []  # for each row of `_sums`, the index that `add` returned for the row's tensor
        self._count = 0

    def add(self, tensor: Tensor) -> int:
        """Record a tensor and return its index. The caller may change the tensor afterwards."""
        place, self._count = self._count, self._count + 1
        key, size = (tensor.shape, tensor.dtype), tensor.numel()
        same = self._waiting.setdefault(key, [])
        same.append((place, tensor.clone() if size < _BATCHED_ELEMENTS else tensor))
        if len(same) * size >= _BATCHED_ELEMENTS:
            self._look_at(self._waiting.pop(key))
        return place

    def sums(self) -> Tensor:
        """Return a row of seven statistics for each recorded output. The outputs of one module have consecutive rows."""
        while self._waiting:
            self._look_at(self._waiting.popitem()[1])
        rows = torch.cat(self._sums).unbind()
        by_place = dict(zip(self._order, rows, strict=True))
        return torch.stack([by_place[place] for several in self.places.values() for place in several])

    def _look_at(self, same: list[tuple[int, Tensor]]) -> None:
        places, tensors = zip(*same, strict=True)
        self._order += places
        self._sums.append(_sums(torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]))


@torch.no_grad()
def _sums(tensors: Tensor) -> Tensor:
    """Return seven statistics for each of `n` stacked tensors: an input of shape `[n, ...]` gives a result of shape `[n, 7]`.

    These are mean, second and fourth central moment, mean norm of the vectors along the last dimension, fraction of nonzeros,
    minimum, maximum.
    """
    values = tensors.float() if tensors.dim() > 1 else tensors.float()[:, None]
    inner = tuple(range(1, values.dim()))
    mean = values.mean(inner, keepdim=True)
    powers = (values - mean).square_()
    variance = powers.mean(inner)
    fourth = powers.square_().mean(inner)
    norms = torch.linalg.vector_norm(values, dim=-1, keepdim=True).mean(inner)
    filled = torch.ne(values, 0, out=powers).sum(inner) / values[0].numel()
    return torch.stack([mean.flatten(), variance, fourth, norms, filled, values.amin(inner), values.amax(inner)], 1)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the nonempty floating-point tensors in a module's output."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point() and outputs.numel():
            yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from _tensors(value)
