"""What comes out of the model's modules."""

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

from callsheet.callback import Callback, label_of
from callsheet.context import Context
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

_WHOLE = "(model)"
_MEANS = ("mean", "std", "l2_norm", "kurtosis", "zeros")
_WAITING = 2**20  # numbers of one shape that may wait for each other
_one_at_a_time = threading.Lock()  # a DataParallel's replicas are threads


class ActivationMonitor(Callback):
    """Log statistics of what the model's modules return, every so many steps.

    For every module that returns floating-point tensors, over all microbatches of the step: `activations/mean/<module>`,
    `activations/std/<module>`, `activations/l2_norm/<module>` (the mean over the last dimension's vectors),
    `activations/kurtosis/<module>` (3 for a normal distribution, 0 for a constant), `activations/zeros/<module>` (the fraction
    that is exactly zero), as means over microbatches and ranks, and `activations/max/<module>`, the greatest magnitude of all;
    the model itself is `(model)`. Where a module returns several tensors, `.0`, `.1`, ... follows its name. Under sharding and
    tensor parallelism it is what this rank computes. With a `name` of its own it logs under that instead of `activations`.

    Hooks are on the modules during the forwards of those steps alone. Nothing waits for the device, but those steps compute more,
    and keep copies of small outputs until the forward's end: 2^20 numbers of each shape and type at most.
    What is compiled runs no hooks, so that of a compiled model only `(model)` is told: it says so, once.

    Args:
        batch_log_interval: how many steps from one look to the next.
        modules: patterns such as `"layers.*.mlp"` of the names of modules; None is all.
        ignore_types: names of module classes to leave out, such as `Dropout`.

    Raises:
        ConfigError: an argument that cannot work; where training starts, a pattern that no module matches.
    """

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
        self._hooks: list[Any] = []
        self._seen: dict[torch.device, _Seen] = {}
        self._last: tuple[weakref.ref[Tensor], int, int] | None = None  # what was looked at last, its version, its place
        self._greatest: dict[tuple[str, ...], Tensor] = {}
        self._step = 0  # that was looked at last
        self._has_seen = self._has_warned = False

    def on_train_start(self, ctx: Context) -> None:
        """Check the patterns."""
        self._step = 0
        names = [name for name, _ in ctx.model.named_modules()]
        for pattern in self._patterns or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"no module's name matches {pattern!r}; this model has {', '.join(names[1:6])}, ...")

    def on_forward_start(self, ctx: Context) -> None:
        """Put the hooks on, in a chosen step; around each forward, since recomputation in the backward would be seen twice."""
        if ahead := -ctx.step % self._interval:
            ctx.mute(self, "on_forward_start", "on_forward_end", until=ctx.step + ahead)
            return
        for name, module in ctx.model.named_modules():
            if self._is_wanted(name, module):
                self._hooks.append(module.register_forward_hook(self._hook(name or _WHOLE)))

    def on_forward_end(self, ctx: Context) -> None:
        """Take them off, and log what they saw."""
        if self._hooks:
            count = len(self._hooks)
            self._unhook()
            if not self._has_seen and not self._has_warned and count > 1:
                self._has_warned = True
                logger.warning("%s: no module in the model ran its hooks: what is compiled does not", label_of(self))
            self._log(ctx)

    def on_exception(self, ctx: Context) -> None:
        """Leave no hook behind."""
        self._unhook()
        self._seen = {}

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._last = [], None

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        return type(module).__name__ not in self._ignore_types and (
            self._patterns is None or any(fnmatchcase(name, pattern) for pattern in self._patterns)
        )

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._has_seen = self._has_seen or name != _WHOLE
            tensors = list(_tensors(outputs))
            for i, tensor in enumerate(tensors):
                self._add(name if len(tensors) == 1 else f"{name}.{i}", tensor)

        return look

    def _add(self, name: str, tensor: Tensor) -> None:
        """Look at what a module returned; it may be called more than once in a forward."""
        here = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        if not here.numel():
            return
        version = -1 if tensor.is_inference() else tensor._version  # nobody counts those of inference
        with _one_at_a_time:
            seen = self._seen.setdefault(here.device, _Seen())
            if version < 0 or self._last is None or tensor is not self._last[0]() or version != self._last[1]:
                self._last = weakref.ref(tensor), version, seen.add(here)  # a module hands on what its last child returned
            seen.places.setdefault(name, []).append(self._last[2])

    @torch.no_grad()
    def _log(self, ctx: Context) -> None:
        """Make the statistics of all modules together: that takes no longer than of one."""
        if self._step != ctx.step:
            self._step, self._greatest = ctx.step, {}  # of all its microbatches so far
        family, seen, self._seen = self.name or "activations", self._seen, {}
        for each in seen.values():
            names, times = list(each.places), [len(several) for several in each.places.values()]
            mean, variance, fourth, l2_norm, filled, least, most = each.sums().T
            kurtosis = torch.where(variance == 0, 0.0, fourth / variance.square())
            found, greatest = torch.stack([mean, variance.sqrt(), l2_norm, kurtosis, 1 - filled]), torch.maximum(-least, most)
            if max(times) > 1:
                found = torch.stack([part.mean(1) for part in found.split(times, 1)], 1)
                greatest = torch.stack([part.amax() for part in greatest.split(times)])
            ctx.log({tuple([f"{family}/{kind}/{name}" for kind in _MEANS for name in names]): found.flatten()}, over="mean")
            most_of = tuple([f"{family}/max/{name}" for name in names])
            self._greatest[most_of] = torch.maximum(self._greatest[most_of], greatest) if most_of in self._greatest else greatest
        ctx.log(self._greatest if len(self._greatest) == 1 else _apart(self._greatest), across="max")


