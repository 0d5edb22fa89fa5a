"""Base classes for guests: callbacks of another framework that run in callsheet's loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from callsheet.bridges import guest_hint
from callsheet.bridges.versions import check_version
from callsheet.core.call_sheet import CompositeHandler, HandlerEntry, Registration
from callsheet.core.callback import Callback, Phase
from callsheet.core.context import Context
from callsheet.core.lifecycle import EVENTS as OURS
from callsheet.core.wrappers import Handler
from callsheet.errors import NotSupported, RegistrationError, where

logger = logging.getLogger("callsheet")


class NotOnTheList(NotSupported, AttributeError):
    """Raised if another framework's callback uses an unsupported attribute. It is an AttributeError, so `hasattr` returns False."""


class Facade:
    """Takes the place of an object of another framework, such as its Trainer, when callsheet calls a callback of that framework.

    A facade has a list of allowed attributes, and raises `NotSupported` for all others.

    A guest may read the attributes and properties of the class. It may write those in `WRITABLE`, and properties with a setter.
    `REPLACED_OBJECT` is the name of the replaced object in messages, such as `"Lightning's Trainer"`.
    """

    REPLACED_OBJECT: ClassVar[str] = ""
    WRITABLE: ClassVar[frozenset[str]] = frozenset()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # no hint, since Python itself reads such names, for example when it copies an object
        # For a name in `_allowed_names()`, Python calls `__getattr__` only if the property with this name has raised an AttributeError.
        if name in self._allowed_names():
            raise NotOnTheList(
                f"{self.REPLACED_OBJECT}: {name!r} cannot be read now, only while an event that provides it is fired"
            )
        raise NotOnTheList(
            f"{self.REPLACED_OBJECT} has here no {name!r}: a guest may use {', '.join(sorted(self._allowed_names()))}; for the rest, run the callback in "
            "its own framework"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        own = getattr(type(self), name, None)
        if name.startswith("_") or name in self.WRITABLE or (isinstance(own, property) and own.fset is not None):
            object.__setattr__(self, name, value)
        else:
            raise NotOnTheList(
                f"{self.REPLACED_OBJECT}: a guest may not write {name!r}, only {', '.join(sorted(self.WRITABLE)) or 'nothing'}"
            )

    def _allowed_names(self) -> set[str]:
        own = {name for kind in type(self).__mro__[:-1] for name in vars(kind)} - set(vars(Facade))
        return {name for name in {*own, *self.WRITABLE, *vars(self)} if not name.startswith("_")}


class Common:
    """State that all guests (callbacks of another framework) of a run share, such as Composer's `State`.

    The methods of a subclass are named after callsheet's events. Each method is called once per event, before the guests are called.
    """

    LISTEN_ONLY: ClassVar[frozenset[str]] = frozenset()
    """Events whose method in this class is called only if a guest listens to the event."""
    is_alone = False
    """Whether each guest has a `Common` object of its own, instead of sharing one with the other guests."""


class SharedFirst(CompositeHandler):
    """A handler for a guest that shares state with other guests: it calls a method of this state, then the guest's own handler.

    If several guests share a `common`, its method is called only once at an event, before the first of these guests.

    Args:
        guest: the guest.
        event: the event, and the name of the method.
        rest: the guest's own handler, or None if it has none.
    """

    def __init__(self, guest: Guest, event: str, rest: Handler | None) -> None:
        self._guest, self._event, self._rest = guest, event, rest

    @property
    def first(self) -> Handler:
        """The method of the shared state (`common`) that is called at this event.

        The method is looked up each time, because `common` can change when the guest is added to a call sheet.
        """
        method: Handler = getattr(self._guest.common, self._event)
        return method

    def __call__(self, ctx: Context) -> None:
        """Call the method `first` of the state that several guests share, then the guest's own handler."""
        self.first(ctx)
        if self._rest is not None:
            self._rest(ctx)

    def parts(self, entry: HandlerEntry, earlier: Sequence[HandlerEntry]) -> Iterator[HandlerEntry]:
        """Yield the rows that show this handler in the call sheet, which are made from its row `entry`.

        The first row is for the method `first`, which several guests share. It is left out if one of the rows in `earlier`, which the
        handlers before this one have, is for the same method. The second row is for the guest's own handler.
        """
        first = self.first
        if all(each.handler != first for each in earlier):
            registration = Registration(first, type(self._guest.common).__name__, where(first), number=-1)
            yield replace(entry, handler=first, registration=registration, on_error="raise", ranks="all", every=None)
        if self._rest is not None:
            yield replace(entry, handler=self._rest)


class Guest(Callback):
    """Runs a callback of another framework in callsheet's loop, by calling the methods that the callback overrides.

    Each bridge has a subclass. `EVENTS` lists the methods of the foreign callback that are called at each event of callsheet, in
    order, and `handler` makes the handler of each. `OWN_HANDLERS` lists methods of the guest itself that are called before these.
    If the framework keeps state for all its callbacks together, this state is in an object of class `COMMON`, which all guests of a
    call sheet share. The methods of that object are called first.

    Args:
        foreign: the callback, an instance.
        name: the key of the guest's state in checkpoints. Empty: the name of the callback's class.
        phase: the guest's place in the order of each event.
        strict: whether to raise an error if the foreign callback listens to an event that callsheet never fires; otherwise a
            warning is logged.

    Raises:
        NotSupported: with `strict`; the message names the event, the callback and its framework.
        RegistrationError: `foreign` is not an instance of that framework's callback.
    """

    FRAMEWORK: ClassVar[str] = ""
    PACKAGE: ClassVar[str] = ""
    """The framework's package in `versions.TESTED`, or an empty string if the framework's version is not checked."""
    INTERNALS: ClassVar[Sequence[str]] = ()
    """The parts of the framework that the guest needs and that are not public API, as dotted names."""
    BASE: ClassVar[type | None] = None
    """The framework's base class of callbacks. Methods that a callback inherits unchanged are not called. None: all methods are called."""
    EVENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """For each event of callsheet, the methods of the foreign callback that are called when the event is fired."""
    OWN_HANDLERS: ClassVar[Mapping[str, str]] = {}
    """For each event of callsheet, the guest's own method that is called before the methods of the foreign callback."""
    COMMON: ClassVar[type[Common] | None] = None
    """The class of the state that all guests of a call sheet share, or None."""
    NEVER_CALLED: ClassVar[tuple[str, ...]] = ()
    """Methods of the foreign callback that callsheet never calls."""

    common: Any = None
    """The state of class `COMMON` that this guest shares with the run's other guests of the same framework."""
    transport_ignore = ("common",)

    def __init__(self, foreign: Any, *, name: str = "", phase: Phase = "measure", strict: bool = True) -> None:
        if self.PACKAGE:
            check_version(self.PACKAGE, self.INTERNALS, needed_by=f"a guest of {self.FRAMEWORK}")
        if self.BASE is not None and not isinstance(foreign, self.BASE):
            raise no_guest(foreign, f"an instance of {self.BASE.__module__}.{self.BASE.__qualname__}")
        self.foreign = foreign
        self.name = name or type(foreign).__name__
        self.phase = phase
        if self.COMMON is not None:
            self.common = self.COMMON()
        self._reject([theirs for theirs in self.NEVER_CALLED if self.listens_to(theirs)], strict)
        for event in OURS:
            handlers = [getattr(self, self.OWN_HANDLERS[event])] if event in self.OWN_HANDLERS else []
            handlers += [
                self.handler(theirs, getattr(foreign, theirs, None))
                for theirs in self.EVENTS.get(event, ())
                if self.listens_to(theirs)
            ]
            handler = _in_turn(tuple(handlers)) if len(handlers) > 1 else next(iter(handlers), None)
            if (
                self.COMMON is not None
                and hasattr(self.COMMON, event)
                and (handler is not None or event not in self.COMMON.LISTEN_ONLY)
            ):
                setattr(self, event, SharedFirst(self, event, handler))
            elif handler is not None:
                setattr(self, event, handler)

    def listens_to(self, theirs: str) -> bool:
        """Return whether the foreign callback overrides the method `theirs` of its framework's base class."""
        method = getattr(self.foreign, theirs, None)
        inherited = getattr(self.BASE, theirs, None)
        return method is not None and (inherited is None or getattr(method, "__func__", method) is not inherited)

    def handler(self, theirs: str, method: Any) -> Handler:
        """Return a handler that calls the foreign callback's `method` with the arguments that the other framework would pass.

        `method` is None if the callback has no method `theirs`.
        """
        raise NotImplementedError

    def share_with(self, others: Sequence[Callback]) -> None:
        """If `others` contains an earlier guest of the same framework, use its shared state. Otherwise, create a new state."""
        if self.common is None or self.common.is_alone:
            return
        guests = (other for other in others if isinstance(other, Guest) and other.lane == "inline")
        kind = type(self.common)
        self.common = (
            next((each.common for each in guests if type(each.common) is kind and not each.common.is_alone), None) or kind()
        )

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the other framework's callback, or an empty state if this callback has no `state_dict`."""
        state: Mapping[str, Any] = self.foreign.state_dict() if hasattr(self.foreign, "state_dict") else {}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state into the other framework's callback."""
        if state:
            self.foreign.load_state_dict(state)

    def _reject(self, never: list[str], strict: bool) -> None:
        if never:
            reject_never(type(self.foreign).__name__, never, self.FRAMEWORK, strict)


def is_another_s(given: Any) -> bool:
    """Return whether `given` cannot be a callback of the bridge's framework, because it is a class or another framework's callback.

    Bridges that accept any object with methods of certain names call this function.
    """
    return isinstance(given, (type, Callback)) or bool(guest_hint(given))


def no_guest(given: Any, wanted: str) -> RegistrationError:
    """Return the error to raise if `given` cannot be wrapped as a guest. `wanted` describes what can be wrapped."""
    if isinstance(given, type):
        hint = f"; that is a class, give an instance: {given.__name__}(...)"
    elif isinstance(given, (list, tuple)):
        hint = "; give them one at a time: [guest(each) for each in callbacks]"
    elif isinstance(given, Callback):
        hint = "; it is already a callback of callsheet, and needs no guest"
    else:
        hint = guest_hint(given)
    return RegistrationError(f"{given!r} is not {wanted}{hint}")


def reject_never(listener: str, never: list[str], framework: str, strict: bool) -> None:
    """Raise NotSupported if `strict`, else log a warning: `listener` listens to events that callsheet never fires."""
    message = f"{listener} listens to {', '.join(never)} of {framework}, which callsheet does not fire"
    if strict:
        raise NotSupported(f"{message}; leave the callback out, or pass strict=False to use it without")
    logger.warning("%s", message)


def _in_turn(handlers: tuple[Handler, ...]) -> Handler:
    def call_all(ctx: Context) -> None:
        for handler in handlers:
            handler(ctx)

    return call_all
