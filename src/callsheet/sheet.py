"""The call sheet: who is called when, in which order, and how it is compiled to plain tuples of functions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from callsheet.callback import PHASES, Callback
from callsheet.distributed import RankGate, Ranks
from callsheet.errors import CallsheetError, FieldNotAvailable, mark_as_users, text_of, where
from callsheet.events import Event, as_event
from callsheet.lifecycle import EVENTS, is_available
from callsheet.randomness import random_state, restore_random_state, same_random_state
from callsheet.time import Interval, Timestamp, TimeUnit

if TYPE_CHECKING:
    from callsheet.context import Context

logger = logging.getLogger("callsheet")

Handler = Callable[["Context"], Any]

FAILURES_ALLOWED = 3
"""So many failures in a row switch an isolated callback off."""

_LAST_WORDS = frozenset({Event.RUN_END, Event.EXCEPTION})
_ALWAYS_TOLD = frozenset({"report", "restore"})


@dataclass(eq=False, slots=True)
class Registration:
    """A callback or function of the call sheet, and how it fares."""

    thing: Callback | Handler
    label: str
    source: str
    number: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    is_off: bool = False
    last_failure: str = ""
    muted: frozenset[str] = frozenset()
    """Events that it has asked not to be told in the run in progress."""

    def is_silent_at(self, event: str) -> bool:
        """It has muted the event, or was switched off; then the run's end is told to it all the same, since it may have something to close."""
        return (self.is_off and event not in _LAST_WORDS) or event in self.muted

    def switch_off(self, failures: int) -> None:
        """Told no more in this run, but its end."""
        if not self.is_off:
            self.is_off = True
            logger.error("callback %s is switched off after %d failures in a row", self.label, failures)


@dataclass(eq=False, slots=True)
class HandlerEntry:
    """One line of the call sheet: a handler of one event. `previous` is the event's last telling, as its interval counts."""

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
        """By phase, then by registration."""
        return PHASES.index(self.phase), self.number


class InTurn:
    """A handler that begins with a method of what its callback has in `common`, which is told once for all who share it.

    Args:
        owner: the callback.
        first: the name of the method.
        rest: what is the callback's own; None: nothing.
    """

    __slots__ = ("_first", "_owner", "rest")

    def __init__(self, owner: Callback, first: str, rest: Handler | None = None) -> None:
        self._owner, self._first, self.rest = owner, first, rest

    @property
    def first(self) -> Handler:
        """Equal for all who share it."""
        method: Handler = getattr(self._owner.common, self._first)
        return method

    def __call__(self, ctx: Context) -> None:
        """Both, where the callback shares with nobody."""
        self.first(ctx)
        if self.rest is not None:
            self.rest(ctx)


CompiledEvent = tuple[Handler | None, tuple[Handler, ...] | None, Event, tuple[HandlerEntry, ...]]
"""One event, compiled: the first handler, the others in order, the event, and the entries that the handlers come from. None stands for
no handler. A plain tuple, since every dispatch unpacks it; the first handler is apart, since calling one handler costs less than a loop
over one (`benchmarks/dispatch.py`)."""


class Dispatcher(Protocol):
    """What dispatches events: it knows the one that it dispatches now.

    A dispatch restores the outer event from here, not from `ctx.event`: a class with a `__getattr__`, such as `Context`, has slower attribute reads.
    """

    current: Event | None


Timed = Callable[[Handler, HandlerEntry], Handler]
"""Makes of a handler one that does the same and takes its time."""


@dataclass(frozen=True, slots=True)
class CallSheet:
    """The printable table: event x phase x callback x ranks x lane x interval, in the order in which all is told."""

    entries: tuple[HandlerEntry, ...] = field(default=())

    def rows(self) -> list[tuple[str, ...]]:
        """Event, phase, callback, ranks, lane and interval of every line, as text."""
        return [
            (entry.event, entry.phase, entry.member.label, _ranks_text(entry.ranks), entry.lane, str(entry.every or ""))
            for entry in self.entries
        ]

    def __str__(self) -> str:
        heads = ("event", "phase", "callback", "ranks", "lane", "every")
        rows = [(*row[:5], row[5].removeprefix("every ")) for row in self.rows()]
        shown = [(row[0] if i == 0 or rows[i - 1][0] != row[0] else "", *row[1:]) for i, row in enumerate(rows)]
        widths = [max(map(len, column)) for column in zip(heads, *shown, strict=True)]
        lines = (heads, *shown) if shown else (heads, ("nobody is called", "", "", "", "", ""))
        return "\n".join(" ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def compiled(
    event: str,
    entries: Iterable[HandlerEntry],
    ranks: Ranks,
    *,
    checking: bool = False,
    handed: Callable[[HandlerEntry], Handler],
    timed: Timed | None = None,
) -> CompiledEvent:
    """The functions to call for one event on this rank; `timed` wraps the handlers whose time is taken, and `handed` gives what takes
    the place of a handler that runs in a lane.
    """
    here = [
        entry
        for entry in sorted(entries, key=lambda entry: entry.order)
        if ranks.passes(entry.ranks) and not entry.member.is_silent_at(event)
    ]
    here = list(_told_once(here))
    return compile_event([_wrapped(entry, checking, handed, timed) for entry in here], as_event(event), here)


