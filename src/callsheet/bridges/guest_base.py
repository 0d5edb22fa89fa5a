"""Guests: callbacks that were written for another framework, heard here. Each bridge has a class of its own over these two."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.errors import NotSupported, RegistrationError
from callsheet.lifecycle import EVENTS as OURS
from callsheet.registration import bridge_of
from callsheet.sheet import Handler, InTurn

logger = logging.getLogger("callsheet")


class NotOnTheList(NotSupported, AttributeError):
    """A guest asked for what its facade does not have. Also an AttributeError: so `hasattr`, which asks politely, is answered."""


class Facade:
    """What a guest is given in the place of an object of its own framework: a list of what is allowed, and `NotSupported` for the rest.

    What may be read are the attributes and properties of the class; what may be written, those in `WRITABLE` and properties that have a
    setter. `OF` says in messages what it stands for, such as `"Lightning's Trainer"`.
    """

    OF: ClassVar[str] = ""
    WRITABLE: ClassVar[frozenset[str]] = frozenset()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself asks for these, when it copies an object, say
        if name in self._allowed():  # a property of ours has raised an AttributeError
            raise NotOnTheList(f"{self.OF}: {name!r} cannot be read now, but only while the run tells what it is made of")
        raise NotOnTheList(
            f"{self.OF} has here no {name!r}: a guest may use {', '.join(sorted(self._allowed()))}; run it at home for the rest"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        own = getattr(type(self), name, None)
        if name.startswith("_") or name in self.WRITABLE or (isinstance(own, property) and own.fset is not None):
            object.__setattr__(self, name, value)
        else:
            raise NotOnTheList(f"{self.OF}: a guest may not write {name!r}, only {', '.join(sorted(self.WRITABLE)) or 'nothing'}")

    def _allowed(self) -> set[str]:
        own = {name for kind in type(self).__mro__[:-1] for name in vars(kind)} - set(vars(Facade))
        return {name for name in {*own, *self.WRITABLE, *vars(self)} if not name.startswith("_")}


class Common:
    """What the guests of a call sheet share. Its methods have the names of our events: each is told once, before the guests."""

    LISTEN_ONLY: ClassVar[frozenset[str]] = frozenset()
    """Events that it is told only where a guest has something to do there."""
    is_alone = False
    """One guest's own."""


class Guest(Callback):
    """A callback of another framework. It hears just what it overrides, so that the rest of the lifecycle costs nothing.

    A bridge's own guest says in `EVENTS` which of the foreign methods are called at each of our events, in their order, gives a handler
    for each (`handler`), and in `OWN` which methods of its own come before them. What its framework keeps for all callbacks at once is
    kept here by an object of the class `COMMON`, which the guests of a call sheet share; it is told first.

    Args:
        foreign: the callback, an instance.
        name: under which its state is kept; else that of its class.
        phase: where in each event's order it stands.
        strict: whether it is an error that it hears something which is never told here; else a warning.

    Raises:
        NotSupported: with `strict`; the message names what it hears, the callback, and callsheet as its host.
        RegistrationError: no instance of that framework's callback.
    """

    FRAMEWORK: ClassVar[str] = ""
    BASE: ClassVar[type | None] = None
    """The framework's own base class: what a foreign callback inherits from it unchanged is not heard. None: what it has is heard."""
    EVENTS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Our event, and the foreign methods that are called at it."""
    OWN: ClassVar[Mapping[str, str]] = {}
    """Our event, and the guest's own method that is called at it before those."""
    COMMON: ClassVar[type[Common] | None] = None
    """What keeps for all guests of a call sheet what their framework keeps for all callbacks; None: nothing is."""
    NEVER: ClassVar[tuple[str, ...]] = ()
    """Foreign methods that are told nowhere here."""

    transport_ignore = ("common",)

    def __init__(self, foreign: Any, *, name: str = "", phase: str = "measure", strict: bool = True) -> None:
        if self.BASE is not None and not isinstance(foreign, self.BASE):
            raise no_guest(foreign, f"an instance of {self.BASE.__module__}.{self.BASE.__qualname__}")
        self.foreign = foreign
        self.name = name or type(foreign).__name__
        self.phase = phase
        if self.COMMON is not None:
            self.common = self.COMMON()
        self._reject([theirs for theirs in self.NEVER if self.listens_to(theirs)], strict)
        for event in OURS:
            handlers = [getattr(self, self.OWN[event])] if event in self.OWN else []
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
                setattr(self, event, InTurn(self, event, handler))
            elif handler is not None:
                setattr(self, event, handler)

    def listens_to(self, theirs: str) -> bool:
        """Whether the foreign callback has something to do at one of its framework's events."""
        method = getattr(self.foreign, theirs, None)
        inherited = getattr(self.BASE, theirs, None)
        return method is not None and (inherited is None or getattr(method, "__func__", method) is not inherited)

    def handler(self, theirs: str, method: Any) -> Handler:
        """What calls `method` with what its framework gives it; `method` is None where the callback has no attribute of that name."""
        raise NotImplementedError

    def state_dict(self) -> Mapping[str, Any]:
        """The foreign callback's own."""
        state: Mapping[str, Any] = self.foreign.state_dict() if hasattr(self.foreign, "state_dict") else {}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give it back to the foreign callback."""
        if state:
            self.foreign.load_state_dict(state)

    def _reject(self, never: list[str], strict: bool) -> None:
        if never:
            reject_never(type(self.foreign).__name__, never, self.FRAMEWORK, strict)


def is_another_s(given: Any) -> bool:
    """Whether it belongs somewhere else, although it has methods of the names that are looked for: a class, one of ours, another bridge's."""
    return isinstance(given, (type, Callback)) or bool(bridge_of(given))


def no_guest(given: Any, wanted: str) -> RegistrationError:
    """The error for what was given to a `guest` in the place of `wanted`, with the mend."""
    if isinstance(given, type):
        hint = f"; that is a class, give an instance: {given.__name__}(...)"
    elif isinstance(given, (list, tuple)):
        hint = "; give them one at a time: [guest(each) for each in callbacks]"
    elif isinstance(given, Callback):
        hint = "; it is a callback of callsheet's already, and needs no guest"
    else:
        hint = bridge_of(given)
    return RegistrationError(f"{given!r} is not {wanted}{hint}")


def reject_never(listener: str, never: list[str], framework: str, strict: bool) -> None:
    """Refuse, or warn of, one who hears what is never told here."""
    message = f"{listener} hears {', '.join(never)} of {framework}, which callsheet never tells"
    if strict:
        raise NotSupported(f"{message}; leave the callback out, or pass strict=False to go on without")
    logger.warning("%s", message)


def _in_turn(handlers: tuple[Handler, ...]) -> Handler:
    def tell(ctx: Context) -> None:
        for handler in handlers:
            handler(ctx)

    return tell
