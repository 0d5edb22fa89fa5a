"""The callback manager: it holds the call sheet and tells the events."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any, TypeVar, overload

from callsheet.callback import Callback, label_of, ungated
from callsheet.context import Context
from callsheet.distributed import RankGate, Ranks, read_ranks
from callsheet.errors import (
    ConfigError,
    LaneNotAvailable,
    NotACallbackError,
    RegistrationError,
    RequestRefused,
    UnknownEventError,
    where,
)
from callsheet.events import as_event
from callsheet.lifecycle import EVENTS
from callsheet.registration import check_callback, heard_by, wishes
from callsheet.sheet import CallSheet, Entry, Handler, Member, Told, all_entries, compiled, in_gate, isolated, recover
from callsheet.spans import Heard, Spans
from callsheet.time import Interval, Time, TimeUnit

logger = logging.getLogger("callsheet")

F = TypeVar("F", bound=Callable[..., Any])
Every = str | int | Time | Interval | None
_NO_TELLING: dict[str, Told] = {}


class CallbackManager:
    """Callbacks and functions, in the order in which they are told.

    `checking=True` refuses observers that draw random numbers without saying so; it reads every random state around every handler,
    so it is for tests.

    Example:
        >>> manager = CallbackManager()
        >>> @manager.register("on_train_step_end", every="10ba")
        ... def show(ctx):
        ...     print(ctx.step)
    """

    def __init__(self, callbacks: Iterable[Callback] = (), *, checking: bool = False) -> None:
        self.user_state: dict[str, Any] = {}
        self.heard = Heard()
        self._checking = checking
        self._members: list[Member] = []
        self._entries: dict[str, list[Entry]] = {event: [] for event in EVENTS}
        self._numbers = count()
        self._told = _NO_TELLING  # empty until compiled: a lookup that fails compiles
        self._ranks: Ranks | None = None
        self._spans: list[Spans] = []  # of the run in progress
        self._ctx: weakref.ref[Context] | None = None
        self.add(callbacks)

    # --- who is called ---

    @property
    def events(self) -> frozenset[str]:
        """The names of all events."""
        return frozenset(EVENTS)

    @property
    def callbacks(self) -> list[Callback]:
        """The callback objects, in the order in which they were added; functions are not among them."""
        return [member.thing for member in self._members if isinstance(member.thing, Callback)]

    def add(self, callbacks: Callback | Iterable[Callback]) -> None:
        """Add a callback, or several, all or none.

        Raises:
            NotACallbackError, UnknownEventError, RegistrationError: the message names the callback, its line and the mend.
        """
        if isinstance(callbacks, (str, bytes, Mapping)):
            raise NotACallbackError(f"{callbacks!r} is not a callback, nor an iterable of callbacks")
        several = (
            [callbacks] if isinstance(callbacks, (Callback, type)) or not isinstance(callbacks, Iterable) else list(callbacks)
        )
        lines: list[Entry] = []
        members: list[Member] = []
        for given in several:
            callback = check_callback(given)
            member = Member(callback, label_of(callback), where(type(callback)))
            self._check_unique(callback, [*self._members, *members])
            members.append(member)
            for event, handler in heard_by(callback).items():
                lines.append(self._entry(event, handler, member, callback, {}))
        self._enter(members, lines)

    @overload
    def register(
        self,
        event: str,
        function: F,
        *,
        every: Every = ...,
        phase: str = ...,
        ranks: RankGate | None = ...,
        lane: str = ...,
        on_error: str = ...,
        name: str = ...,
    ) -> F: ...
    @overload
    def register(
        self,
        event: str,
        function: None = None,
        *,
        every: Every = ...,
        phase: str = ...,
        ranks: RankGate | None = ...,
        lane: str = ...,
        on_error: str = ...,
        name: str = ...,
    ) -> Callable[[F], F]: ...
    def register(
        self,
        event: str,
        function: F | None = None,
        *,
        every: Every = None,
        phase: str = "",
        ranks: RankGate | None = None,
        lane: str = "",
        on_error: str = "",
        name: str = "",
    ) -> Any:
        """Have `function(ctx)` called at `event`, or at every event where it is `"*"`; without a function, a decorator.

        The words mean what they mean on a `Callback`; `every` is an interval such as `"100ba"`, a whole number of batches, or an `Interval`.

        Raises:
            UnknownEventError: no such event.
            RegistrationError: an unknown word, or a function that cannot be called with the context alone.
        """
        if function is None:
            if event != "*":
                as_event(event)
            return lambda given: self.register(
                event, given, every=every, phase=phase, ranks=ranks, lane=lane, on_error=on_error, name=name
            )
        if isinstance(function, (type, Callback)) or not callable(function):
            raise NotACallbackError(f"register takes a function of the context, not {function!r}; for a callback there is add()")
        label = name or getattr(function, "__qualname__", repr(function))
        try:
            events = EVENTS if event == "*" else (as_event(event).value,)
        except UnknownEventError as error:
            raise UnknownEventError(f"{error} (callback {label}, {where(function)})") from None
        interval = every if isinstance(every, Interval) or every is None else _interval(every, label, function)
        given = {"every": interval, "phase": phase, "ranks": ranks, "lane": lane, "on_error": on_error}
        if any(entry.member.thing == function for told in events for entry in self._entries[told]):
            raise RegistrationError(
                f"{label} ({where(function)}) is registered for {event} already; register each function once an event"
            )
        member = Member(function, label, where(function))
        lines = [self._entry(told, function, member, Callback, given) for told in events]
        self._enter([member], lines)
        return function

    def remove(self, what: Callback | type[Callback] | Callable[..., Any]) -> int:
        """Remove a callback, all callbacks of a class, or a function; returns how many were removed.

        Raises:
            RegistrationError: it is not here.
        """
        gone = [
            member
            for member in self._members
            if member.thing is what
            or (member.thing == what and not isinstance(what, Callback))
            or (isinstance(what, type) and isinstance(member.thing, what))
        ]
        if not gone:
            here = ", ".join(member.label for member in self._members) or "nobody"
            raise RegistrationError(f"{what!r} is not on the call sheet; here are: {here}")
        self._members = [member for member in self._members if member not in gone]
        for event, entries in self._entries.items():
            self._entries[event] = [entry for entry in entries if entry.member not in gone]
        self._changed()
        return len(gone)

    def list_callbacks(self, event: str) -> list[Callback | Handler]:
        """The callbacks and functions told at `event`, in order, of all ranks; a new list."""
        return [entry.member.thing for entry in sorted(self._entries[as_event(event)], key=lambda entry: entry.order)]

    def has_callbacks(self, event: str) -> bool:
        """Whether anybody on this rank hears `event`."""
        return bool(self._lookup(as_event(event))[0])

    def call_sheet(self) -> CallSheet:
        """The printable table of all ranks."""
        return all_entries(self._entries)

    # --- telling ---

    def fire(self, event: str, ctx: Context) -> None:
        """Tell `event` to all who hear it.

        Raises:
            UnknownEventError: no such event.
            BaseException: what a callback raised, unless it is isolated; reports and restorations have been told by then.
        """
        try:
            handlers, named, entries = self._told[event]
        except KeyError:
            handlers, named, entries = self._lookup(as_event(event))
        if handlers:
            outer = ctx.event
            ctx.event = named
            try:
                for handler in handlers:
                    handler(ctx)
            except BaseException as error:
                try:  # `handler` is unbound where Ctrl-C came before the first
                    recover((handlers, named, entries), locals().get("handler"), error, ctx)
                finally:
                    ctx.event = outer
            ctx.event = outer

    def spans(self, ctx: Context) -> Spans:
        """The spans with which a loop tells its events on `ctx`."""
        spans = Spans(ctx)
        self._spans.append(spans)
        self._compile()
        return spans

    def open(self, ctx: Context) -> None:
        """Compile the call sheet for the run that begins: its ranks are known now. `ctx` gets the manager's `user_state`.

        Raises:
            LaneNotAvailable: a callback chose a lane that nothing serves.
            ConfigError: an interval is a fraction of a duration that this run does not have.
            RequestRefused: the manager serves another run, which has not ended.
        """
        other = self._ctx() if self._ctx is not None else None
        if other is not None and other is not ctx:
            raise RequestRefused(
                f"this manager serves the run {other.run.name!r}; close that first, or give each run a manager of its own"
            )
        entries = self.call_sheet().entries
        for entry in entries:
            _check_interval(entry, ctx)
        self._ranks = ctx.run.ranks
        ctx.user_state = self.user_state
        ctx.kept = self._kept()
        self._ctx = weakref.ref(ctx)
        for member in self._members:
            member.failures = member.failures_in_a_row = 0
            member.is_off = False
        for entry in entries:
            entry.previous, entry.added_at, entry.was_end = None, None, False
        try:
            self._compile()
        except LaneNotAvailable:
            self.close()
            raise

    def tell_loggers(self, method: str, ctx: Context, /, **payload: Any) -> None:
        """Call `method(ctx, **payload)` on every callback that has it: how tables, images and files reach the loggers. Isolated."""
        ranks = self._ranks or read_ranks()
        for member in self._members:
            handler = getattr(member.thing, method, None)
            if handler is not None and isinstance(member.thing, Callback) and ranks.passes(member.thing.ranks):
                call = partial(handler, **payload)
                if member.thing.ranks != "all":
                    call = partial(in_gate, call)
                isolated(call, member, method, ctx)

    def close(self) -> None:
        """The run is over: forget its ranks and loops. May be called twice; the manager may serve another run."""
        self._spans = []
        self._ranks = self._ctx = None
        self._told = _NO_TELLING

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """The state of every callback that keeps one, by name, and `user_state`."""
        states: dict[str, dict[str, Any]] = {}
        for callback in self.callbacks:
            if state := dict(callback.state_dict()):
                if label_of(callback) in states:
                    raise RegistrationError(
                        f"two callbacks keep their state under the name {label_of(callback)!r}; give one another: callback.name = '...'"
                    )
                states[label_of(callback)] = state
        return {"callbacks": states, "user_state": dict(self.user_state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every callback its state back. One that has none there starts anew; state that nobody claims is named in a warning."""
        saved: Mapping[str, Mapping[str, Any]] = state.get("callbacks", {})
        for callback in self.callbacks:
            if label_of(callback) in saved:
                callback.load_state_dict(saved[label_of(callback)])
        if unclaimed := sorted(saved.keys() - {label_of(callback) for callback in self.callbacks}):
            logger.warning("the checkpoint holds the state of callbacks that are not here: %s", ", ".join(unclaimed))
        self.user_state.update(state.get("user_state", {}))

    # --- compiling ---

    def _entry(self, event: str, handler: Handler, member: Member, owner: Any, given: dict[str, Any]) -> Entry:
        wish = wishes(owner, handler, member.label, given)
        return Entry(
            event=event,
            handler=ungated(handler),
            member=member,
            phase=wish.phase,
            ranks=wish.ranks,
            lane=wish.lane,
            on_error=wish.on_error,
            every=wish.every,
            samples=wish.samples,
            number=next(self._numbers),
        )

    def _check_unique(self, callback: Callback, members: list[Member]) -> None:
        for member in members:
            if member.thing is callback:
                raise RegistrationError(
                    f"{label_of(callback)} ({member.source}) is on the call sheet already; add each instance once"
                )
            if (
                isinstance(member.thing, Callback)
                and member.label == label_of(callback)
                and _keeps_state(callback)
                and _keeps_state(member.thing)
            ):
                raise RegistrationError(
                    f"two callbacks would keep their state under the name {label_of(callback)!r} ({member.source} and {where(type(callback))}); "
                    "give one of them another before adding it: callback.name = '...'"
                )

    def _enter(self, members: list[Member], lines: list[Entry]) -> None:
        """All or none: what cannot be compiled for a run in progress is not added to it."""
        before = self._members, {event: list(entries) for event, entries in self._entries.items()}
        ctx = self._ctx() if self._ctx is not None else None
        for entry in lines:
            if ctx is not None:
                _check_interval(entry, ctx)
        for entry in lines:
            entry.added_at = ctx.state.timestamp if ctx is not None else None
            self._entries[entry.event].append(entry)
        self._members = [*self._members, *members]
        try:
            self._changed()
        except LaneNotAvailable:
            self._members, self._entries = before
            self._changed()
            raise
        if ctx is not None:
            ctx.kept = self._kept()

    def _kept(self) -> frozenset[str]:
        return frozenset(name for callback in self.callbacks for name in callback.keep)

    def _changed(self) -> None:
        self._told = _NO_TELLING
        if self._spans or self._ranks is not None:  # a run is in progress: it must know from the next event on
            self._compile()

    def _lookup(self, event: str) -> Told:
        if not self._told:
            self._compile()
        return self._told[event]

    def _compile(self) -> None:
        ranks = self._ranks or read_ranks()
        self._told = {event: compiled(event, entries, ranks, checking=self._checking) for event, entries in self._entries.items()}
        heard = {event: told for event, told in self._told.items() if told[0]}
        self.heard.link(heard.get)
        for spans in self._spans:
            spans.link(heard.get)