def compile_event(handlers: Sequence[Handler], event: Event, entries: Sequence[HandlerEntry]) -> CompiledEvent:
    """Return the compiled form of these handlers, each with its entry."""
    return (handlers[0] if handlers else None), tuple(handlers[1:]) or None, event, tuple(entries)


def compiled_handlers(told: CompiledEvent) -> tuple[Handler, ...]:
    """Return all handlers of a compiled event, in order."""
    first, rest, _, _ = told
    return () if first is None else (first, *(rest or ()))


def _told_once(entries: Iterable[HandlerEntry]) -> Iterator[HandlerEntry]:
    """Of handlers that begin alike, that beginning before the first of them, and of each its rest."""
    told = set()
    for entry in entries:
        handler = entry.handler
        if not isinstance(handler, InTurn) or entry.lane != "inline":
            yield entry
            continue
        if handler.first not in told:
            told.add(handler.first)
            shared = type(getattr(handler.first, "__self__", None)).__name__
            member = Registration(handler.first, shared, where(handler.first), number=-1)
            yield replace(entry, handler=handler.first, member=member, on_error="raise", ranks="all", every=None)
        if handler.rest is not None:
            yield replace(entry, handler=handler.rest)


def _wrapped(entry: HandlerEntry, checking: bool, handed: Callable[[HandlerEntry], Handler], timed: Timed | None) -> Handler:
    """The entry's handler inside what it asked for; a plain handler stays as it is and costs nothing more."""
    handler = _inline(entry, checking) if entry.lane == "inline" else handed(entry)
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
    if entry.previous is None:  # the first telling of this process
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
    """Call a handler that some ranks only call: what needs all ranks is refused meanwhile."""
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
            "let its class say `draws_random = True`, or its phase be 'change' if it means to"
        )


def isolated(handler: Handler, member: Registration, event: str, ctx: Context) -> None:
    """Call a handler whose errors are reported and do not come out; switch it off when it fails too often in a row."""
    if (member.is_off or member.muted) and member.is_silent_at(event):
        return
    try:
        handler(ctx)
    except Exception as error:
        failed(member, event, ctx, error)
    else:
        member.failures_in_a_row = 0


def failed(member: Registration, event: str, ctx: Context, error: Exception) -> None:
    """An isolated callback has raised `error`: report it, and switch it off when that was too often in a row."""
    member.failures += 1
    member.failures_in_a_row += 1
    where = f"{event}, step {ctx.step}, rank {ctx.run.rank}"
    kind, text = type(error).__name__, text_of(error)
    member.last_failure = f"{kind}: {text} (at {where})"
    logger.error(
        "callback %s (%s) failed at %s; training goes on: %s: %s",
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


def recover(told: CompiledEvent, failed: Handler | None, error: BaseException, ctx: Context) -> None:
    """`failed` raised `error`: tell who must hear the event all the same, then let the error out.

    In another framework's loop, a field that should be available at the event and is not is no error of the callback's: the host has
    guessed wrong about the loop. This handler is then left out, with a warning, and the others are called.

    Reports and restorations are always told, and at the end of a run everybody is. What these raise is logged: it must not hide the
    first error.
    """
    handlers, (_, _, event, entries) = compiled_handlers(told), told
    place = next(i for i, handler in enumerate(handlers) if handler is failed)
    member = entries[place].member
    if isinstance(error, FieldNotAvailable) and ctx.excuse is not None and error.name and is_available(error.name, event):
        ctx.excuse(f"{member.label} ({member.source}) reads ctx.{error.name} at {event}")
        _call_rest(told, place + 1, ctx)
        return
    mark_as_users(error)
    error.add_note(f"raised by callback {member.label} ({member.source}) at {event}, step {ctx.step}, rank {ctx.run.rank}")
    for handler, entry in zip(handlers[place + 1 :], entries[place + 1 :], strict=True):
        if event in _LAST_WORDS or entry.phase in _ALWAYS_TOLD:
            try:
                handler(ctx)
            except BaseException as another:
                label, source = entry.member.label, entry.member.source
                logger.error(
                    "callback %s (%s) failed as well at %s: %s", label, source, event, text_of(another), exc_info=another
                )
    raise error


def _call_rest(told: CompiledEvent, first: int, ctx: Context) -> None:
    handler = None
    try:
        for handler in compiled_handlers(told)[first:]:
            handler(ctx)
    except BaseException as error:
        assert handler is not None
        recover(told, handler, error, ctx)


def marked(told: CompiledEvent, mark: HandlerEntry) -> CompiledEvent:
    """`told` with one more handler, at its very beginning or, where a span ends, at its very end."""
    handlers, (_, _, event, entries) = compiled_handlers(told), told
    if event.endswith("_end"):
        return compile_event((*handlers, mark.handler), event, (*entries, mark))
    return compile_event((mark.handler, *handlers), event, (mark, *entries))


def all_entries(by_event: dict[str, list[HandlerEntry]]) -> CallSheet:
    """The call sheet of all ranks, in the lifecycle's order."""
    return CallSheet(tuple(entry for event in EVENTS for entry in sorted(by_event[event], key=lambda entry: entry.order)))


def _ranks_text(ranks: RankGate) -> str:
    if isinstance(ranks, str):
        return {"zero": "0", "local_zero": "local 0"}.get(ranks, ranks)
    return ",".join(map(str, sorted(ranks)))
