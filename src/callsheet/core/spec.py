"""Callbacks as plain data, and the import of objects by their dotted paths."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from callsheet.core.callback import Callback, one_of
from callsheet.errors import ConfigError, NotACallbackError, did_you_mean


@dataclass(frozen=True, slots=True)
class CallbackSpec:
    """A callback as plain data, from which it can be constructed again, for example in another process.

    Args:
        class_path: the import path of the class, `module.Class`.
        init_args: the constructor's arguments by name. An argument that is a callback is a `CallbackSpec` too.
        name: the instance's name, if one was set.
        state: what the callback's `state_dict` returned.
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    state: dict[str, Any] = field(default_factory=dict)

    _KEYS: ClassVar[tuple[str, ...]] = ("class_path", "init_args", "name", "state")

    @classmethod
    def of(cls, callback: Callback) -> Self:
        """Return the spec of a callback: how it was constructed, and its current state.

        Args:
            callback: the callback.

        Raises:
            ConfigError: the constructor takes arguments that a spec cannot hold by name: `*args`, or arguments by position only.
        """
        kind, init_args = type(callback), init_args_of(callback)
        name = callback.name if "name" in vars(callback) and "name" not in init_args else ""
        for argument, value in init_args.items():
            if isinstance(value, Callback):  # leave out the inner callback's state: the state of `callback` includes it
                init_args[argument] = replace(cls.of(value), state={})
        return cls(f"{kind.__module__}.{kind.__qualname__}", init_args, name, dict(callback.state_dict()))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the spec for the data that `to_dict` returned.

        Args:
            data: the fields of the spec by name. Only `class_path` is required.

        Raises:
            ConfigError: a key is unknown, or `class_path` is missing or not a string.
        """
        for key in data:
            one_of("key of a callback spec", key, cls._KEYS)
        if not isinstance(data.get("class_path"), str):
            raise ConfigError("a callback spec needs a class_path, such as 'callsheet.callbacks.LRMonitor'")
        init_args = {
            name: cls.from_dict(value) if isinstance(value, Mapping) and "class_path" in value else value
            for name, value in (data.get("init_args") or {}).items()
        }
        return cls(data["class_path"], init_args, data.get("name") or "", dict(data.get("state") or {}))

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain data, without empty fields."""
        init_args = {
            name: value.to_dict() if isinstance(value, CallbackSpec) else value for name, value in self.init_args.items()
        }
        full = {"class_path": self.class_path, "init_args": init_args, "name": self.name, "state": self.state}
        return {key: value for key, value in full.items() if value}

    def build(self) -> Callback:
        """Construct the callback, with its name and state.

        Building imports the class and so runs its module; build only specs whose origin you trust.

        Returns:
            A new callback.

        Raises:
            ConfigError: the class cannot be found, or does not take these arguments.
            NotACallbackError: the class is not a subclass of `Callback`.
        """
        kind = import_path(self.class_path)
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise NotACallbackError(f"{self.class_path} is not a subclass of callsheet.Callback")
        takes = inspect.Signature() if kind.__init__ is object.__init__ else inspect.signature(kind)
        try:
            takes.bind(**self.init_args)
        except TypeError as error:
            raise ConfigError(f"{self.class_path}: {error}; it takes {', '.join(takes.parameters) or 'nothing'}") from None
        callback = kind(
            **{name: value.build() if isinstance(value, CallbackSpec) else value for name, value in self.init_args.items()}
        )
        if self.name:
            callback.name = self.name
        if self.state:
            callback.load_state_dict(self.state)
        return callback


def init_args_of(callback: Callback) -> dict[str, Any]:
    """Return the arguments with which the callback was constructed, by name.

    Raises:
        ConfigError: the class takes an argument by position only.
    """
    kind = type(callback)
    args, kwargs = callback._arguments
    signature = inspect.signature(kind.__init__)
    init_args: dict[str, Any] = {}
    for name, value in list(signature.bind(callback, *args, **kwargs).arguments.items())[1:]:
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            init_args.update(value)
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"{kind.__qualname__} takes {name} by position only, which a CallbackSpec cannot hold; make it a named argument"
            )
        elif parameter.kind is parameter.VAR_POSITIONAL and value:
            raise ConfigError(
                f"{kind.__qualname__} takes *{name}, which a CallbackSpec cannot hold by name; make it one argument, a list"
            )
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            init_args[name] = value
    return init_args


def import_path(path: str) -> Any:
    """Import and return the object at the path `package.module.Name`; `Name` may be nested.

    Raises `ConfigError`, with the name of the part of the path that is missing.
    """
    parts = path.split(".")
    if not all(parts):
        raise ConfigError(f"{path!r} is not an import path; write one like 'package.module.Name'")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
                continue
            raise  # the module exists, but another module that it imports is missing
        for depth, part in enumerate(parts[cut:], cut):
            if not hasattr(found, part):
                raise ConfigError(f"{'.'.join(parts[:depth])} has no {part!r}{did_you_mean(part, dir(found))} (in {path!r})")
            found = getattr(found, part)
        return found
    raise ConfigError(f"cannot import {path!r}: there is no module {parts[0]!r}, or it is not a dotted path")
