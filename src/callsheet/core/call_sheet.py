"""The call sheet: which handlers each event has, in which order, and how they are compiled to tuples of functions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from callsheet.core.callback import PHASES, Callback
from callsheet.core.events import Event, as_event
from callsheet.core.lifecycle import EVENTS, is_available
from callsheet.core.randomness import random_state, restore_random_state, same_random_state
from callsheet.core.ranks import RankGate, Ranks
from callsheet.core.time import Interval, Timestamp, TimeUnit
from callsheet.errors import CallsheetError, FieldNotAvailable, mark_as_users, text_of, where

if TYPE_CHECKING:
    from callsheet.core.context import Context

logger = logging.getLogger("callsheet")

Handler = Callable[["Context"], Any]

FAILURES_ALLOWED = 3
"""How many failures in a row switch an isolated callback off."""

_ENDING_EVENTS = frozenset({Event.RUN_END, Event.EXCEPTION})  # fired for a callback even after it was switched off
_ALWAYS_CALLED = frozenset({"report", "restore"})  # phases whose handlers are called even after another handler failed


@dataclass(eq=False, slots=True)
class Registration:
    """A callback or function on the call sheet, with its failures and muted events."""

    thing: Callback | Handler
    label: str
    source: str
    number: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    is_off: bool = False
    last_failure: str = ""
    muted: frozenset[str] = frozenset()
    """Events for which it is not called in the run in progress."""

    def is_silent_at(self, event: str) -> bool:
        """Return whether the event is muted or the callback is switched off.

        `on_exception` and `on_run_end` are fired even for a callback that is switched off, since it may have something to close.
        """
        return (self.is_off and event not in _ENDING_EVENTS) or event in self.muted

    def switch_off(self, failures: int) -> None:
        """Disable the callback for this run; only `on_exception` and `on_run_end` still fire."""
        if not self.is_off:
            self.is_off = True
            logger.error("Callback %s is switched off after %d failures in a row", self.label, failures)


@dataclass(eq=False, slots=True)
class HandlerEntry:
    """One line of the call sheet: a handler of one event.

    `previous` is how many whole intervals were complete when the event was last fired.
    """

    event: str
    handler: Handler
    member: Registration
    phase: str
    ranks: RankGate
    lane: str
    on_error: str
    every: Interval | None
    draws_random: bool
    number: int
    previous: int | None = None
    added_at: Timestamp | None = None
    was_end: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """The sort key within an event: phase, then registration."""
        return PHASES.index(self.phase), self.number


class InTurn:
    """Runs a setup step that several handlers share, once per event, before the first of them.

    Args:
        owner: the callback; its `common` object is shared.
        first: the name of the method of `common` that is the setup step.
        rest: the callback's own handler, called after it; None if it has none.
    """

    __slots__ = ("_first", "_owner", "rest")

    def __init__(self, owner: Callback, first: str, rest: Handler | None = None) -> None:
        self._owner, self._first, self.rest = owner, first, rest

    @property
    def first(self) -> Handler:
        """The shared setup step; equal for all callbacks that share it."""
        method: Handler = getattr(self._owner.common, self._first)
        return method

    def __call__(self, ctx: Context) -> None:
        """Call both, for a callback that shares with no other."""
        self.first(ctx)
        if self.rest is not None:
            self.rest(ctx)


CompiledEvent = tuple[Handler | None, tuple[Handler, ...] | None, Event, tuple[HandlerEntry, ...]]
"""One event, compiled: the first handler, the others in order, the event, and the entries that the handlers come from. None means no
handler. It is a plain tuple, since every dispatch unpacks it. The first handler is separate, since calling one handler costs less than a
loop over one (`benchmarks/dispatch.py`)."""


class Dispatcher(Protocol):
    """Something that dispatches events and knows the one that it dispatches now.

    A dispatch restores the outer event from here, not from `ctx.event`: reading an attribute is slower in a class with a `__getattr__`, such
    as `Context`.
    """

    current: Event | None


Timed = Callable[[Handler, HandlerEntry], Handler]
"""Wraps a handler in one that measures its time."""


@dataclass(frozen=True, slots=True)
class CallSheet:
    """The printable table of all handlers: event, phase, callback, ranks, lane and interval, in the order in which they are called."""

    entries: tuple[HandlerEntry, ...] = field(default=())

    def rows(self) -> list[tuple[str, ...]]:
        """Return event, phase, callback, ranks, lane and interval of every line, as text."""
        return [
            (entry.event, entry.phase, entry.member.label, _ranks_text(entry.ranks), entry.lane, str(entry.every or ""))
            for entry in self.entries
        ]

    def __str__(self) -> str:
        heads = ("event", "phase", "callback", "ranks", "lane", "every")
        rows = [(*row[:5], row[5].removeprefix("every ")) for row in self.rows()]
        shown = [(row[0] if i == 0 or rows[i - 1][0] != row[0] else "", *row[1:]) for i, row in enumerate(rows)]
        widths = [max(map(len, column)) for column in zip(heads, *shown, strict=True)]
        lines = (heads, *shown) if shown else (heads, ("no handlers", "", "", "", "", ""))
        return "\n".join(" ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def internal_entry(event: str, handler: Handler, label: str, source: str) -> HandlerEntry:
    """Return an entry for a handler of ours. It has phase `report`, so that it is called even after a callback has failed."""
    return HandlerEntry(
        event=event,
        handler=handler,
        member=Registration(handler, label, source),
        phase="report",
        ranks="all",
        lane="inline",
        on_error="raise",
        every=None,
        draws_random=False,
        number=-1,
    )


def compiled(
    event: str,
    entries: Iterable[HandlerEntry],
    ranks: Ranks,
    *,
    checking: bool = False,
    in_lane: Callable[[HandlerEntry], Handler],
    timed: Timed | None = None,
) -> CompiledEvent:
    """Return the functions to call for one event on this rank.

    Args:
        event: its name.
        entries: all of its handlers.
        ranks: of this process.
        checking: whether observers that draw random numbers raise.
        in_lane: returns what the training thread calls in place of a handler that runs in a lane.
        timed: wraps handlers to measure their time; None: they are not timed.
    """
    here = [
        entry
        for entry in sorted(entries, key=lambda entry: entry.order)
        if ranks.passes(entry.ranks) and not entry.member.is_silent_at(event)
    ]
    here = list(_with_shared_steps(here))
    return compile_event([_wrapped(entry, checking, in_lane, timed) for entry in here], as_event(event), here)


def compile_event(handlers: Sequence[Handler], event: Event, entries: Sequence[HandlerEntry]) -> CompiledEvent:
    """Return the compiled form of these handlers, each with its entry."""
    return (handlers[0] if handlers else None), tuple(handlers[1:]) or None, event, tuple(entries)


def compiled_handlers(event: CompiledEvent) -> tuple[Handler, ...]:
    """Return all handlers of a compiled event, in order."""
    first, rest, _, _ = event
    return () if first is None else (first, *(rest or ()))


def _with_shared_steps(entries: Iterable[HandlerEntry]) -> Iterator[HandlerEntry]:
    """Yield the entries; handlers that share a setup step become that step, once, and what is their own."""
    seen = set()
    for entry in entries:
        handler = entry.handler
        if not isinstance(handler, InTurn) or entry.lane != "inline":
            yield entry
            continue
        if handler.first not in seen:
            seen.add(handler.first)
            shared = type(getattr(handler.first, "__self__", None)).__name__
            member = Registration(handler.first, shared, where(handler.first), number=-1)
            yield replace(entry, handler=handler.first, member=member, on_error="raise", ranks="all", every=None)
        if handler.rest is not None:
            yield replace(entry, handler=handler.rest)


def _wrapped(entry: HandlerEntry, checking: bool, in_lane: Callable[[HandlerEntry], Handler], timed: Timed | None) -> Handler:
    """Return the entry's handler, wrapped for the options that it has; a plain handler is not wrapped and costs nothing more."""
    handler = _inline(entry, checking) if entry.lane == "inline" else in_lane(entry)
    if timed is not None:
        handler = timed(handler, entry)
    if entry.every is not None:
        handler = partial(_when_due, handler, entry, entry.every)
    return handler


