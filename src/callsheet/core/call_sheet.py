"""The call sheet: the table of all handlers by event, in the order of calls. It is compiled to tuples of functions."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from callsheet.core.background import inner
from callsheet.core.callback import PHASES, Callback, Lane, OnError, Phase
from callsheet.core.events import Event, as_event
from callsheet.core.ranks import RankGate, Ranks
from callsheet.core.time import Interval, Timestamp
from callsheet.core.wrappers import Handler, Timed, is_excused, wrap_handler
from callsheet.errors import mark_as_users, text_of

if TYPE_CHECKING:
    from callsheet.core.context import Context

logger = logging.getLogger("callsheet")

_ENDING_EVENTS = frozenset({Event.RUN_END, Event.EXCEPTION})  # events that even a disabled callback receives
_ALWAYS_CALLED_PHASES = frozenset({"report", "restore"})  # phases whose handlers are called even after another handler failed

_SHORT_LINES, _SHORT_LINE_CHARACTERS = 20, 80  # the size of `CallSheet.short()`, which fits on one screen
_MAX_LABEL_CHARACTERS, _MAX_OPTION_CHARACTERS = 26, 14


@dataclass(eq=False, slots=True)
class Registration:
    """A callback or function that was added to the manager, with its number of failures and the events for which it is muted.

    `thing` is the function or the callback, with its `Background` wrapper if there is one.
    """

    thing: Callback | Handler
    label: str
    source: str
    number: int = 0
    failures: int = 0
    failures_in_a_row: int = 0
    is_off: bool = False
    cannot_write: bool = False
    """Whether the callback was disabled because it may not write to its file or folder."""
    last_failure: str = ""
    muted: frozenset[str] = frozenset()
    """Events for which the callback is not called during the current run."""

    @property
    def callback(self) -> Callback | None:
        """The registered callback, without its `Background` wrapper; None if a function is registered."""
        return inner(self.thing) if isinstance(self.thing, Callback) else None

    @property
    def is_inline(self) -> bool:
        """Whether the callback runs on the training thread and not in another thread or process."""
        return not isinstance(self.thing, Callback) or self.thing.lane == "inline"

    def matches(self, what: object) -> bool:
        """Return whether `what` is the registered function, the registered callback (with or without `Background`), or the class of the callback."""
        if isinstance(what, type):
            return self.callback is not None and isinstance(self.callback, what)
        if isinstance(what, Callback):
            return what is self.thing or what is self.callback
        return self.thing == what  # compared by `==` and not `is`, because each read of a bound method makes a new object

    def logger_method(self, name: str) -> Callable[..., Any] | None:
        """Return the callback's method `name`, such as `log_table`; None if it is missing, or is `Logger`'s empty method."""
        method: Callable[..., Any] | None = getattr(self.callback, name, None)
        return None if getattr(method, "does_nothing", False) else method

    def reset(self) -> None:
        """Forget the failures of the previous run, and for which events the callback was muted (not called)."""
        self.failures = self.failures_in_a_row = 0
        self.is_off = self.cannot_write = False
        self.last_failure, self.muted = "", frozenset()

    def is_silent_at(self, event: str) -> bool:
        """Return whether the callback must not be called at `event`, because it was muted for this event or is disabled.

        `on_exception` and `on_run_end` are delivered even to a disabled callback, because it may have to close files or
        connections.
        """
        return (self.is_off and event not in _ENDING_EVENTS) or event in self.muted

    def switch_off(self, failures: int) -> None:
        """Disable the callback for this run. A disabled callback receives only `on_exception` and `on_run_end`."""
        if not self.is_off:
            self.is_off = True
            logger.error("Callback %s is switched off after %d failures in a row", self.label, failures)


@dataclass(eq=False, slots=True)
class HandlerEntry:
    """One row of the call sheet (the table of all handlers): a handler of one event, with its options.

    `previous` is the number of whole intervals (such as "every 100 batches") that were complete when the event was last fired.
    """

    event: str
    handler: Handler
    registration: Registration
    phase: Phase
    ranks: RankGate
    lane: Lane
    on_error: OnError
    every: Interval | None
    draws_random: bool
    previous: int | None = None
    added_at: Timestamp | None = None
    was_end: bool = False

    @property
    def order(self) -> int:
        """The sort key of this handler among the handlers of one event. Within a phase, handlers stay in the order of registration."""
        return PHASES.index(self.phase)

    def reset(self) -> None:
        """Reset the progress of the handler's interval, such as "every 100 batches", because a new run begins."""
        self.previous, self.added_at, self.was_end = None, None, False


class CompositeHandler(ABC):
    """A handler that calls several other handlers, its parts.

    When the call sheet is compiled, the parts take the place of this handler, so that each part is called directly.
    """

    @abstractmethod
    def __call__(self, ctx: Context) -> None:
        """Call the parts of this handler, in order. Used only in lanes (background threads or processes)."""

    @abstractmethod
    def parts(self, entry: HandlerEntry, earlier: Sequence[HandlerEntry]) -> Iterable[HandlerEntry]:
        """Return one call-sheet row for each function that this handler calls. These rows replace `entry`, the row of the handler itself.

        `earlier` are the entries of the handlers that are called before `entry`.
        """


