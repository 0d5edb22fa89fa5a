"""Checks of a callback when it is added, so that a mistake raises an error at once and not a thousand steps later."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from callsheet.core.background import Background, inner
from callsheet.core.call_sheet import HandlerEntry, Registration
from callsheet.core.callback import (
    ERROR_POLICIES,
    LANES,
    PHASES,
    Callback,
    Lane,
    Marks,
    OnError,
    Phase,
    foreign_hints,
    label_of,
    marks,
    one_of,
    remove_gate,
)
from callsheet.core.control import REQUESTS
from callsheet.core.events import as_event, event_hint
from callsheet.core.lane_options import FIELDS_NOT_IN_LANES
from callsheet.core.lifecycle import EVENTS, FIELDS
from callsheet.core.ranks import RankGate, check_gate
from callsheet.core.states import keeps_state
from callsheet.core.time import Interval, Time, TimeUnit
from callsheet.errors import ConfigError, NotACallbackError, RegistrationError, UnknownEventError, did_you_mean, where

if TYPE_CHECKING:
    from callsheet.core.context import Context

_EVENT_NAMES = frozenset(EVENTS)
_OTHER_HANDLERS = frozenset({"on_event", "on_error"})


class RegisterOptions(TypedDict, total=False):
    """The options with which a function is registered as a handler of an event.

    The value of an option that is None comes from a decorator of the function, or otherwise from the default of `Callback`.
    """

    every: str | int | Time | Interval | None
    phase: Phase | None
    ranks: RankGate | None
    lane: Lane | None
    on_error: OnError | None


class HandlerOptions(NamedTuple):
    """The checked options of a handler, such as its phase, ranks and interval."""

    phase: Phase
    ranks: RankGate
    lane: Lane
    on_error: OnError
    every: Interval | None
    draws_random: bool


def check_callback(callback: object) -> Callback:
    """Return `callback` if it is a valid instance of `Callback`, otherwise raise an error.

    Raises:
        NotACallbackError: the argument is a class, or not a callback at all.
        UnknownEventError: a method's name begins with `on_`, but there is no such event.
        RegistrationError: an option or a method is invalid.
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
        hint = "".join(of(callback) for of in foreign_hints)
        raise NotACallbackError(f"{callback!r} is not a callback: callbacks derive from callsheet.Callback{hint}")
    for name in _public_names(callback):
        if name.startswith("on_") and name not in _EVENT_NAMES | _OTHER_HANDLERS and callable(getattr(callback, name)):
            raise UnknownEventError(_at(f"unknown event {name!r}{event_hint(name)}", callback, getattr(callback, name)))
        if (
            marks(getattr(callback, name, None)) != Marks()
            and name not in _EVENT_NAMES
            and marks(getattr(callback, name)).ranks is None
        ):
            raise RegistrationError(
                _at(f"{name!r} has an interval or a phase, but is not an event", callback, getattr(callback, name))
            )
    keepable = [field.name for field in FIELDS.values() if field.kept_until]
    for what, names, valid in (
        ("keep_fields", callback.keep_fields, keepable),
        ("snapshot_fields", callback.snapshot_fields, list(FIELDS)),
        ("required_fields", callback.required_fields, list(FIELDS)),
    ):
        for name in names:
            if name not in valid:
                kind = "field that can be kept" if what == "keep_fields" else "field"
                raise RegistrationError(
                    _at(f"{what}: the context has no {kind} called {name!r}{did_you_mean(name, valid)}", callback)
                )
    for request in callback.requests:
        if request not in REQUESTS:
            raise RegistrationError(
                _at(f"requests: there is no ctx.control.{request}{did_you_mean(request, REQUESTS)}", callback)
            )
    _policy(callback, Marks(), {}, label_of(callback), where(type(callback)))
    if not isinstance(callback.name, str):
        raise RegistrationError(_at(f"the name of a callback must be a string, not {callback.name!r}", callback))
    return callback


