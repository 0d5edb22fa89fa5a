"""What is checked before a callback may stand on the call sheet. A mistake fails here, not a thousand steps later."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from callsheet.background import Background
from callsheet.callback import ERROR_POLICIES, LANES, PHASES, Callback, Marks, label_of, marks, one_of
from callsheet.distributed import RankGate, check_gate
from callsheet.errors import ConfigError, NotACallbackError, RegistrationError, UnknownEventError, did_you_mean, where
from callsheet.lifecycle import EVENTS, FIELDS
from callsheet.snapshot import NEVER
from callsheet.time import Interval

_EVENTS = frozenset(EVENTS)
_NO_EVENTS = frozenset({"on_event", "on_error"})


class HandlerOptions(NamedTuple):
    """How a handler wants to be called, checked."""

    phase: str
    ranks: RankGate
    lane: str
    on_error: str
    every: Interval | None
    draws_random: bool


def check_callback(callback: object) -> Callback:
    """`callback`, if it is an instance of `Callback` with nothing misspelt.

    Raises:
        NotACallbackError: it is a class, or no callback at all.
        UnknownEventError: a method is named like an event that does not exist.
        RegistrationError: anything else that could not work.
    """
    if isinstance(callback, Background):
        check_callback(callback.callback)
    if isinstance(callback, type):
        hint = (
            f"add an instance of it, {callback.__name__}()"
            if issubclass(callback, Callback)
            else "callbacks derive from callsheet.Callback"
        )
        raise NotACallbackError(f"{callback.__name__} is a class ({where(callback)}); {hint}")
    if not isinstance(callback, Callback):
        if callable(callback):
            raise NotACallbackError(
                f"{callback!r} is a function ({where(callback)}); give it an event with manager.register(event, function)"
            )
        raise NotACallbackError(f"{callback!r} is not a callback: callbacks derive from callsheet.Callback{bridge_of(callback)}")
    for name in _public_names(callback):
        if name.startswith("on_") and name not in _EVENTS | _NO_EVENTS and callable(getattr(callback, name)):
            raise UnknownEventError(_at(f"unknown event {name!r}{did_you_mean(name, EVENTS)}", callback, getattr(callback, name)))
        if (
            marks(getattr(callback, name, None)) != Marks()
            and name not in _EVENTS
            and marks(getattr(callback, name)).ranks is None
        ):
            raise RegistrationError(
                _at(f"{name!r} has an interval or a phase and is no event", callback, getattr(callback, name))
            )
    keepable = [field.name for field in FIELDS.values() if field.kept_until]
    for what, names, valid in (
        ("keep_fields", callback.keep_fields, keepable),
        ("snapshot_fields", callback.snapshot_fields, list(FIELDS)),
    ):
        for name in names:
            if name not in valid:
                kind = "field that can be kept" if what == "keep_fields" else "field"
                raise RegistrationError(
                    _at(f"{what}: the context has no {kind} called {name!r}{did_you_mean(name, valid)}", callback)
                )
    _policy(callback, Marks(), {}, label_of(callback), where(type(callback)))
    if not isinstance(callback.name, str):
        raise RegistrationError(_at(f"the name of a callback is a string, not {callback.name!r}", callback))
    return callback


_FRAMEWORKS = {
    "transformers": "huggingface",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "ignite": "ignite",
    "torchtnt": "torchtnt",
    "composer": "composer",
    "keras": "keras",
    "accelerate": "accelerate",
}
"""By the package that its class comes from, the bridge that takes a foreign callback."""


def bridge_of(thing: object) -> str:
    """How one of another framework is brought in, where its class says that it is."""
    packages = (kind.__module__.partition(".")[0] for kind in type(thing).__mro__)
    bridge = next((_FRAMEWORKS[package] for package in packages if package in _FRAMEWORKS), None)
    return f"; wrap it: callsheet.bridges.{bridge}.guest(...)" if bridge is not None else ""


def handlers_of(callback: Callback) -> dict[str, Callable[..., Any]]:
    """The handlers of a checked callback by event; all events where it overrides `on_event`."""
    events = {event: handler for event in EVENTS if not is_inherited(handler := getattr(callback, event), event)}
    for event, handler in events.items():
        if not callable(handler):
            raise RegistrationError(_at(f"{event} is {handler!r}, and should be a method", callback))
    if not is_inherited(callback.on_event, "on_event"):
        if events:
            raise RegistrationError(
                _at(f"overrides both on_event and {next(iter(events))}; on_event hears that too, keep one of them", callback)
            )
        return dict.fromkeys(EVENTS, callback.on_event)
    if not events:
        for name in _public_names(callback):
            if f"on_{name}" in _EVENTS and callable(getattr(callback, name)):
                raise RegistrationError(
                    _at(f"hears nothing; did you mean on_{name!s} where it says {name}?", callback, getattr(callback, name))
                )
    return events


def is_inherited(handler: object, name: str) -> bool:
    """Whether `handler` is the method that does nothing, of the base class."""
    return getattr(handler, "__func__", None) is getattr(Callback, name)


def resolve_options(owner: Any, handler: Callable[..., Any], label: str, given: dict[str, Any]) -> HandlerOptions:
    """How `handler` wants to be called: by what was given at registration, its own decorators, then its callback's class.

    Raises:
        RegistrationError: an unknown word, or two wishes that forbid each other; the message names the callback and its line.
    """
    wish = _policy(owner, marks(handler), given, label, where(handler))
    call = getattr(handler, "__call__", handler)  # noqa: B004  # of an object that is called like a function
    bodies = [inspect.unwrap(each) for each in (handler, call)]
    if any(inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body) for body in bodies):
        raise RegistrationError(
            f"it is a generator, whose body a call does not run: leave the yield out (callback {label}, {where(handler)})"
        )
    awaited = any(inspect.iscoroutinefunction(body) for body in bodies)
    if awaited and wish.lane == "inline":
        raise RegistrationError(
            "it is async, and nothing awaits it on the training thread: make it a plain function, or choose `lane = 'background'` "
            f"(callback {label}, {where(handler)})"
        )
    _check_signature(handler, label)
    return wish


def _policy(owner: Any, own: Marks, given: dict[str, Any], label: str, source: str) -> HandlerOptions:
    try:
        phase = one_of("phase", given.get("phase") or own.phase or owner.phase, PHASES)
        lane = one_of("lane", given.get("lane") or owner.lane, LANES)
        ranks = check_gate(next(gate for gate in (given.get("ranks"), own.ranks, owner.ranks) if gate is not None))
        on_error = one_of(
            "on_error", given.get("on_error") or owner.on_error or ("raise" if lane == "inline" else "isolate"), ERROR_POLICIES
        )
        if owner.collective and ranks != "all":
            raise ConfigError(
                f"it calls collectives, so it must run on all ranks, not on {ranks}: gate the writing inside it instead"
            )
        if owner.collective and lane != "inline":
            raise ConfigError(f"it calls collectives, so it must run inline, not in the lane {lane!r}")
        if owner.collective and on_error == "isolate":
            raise ConfigError(
                "it calls collectives, so its errors must be raised: isolated on one rank, it would leave the others waiting"
            )
        if owner.draws_random and lane != "inline":
            raise ConfigError(
                "it draws random numbers, and a lane would draw them in the midst of training: let it have a generator of its own, and "
                "leave samples out"
            )
        if lane != "inline" and (never := [name for name in owner.snapshot_fields if name in NEVER]):
            raise ConfigError(
                f"snapshot_fields: {', '.join(never)} cannot be given to a lane, since training goes on with it; read it inline, and log numbers"
            )
        if lane != "inline" and on_error == "raise":
            raise ConfigError(f"in the lane {lane!r} errors are always isolated; leave on_error out")
    except ConfigError as error:
        raise RegistrationError(f"{error} (callback {label}, {source})") from None
    return HandlerOptions(phase, ranks, lane, on_error, given.get("every") or own.every, owner.draws_random)


def _check_signature(handler: Callable[..., Any], label: str) -> None:
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # a builtin without a signature: the first call will tell
        return
    try:
        signature.bind(None)
    except TypeError:
        name = getattr(handler, "__name__", repr(handler))
        raise RegistrationError(
            f"{name}{signature} cannot be called with the context alone: write `def {name}(ctx)`, with self in a class "
            f"(callback {label}, {where(handler)})"
        ) from None


def _public_names(callback: Callback) -> Iterator[str]:
    """Names of the callback's own functions and values; properties and the like are left out, since to read one would run it."""
    base = set(dir(Callback)) - _EVENTS
    for name in dict.fromkeys([*dir(type(callback)), *vars(callback)]):
        if not name.startswith("_") and name not in base:
            static = inspect.getattr_static(callback, name, None)
            if not hasattr(type(static), "__get__") or isinstance(static, (FunctionType, staticmethod, classmethod)):
                yield name


def _at(message: str, callback: Callback, thing: object = None) -> str:
    return f"{message} (callback {label_of(callback)}, {where(thing if thing is not None else type(callback))})"
