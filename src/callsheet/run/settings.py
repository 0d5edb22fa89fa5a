"""The settings of a run as plain data: its model, optimizer, scheduler, callbacks and options."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from callsheet.core.background import inner
from callsheet.core.callback import Callback
from callsheet.core.spec import init_args_of
from callsheet.core.time import Interval, Time
from callsheet.errors import ConfigError
from callsheet.run.reasons import is_secret, one_line

logger = logging.getLogger("callsheet")

_MAX_DEPTH = 6
_MAX_VALUES = 200  # the maximum number of values that are recorded from one mapping or list
_MAX_TEXT_CHARACTERS = 2000  # the maximum number of characters that are recorded from one text
# Public attributes of torch's schedulers that are not among the arguments with which the scheduler was made.
_SCHEDULER_STATE = ("last_epoch", "verbose", "base_lrs")


def settings_of(
    model: nn.Module | None, optimizer: Any, scheduler: Any, callbacks: Iterable[Callback], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings with which the run was started as plain data, with `...` in place of possible credentials.

    Objects have the form `{"class_path": ..., "init_args": ...}`, as in a recipe's file. The arguments of an optimizer are the
    options of its parameter groups, with the initial learning rates; those of a scheduler are its public attributes. A part that
    cannot be described is left out, with a warning.

    Args:
        model: the model, or None if the loop does not provide it.
        optimizer: the optimizer, or None.
        scheduler: the learning rate scheduler, or None.
        callbacks: the callbacks.
        options: the loop's own options by name.
    """
    parts: dict[str, Callable[[], Any]] = {
        "model": lambda: _model(model),
        "optimizer": lambda: _optimizer(optimizer),
        "scheduler": lambda: _scheduler(scheduler),
        "callbacks": lambda: [_callback(each) for each in callbacks],
        "options": lambda: plain(options),
    }
    found: dict[str, Any] = {}
    for name, describe in parts.items():
        try:
            described = describe()
        except Exception as error:  # the user's objects may raise any error, which must not end the run
            verb = "are" if name.endswith("s") else "is"
            logger.warning("The run's %s cannot be described, and %s not recorded with its settings: %s", name, verb, error)
            continue
        if described:
            found |= described if name == "options" else {name: described}
    return found


def plain(value: Any, depth: int = 0) -> Any:
    """Return `value` as plain data. An object that has no plain form is replaced by the import path of its class.

    The object's `repr` is not used: it may contain an address, which would differ in every run.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, os.PathLike, Time, Interval)):
        return one_line(os.fspath(value) if isinstance(value, os.PathLike) else str(value), at_most=_MAX_TEXT_CHARACTERS)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            items = [(str(name), inside) for name, inside in list(value.items())[:_MAX_VALUES]]
            return {name: "..." if is_secret(name) and inside else plain(inside, depth + 1) for name, inside in items}
        if isinstance(value, Set):
            value = sorted(value, key=str)
        if isinstance(value, Sequence):
            return [plain(inside, depth + 1) for inside in value[:_MAX_VALUES]]
        if isinstance(value, Callback):
            return _callback(value, depth + 1)
        if isinstance(value, partial):
            return {"class_path": _path(value.func), "init_args": plain(value.keywords, depth + 1)}
        if is_dataclass(value) and not isinstance(value, type):
            values = {field.name: getattr(value, field.name) for field in fields(value)}
            return {"class_path": _path(type(value)), "init_args": plain(values, depth + 1)}
    if type(value).__module__ == "torch":
        return str(value) if type(value).__name__ in ("dtype", "device") else _path(type(value))
    return _path(value if hasattr(value, "__qualname__") else type(value))


def _path(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}".lstrip(".")


def _model(model: nn.Module | None) -> dict[str, Any]:
    if model is None:
        return {}
    sizes = [(each.numel(), each.requires_grad) for each in nn.Module.parameters(model) if not is_lazy(each)]
    return {
        "class_path": _path(type(model)),
        "parameters": sum(size for size, _ in sizes),
        "trainable_parameters": sum(size for size, is_trained in sizes if is_trained),
    }


def _optimizer(optimizer: Any) -> dict[str, Any]:
    if optimizer is None:
        return {}
    optimizer = getattr(optimizer, "optimizer", optimizer)  # unwrap the optimizer of Accelerate and other libraries
    groups = [_group(group) for group in getattr(optimizer, "param_groups", None) or [{}]]
    common = {name: value for name, value in groups[0].items() if all(group.get(name) == value for group in groups)}
    different = {
        f"group_{number}": {name: value for name, value in group.items() if name not in common}
        for number, group in enumerate(groups)
    }
    return {
        "class_path": _path(type(optimizer)),
        "init_args": {**common, **{name: group for name, group in different.items() if group}},
    }


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name not in ("params", "param_names", "initial_lr")}
    if "initial_lr" in group:
        options["lr"] = group["initial_lr"]  # the scheduler may already have changed `lr`, so record the initial rate
    return {name: plain(value.item() if hasattr(value, "item") else value) for name, value in options.items()}


def _scheduler(scheduler: Any) -> dict[str, Any]:
    if scheduler is None:
        return {}
    scheduler = getattr(scheduler, "scheduler", scheduler)  # Accelerate wraps the scheduler, so unwrap it
    values = {name: value for name, value in vars(scheduler).items() if not name.startswith("_") and name not in _SCHEDULER_STATE}
    values = {name: value for name, value in values.items() if not hasattr(value, "param_groups")}
    return {"class_path": _path(type(scheduler)), "init_args": plain(values)}


def _callback(callback: Callback, depth: int = 0) -> dict[str, Any]:
    callback = inner(callback)
    foreign = getattr(callback, "foreign", None)  # another framework's callback, whose arguments are unknown
    if foreign is not None:
        return {"class_path": _path(type(foreign))}
    parameters = inspect.signature(type(callback).__init__).parameters
    arguments = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    try:
        arguments |= init_args_of(callback)
    except ConfigError:  # a positional-only argument cannot be recorded by name
        arguments = {}
    described = {"class_path": _path(type(callback)), "init_args": plain(arguments, depth), "name": callback.name}
    return {name: value for name, value in described.items() if value}