def normalize_callbacks(callbacks: CallbackManager | Callback | Iterable[Callback] | None) -> CallbackManager | None:
    """A manager of `callbacks`: itself, a new one of any iterable, or None for None.

    Raises:
        NotACallbackError, UnknownEventError, RegistrationError: as `CallbackManager.add`.
    """
    if callbacks is None or isinstance(callbacks, CallbackManager):
        return callbacks
    manager = CallbackManager()
    manager.add(callbacks)
    return manager


def should_fire(manager: CallbackManager | None, event: str) -> bool:
    """Whether there is a manager, and somebody hears `event`; UnknownEventError for what is none."""
    return manager is not None and manager.has_callbacks(event)


def _interval(every: str | int | Time, label: str, function: Callable[..., Any]) -> Interval:
    try:
        return Interval(every, default=TimeUnit.BATCH)
    except ValueError as error:
        raise RegistrationError(f"{error} (callback {label}, {where(function)})") from None


def _check_interval(entry: Entry, ctx: Context) -> None:
    if entry.every is not None and entry.every.every.unit is TimeUnit.DURATION and ctx.state.max_duration is None:
        raise ConfigError(
            f"{entry.member.label} ({entry.member.source}) wants {entry.event} {entry.every}, and this run has no max_duration; "
            "give it another unit"
        )


def _keeps_state(callback: Callback) -> bool:
    return type(callback).state_dict is not Callback.state_dict
