"""The base class of callbacks: methods named after events, and class attributes that say how they are called."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from callsheet.core.hooks import Hooks
from callsheet.core.lane_options import LaneOptions
from callsheet.core.ranks import RankGate, read_ranks
from callsheet.core.time import Interval, Time
from callsheet.errors import ConfigError, NotACallbackError, RegistrationError, did_you_mean, where

if TYPE_CHECKING:
    from callsheet.core.context import Context

PHASES = ("change", "measure", "decide", "save", "report", "restore")
"""The order of handlers within one event. Within a phase, handlers are called in the order of registration."""

LANES = ("inline", "background", "process")
ERROR_POLICIES = ("raise", "isolate")


class Callback(Hooks):
    """The base of all callbacks: override the methods of the events that you want to handle; each receives the context.

    A class overrides either these methods or `on_event`, which handles every event. The options are class attributes, and an instance may
    have its own. They are checked when the callback is added, not when an event is fired.

    Example:
        >>> class Greeter(Callback):
        ...     def on_train_start(self, ctx):
        ...         print(f"training {ctx.run.name} from step {ctx.step}")
    """

    name: str = ""
    """The name for its state, in messages and in tables; if empty, the class's name."""
    phase: str = "measure"
    """The place of its handlers in an event's order: one of `PHASES`. `change` and `decide` are for callbacks that act on training."""
    ranks: RankGate = "all"
    """The ranks on which it is called: `all`, `zero`, `local_zero`, or a set of ranks."""
    lane: str = "inline"
    """Where it runs: `inline` on the training thread, `background`, or `process`."""
    on_error: str = ""
    """`raise`, the default inline: an error ends the run. `isolate`: an error is logged; three in a row switch the callback off."""
    collective: bool = False
    """Whether it calls collectives, so that it must run inline on every rank."""
    draws_random: bool = False
    """Whether it draws random numbers. If so, the random states are restored after each handler, so that training is not affected."""
    keep_fields: tuple[str, ...] = ()
    """Fields whose window should be extended as far as the lifecycle allows, such as `outputs`."""
    snapshot_fields: tuple[str, ...] = ()
    """Fields that the snapshots of its lane hold; if empty, all fields that need no copy."""
    writes_to_run_folder: bool = False
    """Whether it writes files to `ctx.run.folder`. If so, a host locks the folder against a second process; a Trainer always does."""
    transport_ignore: tuple[str, ...] = ()
    """Attributes that each process makes for itself, and that may differ between processes; see `callsheet.transport`."""
    lane_options: LaneOptions = LaneOptions()
    """The size of its lane's queue, and what happens when it is full."""
    common: Any = None
    """An object that callbacks share: all inline callbacks of one call sheet whose `common` is of the same class get one instance, unless
    its `is_alone` is true."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the constructor's arguments, so that a `CallbackSpec` can say how this object was made."""
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        self = super().__new__(cls)
        self._arguments = (args, kwargs)
        return self

    def on_event(self, ctx: Context) -> Awaitable[None] | None:
        """Handle every event; `ctx.event` says which."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what must survive a resume, as plain data and tensors. Called when a checkpoint is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Called when a checkpoint is loaded."""


def label_of(callback: Callback) -> str:
    """Return the callback's name in tables, errors and checkpoints: its own, or its class's."""
    return callback.name or type(callback).__name__


class Marks(NamedTuple):
    """The options that the decorators `every`, `at` and the rank gates set on a function; None: the callback's option applies."""

    every: Interval | None = None
    phase: str | None = None
    ranks: RankGate | None = None


F = TypeVar("F", bound=Callable[..., Any])


def every(interval: str | int | Time, *, at_end: bool = False) -> Callable[[F], F]:
    """Call the method only every `interval`, such as `"100ba"`, `"1ep"` or `"10m"`; a whole number means batches.

    At `on_train_step_end`, `"100ba"` means steps 100, 200, ... At other events the method is called if an interval was completed since the
    event was last fired. With `at_end` it is also called when `max_duration` is reached.

    Raises:
        RegistrationError: the interval is invalid or not above zero; the message names the method and its line.
    """
    if callable(interval):
        raise RegistrationError(f"write @every('100ba'), with an interval ({interval.__qualname__}, {where(interval)})")
    return _mark(lambda: {"every": Interval(interval, at_end=at_end)})