Call = tuple[Handler, HandlerEntry]
"""A function to call, and the row of the call sheet to which it belongs."""

More = tuple[Handler, Handler | None, Handler | None, "More | None"]
"""Up to three handlers to call, and a tuple of the same form with the handlers after these three."""

CompiledEvent = tuple[Handler | None, Handler | None, More | None, Event, tuple[Call, ...]]
"""A compiled event: its first and second handler, its other handlers in groups of three, the event, and all calls in order.

If an event has few handlers, some or all of the first three items are None. A compiled event is a plain tuple because every
dispatch unpacks it.
Handlers are called one by one and in groups because a loop over a few elements costs more (`benchmarks/dispatch.py`).
"""


class Dispatcher(Protocol):
    """An object that fires events and knows which event is being fired now."""

    current: Event | None
    """The event that is being fired, which `ctx.event` returns; None if no event is being fired."""

    def mute(self, ctx: Context, callback: Callback, events: tuple[str, ...], is_muted: bool, until: int | None) -> None:
        """Stop calling the callback's handlers for these events, or call them again; see `Context.mute`."""


class CallSheet:
    """The table of all handlers in the order of calls, with event, phase, callback, ranks, lane (thread) and interval."""

    def __init__(self, entries: tuple[HandlerEntry, ...] = (), registrations: tuple[Registration, ...] = ()) -> None:
        self.entries = entries
        self._registrations = registrations

    def rows(self) -> list[tuple[str, ...]]:
        """Return the event, phase, callback, ranks, lane and interval of every row, as text."""
        return [
            (entry.event, entry.phase, entry.registration.label, _ranks_text(entry.ranks), entry.lane, str(entry.every or ""))
            for entry in self.entries
        ]

    def __str__(self) -> str:
        heads = ("event", "phase", "callback", "ranks", "lane", "every")
        rows = [(*row[:5], row[5].removeprefix("every ")) for row in self.rows()]
        shown = [(row[0] if i == 0 or rows[i - 1][0] != row[0] else "", *row[1:]) for i, row in enumerate(rows)]
        widths = [max(map(len, column)) for column in zip(heads, *shown, strict=True)]
        lines = (heads, *shown) if shown else (heads, ("no handlers", "", "", "", "", ""))
        return "\n".join(" ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)

    def short(self) -> str:
        """Return a summary with one line per callback, in the order in which callbacks are called, of at most 20 lines and 80 columns.

        A line has the callback's phase, ranks and lane if they are not the default, and its events with their intervals. If the
        events do not fit on the line, it has their number instead.
        """
        handled: dict[Registration, list[HandlerEntry]] = {registration: [] for registration in self._registrations}
        for entry in self.entries:
            handled.setdefault(entry.registration, []).append(entry)
        ordered = sorted(handled.items(), key=lambda pair: min((entry.order for entry in pair[1]), default=len(PHASES)))
        if not ordered:
            return "no callbacks"
        # Leave room for the first line, which has the column names, and for the last, which says how many callbacks are left out.
        shown = ordered if len(ordered) < _SHORT_LINES else ordered[: _SHORT_LINES - 2]
        rows = [(_truncate(registration.label, _MAX_LABEL_CHARACTERS), *_options(entries)) for registration, entries in shown]
        columns = [each for each in zip(("callback", "phase", "ranks", "lane"), *rows, strict=True) if any(each[1:])]
        widths = [max(map(len, column)) for column in columns]
        room = _SHORT_LINE_CHARACTERS - sum(widths) - len(widths)
        events = ["handles", *(_truncate(_describe_events(entries, room), room) for _, entries in shown)]
        lines = [
            " ".join(cell.ljust(width) for cell, width in zip((*line, last), (*widths, 0), strict=True)).rstrip()
            for line, last in zip(zip(*columns, strict=True), events, strict=True)
        ]
        if len(shown) < len(ordered):
            lines.append(f"and {len(ordered) - len(shown)} more callbacks; `callsheet show` prints all")
        return "\n".join(lines)


def internal_entry(event: str, handler: Handler, label: str, source: str) -> HandlerEntry:
    """Return a call-sheet row for a function that belongs to callsheet itself and not to a callback.

    Its phase is `report`, so that it is called even after a callback has failed.
    """
    return HandlerEntry(
        event=event,
        handler=handler,
        registration=Registration(handler, label, source),
        phase="report",
        ranks="all",
        lane="inline",
        on_error="raise",
        every=None,
        draws_random=False,
    )


def compile_entries(
    event: str,
    entries: Iterable[HandlerEntry],
    ranks: Ranks,
    *,
    checking: bool = False,
    in_lane: Callable[[HandlerEntry], Handler],
    timed: Timed | None = None,
) -> CompiledEvent:
    """Return the handlers of one event that are called on this rank, each wrapped to check its interval and other options.

    Args:
        event: the event's name.
        entries: the entries of all handlers of the event, in order.
        ranks: the ranks of this process.
        checking: whether to raise an error if a handler outside the phases `change` and `restore` draws random numbers without
            `draws_random`.
        in_lane: takes the entry of a handler that runs in a lane, and returns the function that the training thread calls
            instead.
        timed: wraps a handler to measure its time; None: handlers are not timed.
    """
    here: list[HandlerEntry] = []
    for entry in entries:
        if not ranks.passes(entry.ranks) or entry.registration.is_silent_at(event):
            continue
        if isinstance(entry.handler, CompositeHandler) and entry.lane == "inline":
            here += entry.handler.parts(entry, here)
        else:
            here.append(entry)
    return compile_event([(wrap_handler(entry, checking, in_lane, timed), entry) for entry in here], as_event(event))


def compile_event(calls: Sequence[Call], event: Event) -> CompiledEvent:
    """Pack the calls of one event into a `CompiledEvent`, the tuple that the manager reads when it fires the event."""
    handlers: list[Any] = [handler for handler, _ in calls]
    more: More | None = None
    for start in reversed(range(2, len(calls), 3)):
        third, fourth, fifth = (*handlers[start : start + 3], None, None)[:3]
        more = third, fourth, fifth, more
    first, second = (*handlers[:2], None, None)[:2]
    return first, second, more, event, tuple(calls)


def recover(compiled_event: CompiledEvent, failed: Handler, error: BaseException, ctx: Context) -> None:
    """After the handler `failed` raised `error`, call the later handlers that must always run, then raise the error again.

    These are the later handlers of phases `report` and `restore`; at `on_exception` and `on_run_end` they are all later handlers.
    Their own errors are logged, so that they do not hide the first error.

    In another framework's loop, a field that should be available but is missing is an error of the host (the adapter for that
    framework), not of the callback. The failed handler is then skipped with a warning, and all other handlers are called.
    """
    *_, event, calls = compiled_event
    place = next(i for i, (handler, _) in enumerate(calls) if handler is failed)
    registration = calls[place][1].registration
    if is_excused(registration, event, ctx, error):
        _call_rest(compiled_event, place + 1, ctx)
        return
    mark_as_users(error)
    error.add_note(
        f"raised by callback {registration.label} ({registration.source}) at {event}, step {ctx.step}, rank {ctx.run.rank}"
    )
    for handler, entry in calls[place + 1 :]:
        if event in _ENDING_EVENTS or entry.phase in _ALWAYS_CALLED_PHASES:
            try:
                handler(ctx)
            except BaseException as another:
                label, source = entry.registration.label, entry.registration.source
                logger.error(
                    "Callback %s (%s) failed as well at %s: %s", label, source, event, text_of(another), exc_info=another
                )
    raise error


def _call_rest(compiled_event: CompiledEvent, first: int, ctx: Context) -> None:
    *_, calls = compiled_event
    for handler, _ in calls[first:]:
        try:
            handler(ctx)
        except BaseException as error:
            recover(compiled_event, handler, error, ctx)
            return


def add_mark(compiled_event: CompiledEvent, mark: HandlerEntry) -> CompiledEvent:
    """Return a copy of the compiled event with one more function, `mark`, which records the time when the event is fired.

    If the event ends a span, `mark` is called after all handlers, otherwise before them.
    """
    *_, event, calls = compiled_event
    ours = (mark.handler, mark)
    return compile_event((*calls, ours) if event.endswith("_end") else (ours, *calls), event)


def _ranks_text(ranks: RankGate) -> str:
    if isinstance(ranks, str):
        return {"zero": "0", "local_zero": "local 0"}.get(ranks, ranks)
    return ",".join(map(str, sorted(ranks)))


def _options(entries: Sequence[HandlerEntry]) -> tuple[str, str, str]:
    """Return the phases, ranks and lane of a callback's handlers as text. An option that has its default is empty."""
    return (
        _option((entry.phase for entry in sorted(entries, key=lambda entry: entry.order)), Callback.phase),
        _option((_ranks_text(entry.ranks) for entry in entries), _ranks_text(Callback.ranks)),
        _option((entry.lane for entry in entries), Callback.lane),
    )


def _option(values: Iterable[str], default: str) -> str:
    distinct = list(dict.fromkeys(values))
    return "" if distinct == [default] else _truncate("/".join(distinct), _MAX_OPTION_CHARACTERS)


def _describe_events(entries: Sequence[HandlerEntry], width: int) -> str:
    """Return the names of the events that a callback handles, with intervals. If they do not fit in `width`, return their number."""
    names = ", ".join(f"{entry.event} {entry.every or ''}".rstrip() for entry in entries)
    if len(entries) < 2 or len(names) <= width:
        return names or "no events"
    number = "all events" if len(entries) == len(Event) else f"{len(entries)} events"
    intervals = Counter(str(entry.every) for entry in entries if entry.every is not None)
    if len(intervals) == 1 and intervals.total() == len(entries):
        return f"{number} {next(iter(intervals))}"
    some = ", ".join(f"{times} {interval}" for interval, times in intervals.items())
    return f"{number} ({some})" if some and len(number) + len(some) + 3 <= width else number


def _truncate(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
