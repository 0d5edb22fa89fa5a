"""Recognizes the training loop of a script: the first optimizer that steps, and the model that has its parameters."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from callsheet.exec.bare_loop import BareLoop

Begin = Callable[[nn.Module | None, Optimizer, Any, Any], BareLoop | None]
"""Makes the loop of a model, an optimizer, a loss scaler and a dataloader; None if it cannot be observed."""


class LoopFinder:
    """Wraps the functions of torch that every loop calls, until the first optimizer steps. Then it follows that one loop.

    Wrapped are `Tensor.backward` (only until then), the dataloaders' iteration, `GradScaler.step`, `clip_grad_norm_` and `zero_grad`.
    Processes that the script forks are not observed.

    Args:
        begin: makes the loop when it is recognized.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._loop: BareLoop | None = None
        self._is_over = False
        self.is_paused = False
        """Whether a framework's trainer trains now, which is observed by its host."""
        self._undo: list[Callable[[], None]] = []
        self._process = os.getpid()
        self._loaders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by iterator: its dataloader
        self._latest: tuple[Any, Any] = (
            None,
            None,
        )  # the latest dataloader that was iterated, and its batch, until a loop is found
        self._loss: Tensor | None = None  # the sum of the losses since the last `zero_grad`, until a loop is found
        self._scaler: Any = None

    @property
    def loop(self) -> BareLoop | None:
        """The loop that was recognized, or None."""
        return self._loop

    def install(self) -> None:
        """Wrap the functions of torch."""
        finder = self

        def backward(given: Callable[..., Any], loss: Tensor, *args: Any, **options: Any) -> Any:
            if finder._loop is None and not finder._is_over and not loss.dim():
                value = loss.detach()
                finder._loss = value if finder._loss is None else finder._loss + value
            return given(loss, *args, **options)

        def iterate(given: Callable[..., Any], loader: Any) -> Any:
            if finder._loop is not None and finder._loop.is_of_training(loader):
                finder._loop.loader_begins()
            iterator = given(loader)
            finder._loaders[iterator] = weakref.ref(loader)
            return iterator

        def fetch(given: Callable[..., Any], iterator: Any) -> Any:
            reference = finder._loaders.get(iterator)
            # Of `for batch in DataLoader(...)`, only the iterator is left.
            loader = iterator if reference is None or reference() is None else reference()
            if finder._is_over or os.getpid() != finder._process:
                return given(iterator)
            if finder._loop is not None:
                return finder._loop.fetch(loader, lambda: given(iterator))
            batch = given(iterator)
            finder._latest = (loader, batch)
            return batch

        def scaled_step(given: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
            finder._scaler = scaler
            found = given(scaler, optimizer, *args, **options)
            if finder._loop is not None and finder._loop.optimizer is optimizer:
                finder._loop.optimizer_was_skipped(scaler)
            return found

        def zero_grad(given: Callable[..., Any], owner: Any, *args: Any, **options: Any) -> Any:
            if finder._loop is None:
                finder._loss = None
            elif owner in (finder._loop.optimizer, finder._loop.model, finder._loop.run.model):
                finder._loop.gradients_are_discarded()
            return given(owner, *args, **options)

        def clip(given: Callable[..., Any], *args: Any, **options: Any) -> Any:
            if finder._loop is None:
                return given(*args, **options)
            return finder._loop.clip(lambda: given(*args, **options))

        self._restore_backward = self._wrap(Tensor, "backward", backward)
        self._wrap(DataLoader, "__iter__", iterate)
        self._wrap(_BaseDataLoaderIter, "__next__", fetch)
        self._wrap(torch.amp.GradScaler, "step", scaled_step)
        self._wrap(Optimizer, "zero_grad", zero_grad)
        self._wrap(nn.Module, "zero_grad", zero_grad)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._wrap(owner, "clip_grad_norm_", clip)
        self._handle = register_optimizer_step_pre_hook(self._steps)
        self._undo.append(self._handle.remove)

    def remove(self) -> None:
        """Restore the functions of torch."""
        self._is_over = True
        while self._undo:
            self._undo.pop()()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
        given = getattr(owner, name)

        @wraps(given)
        def wrapper(*args: Any, **options: Any) -> Any:
            return around(given, *args, **options)

        def restore() -> None:
            if getattr(owner, name) is wrapper:  # otherwise another library has wrapped it since
                setattr(owner, name, given)

        setattr(owner, name, wrapper)
        self._undo.append(restore)
        return restore

    def _steps(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Recognize the loop at the first step of an optimizer."""
        if self._loop is not None or self._is_over or self.is_paused or os.getpid() != self._process:
            return
        model = model_of(optimizer)
        self._restore_backward()
        (loader, batch), self._latest = self._latest, (None, None)
        loss, self._loss = self._loss, None
        if model is None:
            self._is_over = True
            self._begin(None, optimizer, None, None)
            return
        scaler = self._scaler
        if loss is not None and scaler is not None and scaler.is_enabled() and scaler._scale is not None:
            loss = loss / scaler._scale
        loop = self._begin(model, optimizer, scaler, loader)
        if loop is None:
            self._is_over = True
            return
        self._loop = loop
        has_closure = len(args) > 1 or kwargs.get("closure") is not None
        loop.begin(loss, batch, has_closure=has_closure)


def model_of(optimizer: Optimizer) -> nn.Module | None:
    """Return the module that the loop calls: the root module with the optimizer's parameters, and the fewest others.

    A root module is inside no other module. If no module has all of the parameters, return the one that has the most. Return None if
    no module has any.
    """
    wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
    best: tuple[int, int] | None = None
    found: nn.Module | None = None
    for module in _roots():
        parameters = {id(each) for each in module.parameters()}
        shared = len(wanted & parameters)
        if shared and (best is None or (shared, -len(parameters)) > best):
            best, found = (shared, -len(parameters)), module
    return found


def _roots() -> Iterator[nn.Module]:
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module) and "_modules" in each.__dict__]
    inside = {id(child) for module in modules for child in module._modules.values() if child is not None}
    yield from (module for module in modules if id(module) not in inside)