def handlers_of(callback: Callback) -> dict[str, Callable[..., Any]]:
    """Return the handlers of a checked callback by event. If the callback overrides `on_event`, that method handles all events."""
    events = {event: handler for event in EVENTS if not is_inherited(handler := getattr(callback, event), event)}
    for event, handler in events.items():
        if not callable(handler):
            raise RegistrationError(_at(f"{event} should be a method, not {handler!r}", callback))
    if not is_inherited(callback.on_event, "on_event"):
        if events:
            raise RegistrationError(
                _at(
                    f"overrides both on_event and {next(iter(events))}; on_event handles that event too, so keep only one of them",
                    callback,
                )
            )
        return dict.fromkeys(EVENTS, callback.on_event)
    if not events:
        for name in _public_names(callback):
            if f"on_{name}" in _EVENT_NAMES and callable(getattr(callback, name)):
                raise RegistrationError(
                    _at(f"has no handlers; did you mean on_{name} instead of {name}?", callback, getattr(callback, name))
                )
    return events


def is_inherited(handler: object, name: str) -> bool:
    """Return whether a callback inherits this handler from `Callback`, whose methods are empty and need not be called."""
    return getattr(handler, "__func__", None) is getattr(Callback, name)


def resolve_options(owner: Any, handler: Callable[..., Any], label: str, given: Mapping[str, Any]) -> HandlerOptions:
    """Collect the options of `handler` from its registration, its decorators and its callback, and check them.

    An option given at registration has precedence, then that of a decorator, then that of the callback.

    Raises:
        RegistrationError: an option is unknown, or two options exclude each other; the message names the callback and its line.
    """
    options = _policy(owner, marks(handler), given, label, where(handler))
    call = getattr(handler, "__call__", handler)  # noqa: B004  # the handler may be an object with `__call__`
    bodies = [inspect.unwrap(each) for each in (handler, call)]
    if any(inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body) for body in bodies):
        raise RegistrationError(
            f"the handler is a generator, so calling it does not run its body: remove the yield (callback {label}, {where(handler)})"
        )
    awaited = any(inspect.iscoroutinefunction(body) for body in bodies)
    if awaited and options.lane == "inline":
        raise RegistrationError(
            "the handler is async, and nothing awaits it on the training thread: make it a plain function, or set `lane = 'background'` "
            f"(callback {label}, {where(handler)})"
        )
    _check_signature(handler, label)
    return options


def entries_of(callback: Callback, registration: Registration) -> list[HandlerEntry]:
    """Return the call-sheet entries of a checked callback's handlers. Raise the same errors as `handlers_of` and `resolve_options`."""
    return [_entry(event, handler, registration, callback, {}) for event, handler in handlers_of(inner(callback)).items()]


def entries_of_function(
    event: str, function: Callable[..., Any], registration: Registration, options: RegisterOptions
) -> list[HandlerEntry]:
    """Return the call-sheet entries of a function for one event, or for every event if `event` is `"*"`.

    Raises:
        UnknownEventError: no such event.
        RegistrationError: an option's value is not allowed, or the function cannot be called with the context alone.
    """
    at = f"(callback {registration.label}, {registration.source})"
    try:
        events = EVENTS if event == "*" else (as_event(event).value,)
        every = options.get("every")
        interval = every if every is None or isinstance(every, Interval) else Interval(every)
    except UnknownEventError as error:
        raise UnknownEventError(f"{error} {at}") from None
    except ValueError as error:
        raise RegistrationError(f"{error} {at}") from None
    given = {**options, "every": interval}
    entries = [_entry(each, function, registration, Callback, given) for each in events]
    if options.get("lane") == "process":
        raise RegistrationError(f"a function cannot be sent to another process; make it a method of a Callback in a module {at}")
    return entries


def _entry(
    event: str, handler: Callable[..., Any], registration: Registration, owner: Any, given: Mapping[str, Any]
) -> HandlerEntry:
    """Return the call-sheet entry of a handler. Each option comes from `given`, else from a decorator, else from the callback `owner`."""
    options = resolve_options(owner, handler, registration.label, given)
    return HandlerEntry(event, remove_gate(handler), registration, **options._asdict())


