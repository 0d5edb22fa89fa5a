"""The dispatch table: for each event, the functions to call on this rank, compiled from the table of all handlers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from callsheet.core.call_sheet import (
    CompiledEvent,
    Dispatcher,
    HandlerEntry,
    Registration,
    add_mark,
    compile_entries,
    internal_entry,
)
from callsheet.core.context import Context
from callsheet.core.costs import Costs
from callsheet.core.events import Event
from callsheet.core.lifecycle import EVENTS, POINTS
from callsheet.core.ranks import Ranks, read_ranks
from callsheet.core.spans import HasListeners, Spans
from callsheet.core.wrappers import Handler

if TYPE_CHECKING:
    from callsheet.lanes.lane_set import LaneSet


class DispatchTable:
    """The callbacks, the table entries of their handlers (the call sheet), and the functions that are compiled from the entries.

    There are two compiled tables: the plain one, and one of timed handlers, which is used inside a timing window.

    Args:
        costs: says which handlers are timed, and whether a timing window is open.
        checking: raise if a handler outside the phases `change` and `restore` draws random numbers without `draws_random`.
    """

    def __init__(self, costs: Costs, *, checking: bool) -> None:
        self.costs = costs
        self.registrations: list[Registration] = []
        """The callbacks and functions, in the order in which they were added. Each change creates a new list."""
        self.entries: dict[str, list[HandlerEntry]] = {event: [] for event in EVENTS}
        """The handlers of each event, in the order of calls."""
        self.has_listeners = HasListeners()
        self.active: dict[str, CompiledEvent] = {}
        """The table that is read when an event is fired: a copy of the plain table or, inside a timing window, of the timed table.

        The table is changed in place. An event that is missing in it is compiled when it is first fired.
        """
        self.ranks: Ranks | None = None
        """The rank and world size of this process in the current run."""
        self.lanes: LaneSet | None = None
        """The lanes of the callbacks, or None as long as no callback has a lane."""
        self._checking = checking
        self._plain: dict[str, CompiledEvent] = {}
        self._timed: dict[str, CompiledEvent] = {}
        self._spans: list[Spans] = []

    def add(self, registrations: Sequence[Registration], entries: Sequence[HandlerEntry]) -> None:
        """Add callbacks and their handlers, and recompile the functions to call for each event."""
        self.registrations = [*self.registrations, *registrations]
        for entry in entries:
            self.entries[entry.event].append(entry)
        for handlers in self.entries.values():
            handlers.sort(key=lambda entry: entry.order)
        if not all(each.is_inline for each in registrations) or any(entry.lane != "inline" for entry in entries):
            self.lane_set()
        self.recompile()

    def lane_set(self) -> LaneSet:
        """Return the callbacks' lanes (threads and processes). The first call creates the `LaneSet`, and imports its module."""
        if self.lanes is None:
            from callsheet.lanes.lane_set import LaneSet

            self.lanes = LaneSet(lambda registration: registration in self.registrations)
        return self.lanes

    def remove(self, registrations: list[Registration]) -> None:
        """Remove callbacks and their handlers, and recompile the functions to call for each event."""
        self.registrations = [each for each in self.registrations if each not in registrations]
        for event, entries in self.entries.items():
            self.entries[event] = [entry for entry in entries if entry.registration not in registrations]
        self.recompile()

    def spans(self, ctx: Context, dispatcher: Dispatcher) -> Spans:
        """Return the spans of a loop: context managers that fire the spans' events by calling this table's handlers with `ctx`."""
        spans = Spans(ctx, dispatcher)
        self._spans.append(spans)
        self.compile()
        return spans

    def open(self, ranks: Ranks) -> None:
        """Prepare for a run: reset the callbacks' failures, muted events and intervals, and compile the functions for each event."""
        self.ranks = ranks
        for registration in self.registrations:
            registration.reset()
        for entry in chain.from_iterable(self.entries.values()):
            entry.reset()
        self.compile()

    def close(self) -> None:
        """Delete the ranks, the spans and the compiled events of the run that has ended."""
        self._spans = []
        self.ranks = None
        self._forget()

    def lookup(self, event: str) -> CompiledEvent:
        """Return the functions to call for an event on this rank, as one tuple. May also be called outside a run."""
        if not self.active:
            self.compile()
        return self.active[event]

    def has_handlers(self, event: str) -> bool:
        """Return whether the event has a handler on this rank."""
        self.lookup(event)
        return self._plain[event][0] is not None

    def recompile(self, *events: str) -> None:
        """Compile the table again for these events, whose handlers have changed. Without arguments, compile it for all events."""
        is_running = bool(self._spans) or self.ranks is not None
        is_compiled = is_running and bool(events) and bool(self._plain)
        if not is_compiled:
            self._forget()
        if is_running:  # compile now, so that the change takes effect at the next event
            self.compile(events if is_compiled else EVENTS)

    def compile(self, events: Collection[str] = EVENTS) -> None:
        """Compile the functions to call for these events, from the events' handlers and the handlers' options."""
        self._plain = self._table(self._plain, events, in_window=False)
        self._timed = {event: made for event, made in self._timed.items() if event not in events}
        self.has_listeners.link(self._plain, events)
        self.use_window(events)

    def use_window(self, events: Iterable[str] = EVENTS) -> None:
        """Switch to timed handlers if a timing window is open (steps are being timed), otherwise to handlers without timing."""
        if self.costs.is_window and len(self._timed) < len(EVENTS):
            self._timed = self._table(self._timed, [each for each in EVENTS if each not in self._timed], in_window=True)
        self.active.update(self._timed if self.costs.is_window else self._plain)
        for spans in self._spans:
            spans.link(self.active, events)

    def _forget(self) -> None:
        self.active.clear()
        self._plain, self._timed = {}, {}

    def _table(self, table: Mapping[str, CompiledEvent], events: Iterable[str], *, in_window: bool) -> dict[str, CompiledEvent]:
        """Return a copy of `table` in which the functions for these events are compiled again from the current handlers."""
        ranks = self.ranks or read_ranks()
        table = dict(table)
        for event in events:
            timed = self.costs.time_calls if self.costs.wraps(event, in_window=in_window) else None
            made = compile_entries(
                event, self.entries[event], ranks, checking=self._checking, timed=timed, in_lane=self._enqueuer
            )
            if event == Event.RUN_END and self.lanes is not None:
                made = self.lanes.with_drain(made)
            table[event] = add_mark(made, self._mark(event)) if in_window and event not in POINTS else made
        return table

    def _enqueuer(self, entry: HandlerEntry) -> Handler:
        return self.lane_set().enqueuer(entry)

    def _mark(self, event: str) -> HandlerEntry:
        return internal_entry(event, self.costs.mark, "the clock of costs", "costs.py")