def at(phase: str) -> Callable[[F], F]:
    """Put the method in this phase instead of the callback's.

    Raises:
        RegistrationError: the phase is unknown; the message names the method and its line.
    """
    return _mark(lambda: {"phase": one_of("phase", phase, PHASES)})


def rank_zero_only(function: F) -> F:
    """Run the function on global rank 0 only. On other ranks it returns None.

    The rank is read when the call sheet is compiled, or when the function is called, never at import.
    """
    return _gated("zero", function)


def local_rank_zero_only(function: F) -> F:
    """Run the function on local rank 0 of each machine only. See `rank_zero_only`."""
    return _gated("local_zero", function)


def marks(function: Any) -> Marks:
    """Return the options that the decorators set on a function or bound method."""
    found: Marks = getattr(function, "__callsheet__", Marks())
    return found


def one_of(what: str, word: str, words: tuple[str, ...]) -> str:
    """Return `word` if it is one of `words`; else raise a `ConfigError` that names the nearest."""
    if word not in words:
        raise ConfigError(f"unknown {what} {word!r}{did_you_mean(str(word), words)} (one of {', '.join(words)})")
    return word


def _mark(changes: Callable[[], dict[str, Any]]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        try:
            made = changes()
        except ConfigError as error:
            raise RegistrationError(f"{error} ({function.__qualname__}, {where(function)})") from None
        function.__callsheet__ = marks(function)._replace(**made)  # type: ignore[attr-defined]  # functions take attributes
        return function

    return decorate


def _gated(gate: str, function: F) -> F:
    @wraps(function)
    def on_those_ranks(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if read_ranks().passes(gate) else None

    return _mark(lambda: {"ranks": gate})(on_those_ranks)  # type: ignore[return-value]  # a wrapper has the signature of what it wraps


_GATE = _gated("zero", lambda: None).__code__


def ungated(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a rank gate, since the call sheet checks the rank once, when it is compiled."""
    function: Any = getattr(handler, "__func__", handler)
    if getattr(function, "__code__", None) is not _GATE:
        return handler
    inner: Callable[..., Any] = function.__wrapped__
    return inner.__get__(handler.__self__) if hasattr(handler, "__self__") else inner


@dataclass(frozen=True, slots=True)
class CallbackSpec:
    """A callback as plain data, as in the YAML, the run's folder, the report and the transport.

    `class_path` is `module.Class`; `init_args` are the constructor's arguments by name; `name` is the instance's, if it was set; `state` is
    its `state_dict`.
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    state: dict[str, Any] = field(default_factory=dict)

    _KEYS: ClassVar[tuple[str, ...]] = ("class_path", "init_args", "name", "state")

    @classmethod
    def of(cls, callback: Callback) -> Self:
        """Return the spec of `callback`: how it was constructed, and its current state."""
        kind = type(callback)
        args, kwargs = callback._arguments
        bound = inspect.signature(kind.__init__).bind(callback, *args, **kwargs)
        init_args: dict[str, Any] = {}
        for name, value in list(bound.arguments.items())[1:]:
            parameter = inspect.signature(kind.__init__).parameters[name]
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
        name = callback.name if "name" in vars(callback) and "name" not in init_args else ""
        for argument, value in init_args.items():
            if isinstance(value, Callback):  # the state of an inner callback is part of the outer one's
                init_args[argument] = replace(cls.of(value), state={})
        return cls(f"{kind.__module__}.{kind.__qualname__}", init_args, name, dict(callback.state_dict()))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the spec of which `to_dict` returned `data`. Raises `ConfigError` on unknown keys."""
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

        This imports the class, which runs its module: build only specs whose origin you trust.

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


def import_path(path: str) -> Any:
    """Return the object at `package.module.Name`, nested names included. Raises a `ConfigError` that names a missing part."""
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
            raise  # the module exists, and one of its own imports is missing
        for depth, part in enumerate(parts[cut:], cut):
            if not hasattr(found, part):
                raise ConfigError(f"{'.'.join(parts[:depth])} has no {part!r}{did_you_mean(part, dir(found))} (in {path!r})")
            found = getattr(found, part)
        return found
    raise ConfigError(f"cannot import {path!r}: there is no module {parts[0]!r}, or it is not a dotted path")