def check_unique(callback: Callback, registrations: Iterable[Registration]) -> None:
    """Raise RegistrationError if the callback was added before, or if another callback with a state has the same name."""
    for registration in registrations:
        other = registration.thing
        if other is callback:
            raise RegistrationError(
                f"{label_of(callback)} ({registration.source}) is on the call sheet already; add each instance once"
            )
        if not isinstance(other, Callback) or registration.label != label_of(callback):
            continue
        if keeps_state(callback) and keeps_state(other):
            raise RegistrationError(
                f"two callbacks would keep their state under the name {label_of(callback)!r} ({registration.source} and {where(type(callback))}); "
                "give one of them another before adding it: callback.name = '...'"
            )


def check_interval(entry: HandlerEntry, ctx: Context) -> None:
    """Raise ConfigError if the handler's interval is a fraction of the run's duration, and the run has no duration."""
    if entry.every is not None and entry.every.every.unit is TimeUnit.DURATION and ctx.state.max_duration is None:
        raise ConfigError(
            f"{entry.registration.label} ({entry.registration.source}) handles {entry.event} {entry.every}, but this run has no max_duration; "
            "use another unit"
        )


def _policy(owner: Any, own: Marks, given: Mapping[str, Any], label: str, source: str) -> HandlerOptions:
    try:
        phase = one_of("phase", given.get("phase") or own.phase or owner.phase, PHASES)
        lane = one_of("lane", given.get("lane") or owner.lane, LANES)
        ranks = check_gate(next(gate for gate in (given.get("ranks"), own.ranks, owner.ranks) if gate is not None))
        on_error = one_of(
            "on_error", given.get("on_error") or owner.on_error or ("raise" if lane == "inline" else "isolate"), ERROR_POLICIES
        )
        if owner.collective and ranks != "all":
            raise ConfigError(
                f"it calls collectives, so it must run on all ranks, not on {ranks}: limit only the writing inside it to some ranks"
            )
        if owner.collective and lane != "inline":
            raise ConfigError(f"it calls collectives, so it must run inline, not in the lane {lane!r}")
        if owner.collective and on_error == "isolate":
            raise ConfigError(
                "it calls collectives, so its errors must be raised: an error isolated on one rank would leave the others waiting"
            )
        if owner.draws_random and lane != "inline":
            raise ConfigError(
                "it draws random numbers, and a lane would draw them in the middle of training: use a generator of its own, and leave "
                "draws_random out"
            )
        if lane != "inline" and (never := [name for name in owner.snapshot_fields if name in FIELDS_NOT_IN_LANES]):
            raise ConfigError(
                f"snapshot_fields: {', '.join(never)} is not available in a lane, since training keeps changing it; read it inline, and "
                "log numbers"
            )
        if lane != "inline" and on_error == "raise":
            raise ConfigError(f"errors in the lane {lane!r} are always isolated; leave on_error out")
    except ConfigError as error:
        raise RegistrationError(f"{error} (callback {label}, {source})") from None
    return HandlerOptions(phase, ranks, lane, on_error, given.get("every") or own.every, owner.draws_random)


def _check_signature(handler: Callable[..., Any], label: str) -> None:
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # a builtin without a signature cannot be checked before the first call
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
    """Yield the names of the methods and attributes that the callback's class or instance defines.

    Properties are left out, because reading one would run its code.
    """
    base = set(dir(Callback)) - _EVENT_NAMES
    for name in dict.fromkeys([*dir(type(callback)), *vars(callback)]):
        if not name.startswith("_") and name not in base:
            static = inspect.getattr_static(callback, name, None)
            if not hasattr(type(static), "__get__") or isinstance(static, (FunctionType, staticmethod, classmethod)):
                yield name


def _at(message: str, callback: Callback, thing: object = None) -> str:
    return f"{message} (callback {label_of(callback)}, {where(thing if thing is not None else type(callback))})"