def _inline(entry: HandlerEntry, checking: bool) -> Handler:
    handler = entry.handler
    if entry.draws_random:
        handler = partial(_keeping_randomness, handler)
    if entry.ranks != "all":
        handler = partial(in_gate, handler)
    if entry.on_error == "isolate":
        handler = partial(isolated, handler, entry.member, entry.event)
    if checking and not entry.draws_random and entry.phase not in ("change", "restore"):
        handler = partial(_checking_randomness, handler, entry)
    return handler


def _when_due(handler: Handler, entry: HandlerEntry, every: Interval, ctx: Context) -> None:
    state = ctx.state
    elapsed = state.elapsed if every.at_end or every.every.unit is TimeUnit.DURATION else None
    now = every.index(state.timestamp, elapsed)
    if entry.previous is None:  # the first time in this process
        entry.previous = _first_index(every, entry.added_at or state.baseline, ctx)
    is_end = every.at_end and state.is_complete
    due = now > entry.previous or (is_end and not entry.was_end)
    entry.previous, entry.was_end = now, is_end
    if due:
        handler(ctx)


def _first_index(every: Interval, since: Timestamp, ctx: Context) -> int:
    state = ctx.state
    elapsed = None
    if every.every.unit is TimeUnit.DURATION and state.max_duration is not None:
        elapsed = since.count(state.max_duration.unit) / state.max_duration.value
    return every.index(since, elapsed)