def _apart(greatest: dict[tuple[str, ...], Tensor]) -> dict[str, Tensor]:
    """Each alone: not every microbatch went through the same modules, or they are on several devices."""
    apart: dict[str, Tensor] = {}
    for names, values in greatest.items():
        for name, value in zip(names, values.unbind(), strict=True):
            apart[name] = torch.maximum(apart[name], value) if name in apart else value
    return apart


class _Seen:
    """What was returned in one forward on one device. Small tensors wait for others of their shape, to be looked at together."""

    def __init__(self) -> None:
        self.places: dict[str, list[int]] = {}  # by module, of each call
        self._waiting: dict[Any, list[tuple[int, Tensor]]] = {}
        self._sums: list[Tensor] = []
        self._order: list[int] = []  # whose sums these are
        self._count = 0

    def add(self, tensor: Tensor) -> int:
        """Its place; it may be changed afterwards."""
        place, self._count = self._count, self._count + 1
        key, size = (tensor.shape, tensor.dtype), tensor.numel()
        alike = self._waiting.setdefault(key, [])
        alike.append((place, tensor.clone() if size < _WAITING else tensor))
        if len(alike) * size >= _WAITING:
            self._look_at(self._waiting.pop(key))
        return place

    def sums(self) -> Tensor:
        """One row a call, by modules in the order of `places`; see `_sums`."""
        while self._waiting:
            self._look_at(self._waiting.popitem()[1])
        rows = torch.cat(self._sums).unbind()
        by_place = dict(zip(self._order, rows, strict=True))
        return torch.stack([by_place[place] for several in self.places.values() for place in several])

    def _look_at(self, alike: list[tuple[int, Tensor]]) -> None:
        places, tensors = zip(*alike, strict=True)
        self._order += places
        self._sums.append(_sums(torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]))


@torch.no_grad()
def _sums(tensors: Tensor) -> Tensor:
    """Of tensors of one shape `[n, ...]`, as `[n, 7]`.

    Mean, second and fourth central moment, mean norm of the last dimension's vectors, share that is not zero, least, greatest.
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
    """The floating-point tensors in what a module returned, empty ones left out."""
    if isinstance(outputs, Tensor):
        if outputs.is_floating_point() and outputs.numel():
            yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from _tensors(value)