def in_gate(handler: Handler, ctx: Context) -> None:
    """Call a handler that runs on some ranks only; inside it, requests and collectives that need all ranks are rejected."""
    outer, ctx.control.in_gate = ctx.control.in_gate, True
    try:
        handler(ctx)
    finally:
        ctx.control.in_gate = outer


def _keeping_randomness(handler: Handler, ctx: Context) -> None:
    before = random_state()
    try:
        handler(ctx)
    finally:
        restore_random_state(before)


def _checking_randomness(handler: Handler, entry: HandlerEntry, ctx: Context) -> None:
    before = random_state()
    handler(ctx)
    if not same_random_state(before, random_state()):
        restore_random_state(before)
        raise CallsheetError(
            f"{entry.member.label} ({entry.member.source}) drew random numbers at {entry.event}, which changes training; "
            "set `draws_random = True` in its class, or use phase 'change' if it should change training"
        )


def isolated(handler: Handler, member: Registration, event: str, ctx: Context) -> None:
    """Call a handler and log its errors instead of raising them; switch it off after too many failures in a row."""
    if (member.is_off or member.muted) and member.is_silent_at(event):
        return
    try:
        handler(ctx)
    except Exception as error:
        failed(member, event, ctx, error)
    else:
        member.failures_in_a_row = 0


def failed(member: Registration, event: str, ctx: Context, error: Exception) -> None:
    """Log the error that an isolated callback raised, and switch it off after too many failures in a row."""
    member.failures += 1
    member.failures_in_a_row += 1
    where = f"{event}, step {ctx.step}, rank {ctx.run.rank}"
    kind, text = type(error).__name__, text_of(error)
    member.last_failure = f"{kind}: {text} (at {where})"
    logger.error(
        "Callback %s (%s) failed at %s; training continues: %s: %s",
        member.label,
        member.source,
        where,
        kind,
        text,
        exc_info=error,
    )
    if member.failures_in_a_row == FAILURES_ALLOWED:
        if ctx.control.is_shared:
            ctx.control.switch_off(member.label, member.number, member.failures_in_a_row)  # on all ranks together
        else:
            member.switch_off(member.failures_in_a_row)


def recover(compiled_event: CompiledEvent, failed: Handler | None, error: BaseException, ctx: Context) -> None:
    """Call the remaining handlers that must run although `failed` raised `error`, then raise the error.

    These are the handlers of phases `report` and `restore`; at `on_exception` and `on_run_end` they are all handlers. What they raise is
    logged, so that it does not hide the first error.

    In another framework's loop, a field that should be available at the event and is not is an error of the host, which misjudged the
    loop, not of the callback. This handler is then skipped with a warning, and the others are called.
    """
    handlers, (_, _, event, entries) = compiled_handlers(compiled_event), compiled_event
    place = next(i for i, handler in enumerate(handlers) if handler is failed)
    member = entries[place].member
    if isinstance(error, FieldNotAvailable) and ctx.excuse is not None and error.name and is_available(error.name, event):
        ctx.excuse(f"{member.label} ({member.source}) reads ctx.{error.name} at {event}")
        _call_rest(compiled_event, place + 1, ctx)
        return
    mark_as_users(error)
    error.add_note(f"raised by callback {member.label} ({member.source}) at {event}, step {ctx.step}, rank {ctx.run.rank}")
    for handler, entry in zip(handlers[place + 1 :], entries[place + 1 :], strict=True):
        if event in _ENDING_EVENTS or entry.phase in _ALWAYS_CALLED:
            try:
                handler(ctx)
            except BaseException as another:
                label, source = entry.member.label, entry.member.source
                logger.error(
                    "Callback %s (%s) failed as well at %s: %s", label, source, event, text_of(another), exc_info=another
                )
    raise error


def _call_rest(compiled_event: CompiledEvent, first: int, ctx: Context) -> None:
    handler = None
    try:
        for handler in compiled_handlers(compiled_event)[first:]:
            handler(ctx)
    except BaseException as error:
        assert handler is not None
        recover(compiled_event, handler, error, ctx)


def marked(compiled_event: CompiledEvent, mark: HandlerEntry) -> CompiledEvent:
    """Return the event with one more handler: the first of all, or the last of all at the end of a span."""
    handlers, (_, _, event, entries) = compiled_handlers(compiled_event), compiled_event
    if event.endswith("_end"):
        return compile_event((*handlers, mark.handler), event, (*entries, mark))
    return compile_event((mark.handler, *handlers), event, (mark, *entries))


def all_entries(by_event: dict[str, list[HandlerEntry]]) -> CallSheet:
    """Return the call sheet of all ranks, in the lifecycle's order."""
    return CallSheet(tuple(entry for event in EVENTS for entry in sorted(by_event[event], key=lambda entry: entry.order)))


def _ranks_text(ranks: RankGate) -> str:
    if isinstance(ranks, str):
        return {"zero": "0", "local_zero": "local 0"}.get(ranks, ranks)
    return ",".join(map(str, sorted(ranks)))
