"""The callback manager: it holds the call sheet and fires the events."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from math import inf
from typing import Any, TypeVar, overload

from callsheet.core.background import Background, inner
from callsheet.core.call_sheet import (
    FAILURES_ALLOWED,
    CallSheet,
    CompiledEvent,
    Handler,
    HandlerEntry,
    Registration,
    all_entries,
    compile_event,
    compiled,
    compiled_handlers,
    in_gate,
    isolated,
    marked,
    recover,
)
from callsheet.core.callback import Callback, label_of, ungated
from callsheet.core.context import Context
from callsheet.core.costs import CostReport, Costs, Failures
from callsheet.core.events import Event, as_event
from callsheet.core.lane_options import LaneOptions
from callsheet.core.lifecycle import EVENTS, POINTS
from callsheet.core.ranks import RankGate, Ranks, read_ranks
from callsheet.core.registration import check_callback, handlers_of, resolve_options
from callsheet.core.spans import HasListeners, Spans
from callsheet.core.time import Interval, Time, TimeUnit
from callsheet.errors import (
    ConfigError,
    NotACallbackError,
    RegistrationError,
    RequestRejected,
    UnknownEventError,
    text_of,
    where,
)
from callsheet.lanes.capture import DeviceNumbers
from callsheet.lanes.delivery import CallbackLane, LaneDelivery, join
from callsheet.lanes.queue import Undelivered, drain
from callsheet.lanes.snapshot import Inbox
from callsheet.lanes.state_calls import StateCalls, keeps_state

logger = logging.getLogger("callsheet")

F = TypeVar("F", bound=Callable[..., Any])
Every = str | int | Time | Interval | None
_NOT_COMPILED: dict[str, CompiledEvent] = {}
_BEFORE_THE_END = 0.8  # share of a lane's deadline for the events before `on_run_end`
_BEFORE_LOGGERS_END = 0.9  # share of it that may have passed when the loggers handle `on_run_end`
_LOGGER_METHODS = ("log_table", "log_images", "log_file", "log_hyperparameters")
_SETTLE_SECONDS = 0.2  # how long the last record waits for what lanes log
_MIN_MUTED_STEPS = 20  # muting for fewer steps costs more than it saves
_STATE_SECONDS = 1.0  # deadline for the state of a callback whose lane has hung before
_LEAST_STATE_SECONDS = 0.1  # deadline for a state even if a signal leaves no time
_GRACE_SHARE = 1 / 3  # share of the time left after a signal that callbacks in lanes may delay a checkpoint


class CallbackManager:
    """Hold the callbacks and functions of a run, and call them in order when an event is fired.

    Args:
        callbacks: added first; more can be added later.
        checking: raise if an observer draws random numbers without `draws_random`. This compares all random states before and after every
            handler, so use it in tests only.
        costs: how the callbacks are timed: `sampled`, in a few steps now and then; `all`; or `off`. See `cost_report`.
        warn_share: warn once about each callback that takes more than this fraction of a step. None: never warn.

    Raises:
        ConfigError: `costs` is unknown, or `warn_share` is not a positive fraction.

    Example:
        >>> manager = CallbackManager()
        >>> @manager.register("on_train_step_end", every="10ba")
        ... def show(ctx):
        ...     print(ctx.step)
    """

    def __init__(
        self,
        callbacks: Iterable[Callback] = (),
        *,
        checking: bool = False,
        costs: str = "sampled",
        warn_share: float | None = 0.05,
    ) -> None:
        self.user_state: dict[str, Any] = {}
        self.current: Event | None = None
        """The event that is being dispatched; None outside events."""
        self.has_listeners = HasListeners()
        self.costs = Costs(costs, warn_share)
        self._checking = checking
        self._common: dict[type, Any] = {}
        self._registrations: list[Registration] = []
        self._entries: dict[str, list[HandlerEntry]] = {event: [] for event in EVENTS}
        self._numbers, self._member_numbers = count(), count()
        self._active = _NOT_COMPILED  # empty until compiled: a lookup that fails compiles
        self._plain = self._timed = _NOT_COMPILED  # `_active` is one of these: `_timed` inside a timing window, else `_plain`
        self._ranks: Ranks | None = None
        self._spans: list[Spans] = []  # of the run in progress
        self._ctx: weakref.ref[Context] | None = None
        self._inbox = Inbox()
        self._lanes: dict[Registration, CallbackLane] = {}
        self._undelivered: dict[
            Registration, int
        ] = {}  # events that the lanes had not delivered when the run ended; kept until another run begins
        self._dropped: dict[Registration, int] = {}  # events that ended lanes have dropped
        self._is_over = False  # a run has ended, and no other has begun
        self._behind: dict[
            Registration, int
        ] = {}  # lanes that hung when their state was read, with their `done` count at that time
        self._slow: dict[Registration, int] = {}  # lanes that the last record stopped waiting for, with their `done` count
        self._until = inf  # when the process will be killed, in seconds of `time.monotonic()`
        self._wakes: list[tuple[int, Registration, frozenset[str]]] = []  # (step, member, events): unmute before this step
        self._enqueuers: dict[HandlerEntry, Handler] = {}  # for handlers in lanes: what the training thread calls instead
        self._state_calls = StateCalls()
        self._numbers_of = {event: DeviceNumbers() for event in EVENTS}
        self.add(callbacks)

    # --- who is called ---

    @property
    def events(self) -> frozenset[str]:
        """The names of all events."""
        return frozenset(EVENTS)

    @property
    def callbacks(self) -> list[Callback]:
        """The callback objects, in the order in which they were added; functions are not among them."""
        return [member.thing for member in self._registrations if isinstance(member.thing, Callback)]

    def add(self, callbacks: Callback | Iterable[Callback]) -> None:
        """Add one callback or several. If one is rejected, none is added.

        Raises:
            NotACallbackError, UnknownEventError, RegistrationError: the message names the callback, its line and a hint.
        """
        if isinstance(callbacks, (str, bytes, Mapping)):
            raise NotACallbackError(f"{callbacks!r} is not a callback, nor an iterable of callbacks")
        several = (
            [callbacks] if isinstance(callbacks, (Callback, type)) or not isinstance(callbacks, Iterable) else list(callbacks)
        )
        lines: list[HandlerEntry] = []
        members: list[Registration] = []
        for given in several:
            callback = self._in_its_process(check_callback(given))
            member = Registration(callback, label_of(callback), where(type(inner(callback))), next(self._member_numbers))
            self._check_unique(callback, [*self._registrations, *members])
            members.append(member)
            if callback.lane == "inline" and not getattr(callback.common, "is_alone", True):
                kind = type(callback.common)
                callback.common = self._common.setdefault(kind, kind())
            for event, handler in handlers_of(inner(callback)).items():
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
        """Call `function(ctx)` at `event`, or at every event if `event` is `"*"`. Without a function, return a decorator.

        The options mean what they mean on a `Callback`. `every` is an interval such as `"100ba"`, a number of batches, or an `Interval`.

        Raises:
            UnknownEventError: no such event.
            RegistrationError: an option's value is unknown, or the function cannot be called with the context alone.
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
        if any(entry.member.thing == function for each in events for entry in self._entries[each]):
            raise RegistrationError(
                f"{label} ({where(function)}) is registered for {event} already; register each function once an event"
            )
        member = Registration(function, label, where(function), next(self._member_numbers))
        lines = [self._entry(each, function, member, Callback, given) for each in events]
        if lane == "process":
            raise RegistrationError(
                f"a function cannot be sent to another process; make it a method of a Callback in a module ({label}, {where(function)})"
            )
        self._enter([member], lines)
        return function

    def remove(self, what: Callback | type[Callback] | Callable[..., Any]) -> int:
        """Remove a callback, all callbacks of a class, or a function. Return how many were removed.

        Raises:
            RegistrationError: it is not on the call sheet.
        """
        gone = [
            member
            for member in self._registrations
            if member.thing is what
            or (isinstance(member.thing, Callback) and inner(member.thing) is what)
            or (member.thing == what and not isinstance(what, Callback))
            or (isinstance(what, type) and isinstance(member.thing, Callback) and isinstance(inner(member.thing), what))
        ]
        if not gone:
            labels = ", ".join(member.label for member in self._registrations) or "nothing"
            raise RegistrationError(f"{what!r} is not on the call sheet, which holds {labels}")
        self._registrations = [member for member in self._registrations if member not in gone]
        self._wakes = [wake for wake in self._wakes if wake[1] not in gone]
        for event, entries in self._entries.items():
            self._entries[event] = [entry for entry in entries if entry.member not in gone]
        self._enqueuers = {entry: enqueue for entry, enqueue in self._enqueuers.items() if entry.member not in gone}
        self._changed()
        return len(gone)

    def list_callbacks(self, event: str) -> list[Callback | Handler]:
        """Return a new list of the callbacks and functions that handle `event` on any rank, in order."""
        return [entry.member.thing for entry in sorted(self._entries[as_event(event)], key=lambda entry: entry.order)]

    def has_callbacks(self, event: str) -> bool:
        """Return whether `event` has a handler on this rank."""
        self._lookup(as_event(event))
        return self._plain[event][0] is not None

    def call_sheet(self) -> CallSheet:
        """Return the printable table of all handlers, of all ranks."""
        return all_entries(self._entries)

    # --- dispatch ---

    def fire(self, event: str, ctx: Context) -> None:
        """Call all handlers of `event`, in order.

        Raises:
            UnknownEventError: no such event.
            BaseException: what a callback that is not isolated raised. The handlers of phases `report` and `restore` are called first.
        """
        try:
            first, rest, named, entries = self._active[event]
        except KeyError:
            first, rest, named, entries = self._lookup(as_event(event))
            self._is_over = False
        if first is not None:
            outer = self.current
            self.current = ctx.event = named
            try:
                first(ctx)
                if rest is not None:
                    for handler in rest:
                        handler(ctx)
            except BaseException as error:
                try:
                    recover((first, rest, named, entries), locals().get("handler", first), error, ctx)
                finally:
                    self.current = ctx.event = outer
            self.current = ctx.event = outer

    def spans(self, ctx: Context) -> Spans:
        """Return the spans with which a loop fires its events on `ctx`."""
        spans = Spans(ctx, self)
        self._spans.append(spans)
        self._compile()
        return spans

    def open(self, ctx: Context) -> None:
        """Compile the call sheet for a run that begins, whose ranks are now known. Give `ctx` the manager's `user_state`.

        Raises:
            ConfigError: an interval is a fraction of `max_duration`, and this run has none.
            RequestRejected: the manager serves another run that has not ended.
        """
        other = self._ctx() if self._ctx is not None else None
        if other is not None and other is not ctx:
            raise RequestRejected(
                f"this manager serves the run {other.run.name!r}; close that first, or give each run a manager of its own"
            )
        entries = self.call_sheet().entries
        for entry in entries:
            _check_interval(entry, ctx)
        self._ranks = ctx.run.ranks
        ctx.user_state = self.user_state
        ctx.kept = self._kept()
        ctx.muting = self._mute
        self._ctx = weakref.ref(ctx)
        for member in self._registrations:
            member.failures = member.failures_in_a_row = 0
            member.is_off, member.last_failure, member.muted = False, "", frozenset()
        self._wakes = []
        self.costs.reset()
        self._undelivered, self._dropped, self._is_over, self._until = {}, {}, False, inf
        for entry in entries:
            entry.previous, entry.added_at, entry.was_end = None, None, False
        self._compile()

    def notify_loggers(self, method: str, ctx: Context, /, **payload: Any) -> None:
        """Call `method(ctx, **payload)` on every callback that has such a method. Errors are isolated.

        Tables, images and files reach the loggers this way.
        """
        ranks = self._ranks or read_ranks()
        for member in self._registrations:
            if not isinstance(member.thing, Callback) or not ranks.passes(member.thing.ranks):
                continue
            handler = getattr(inner(member.thing), method, None)
            if handler is not None and not getattr(handler, "does_nothing", False):
                if member.thing.lane != "inline":
                    if self._is_over and member not in self._lanes:
                        logger.error("%s does not receive %s: its lane ended with the run", member.label, method)
                    else:
                        LaneDelivery.put_call(self._lane_of(member), method, ctx, payload)
                    continue
                call = partial(handler, **payload)
                if member.thing.ranks != "all":
                    call = partial(in_gate, call)
                isolated(call, member, method, ctx)

    # --- costs ---

    @property
    def next_step(self) -> int:
        """The step after which the loop calls `between_steps` next. Read it again when `control.pending` is set."""
        return min([self.costs.next_step, *(step - 1 for step, _, _ in self._wakes)])

    def between_steps(self, step: int) -> None:
        """Open or close a timing window and unmute events, after `step`.

        The loop calls this before the first step, and after each step that `next_step` names.
        """
        for wake in [each for each in self._wakes if each[0] <= step + 1]:
            self._wakes.remove(wake)
            _, member, events = wake
            self._set_muted(member, member.muted - events)
        if not self._registrations:
            self.costs.next_step = sys.maxsize
        elif not self.costs.has_begun:
            self.costs.begin(step)
        elif step >= self.costs.next_step:
            self.costs.switch(step)
            self._use_table()

    def cost_report(self, step: int) -> CostReport:
        """Return what the callbacks of this process have cost by the end of `step`, and which of them failed."""
        dropped = self._dropped | {member: each.lane.dropped for member, each in self._lanes.items()}
        undelivered = self._undelivered
        failures = (
            Failures(
                member.label,
                member.failures,
                member.is_off,
                member.last_failure,
                dropped.get(member, 0),
                undelivered.get(member, 0),
            )
            for member in dict.fromkeys([*self._registrations, *dropped])  # `dropped` adds callbacks in lanes that were removed
            if member.failures or dropped.get(member) or undelivered.get(member)
        )
        return self.costs.report(step, tuple(failures))

    def publish_costs(self, ctx: Context, *, is_last: bool = False) -> None:
        """Pass the costs and the latest window to the loggers if they are due, or if it `is_last`. The loop calls this after a record."""
        report = self.cost_report(ctx.step) if is_last else None
        if self.costs.should_publish(is_last=is_last) or (report is not None and report.failures):
            self.notify_loggers("log_costs", ctx, report=report or self.cost_report(ctx.step))
            if (window := self.costs.take_window()) is not None:
                self.notify_loggers("log_timeline", ctx, window=window)

    # --- lanes ---

    def process_lane_messages(self, ctx: Context) -> None:
        """Process the messages of the lanes, and switch off the callbacks that all ranks agree to have failed too often.

        The loop calls this at each boundary.
        """
        ctx.control.is_hurried = False  # before the inbox is emptied: a message that arrives during that sets it again
        self._inbox.empty(ctx)
        while ctx.control.switched_off:
            request = ctx.control.switched_off.pop()
            for member in self._registrations:
                if str(member.number) == request.kind:
                    member.switch_off(FAILURES_ALLOWED)
        ctx.control.look_again()

    def flush_lanes(self, ctx: Context) -> None:
        """Wait a moment for the lanes, so that the record holds what they log now. The loop calls this before a record that may be the last."""
        moving = {member: each.lane for member, each in self._lanes.items() if self._slow.get(member) != each.lane.done}
        drain(moving.values(), min(_SETTLE_SECONDS, self._seconds_for_states))
        self._slow |= {member: lane.done for member, lane in moving.items() if not lane.is_idle}
        self.process_lane_messages(ctx)

    def limit_lane_waits(self, seconds: float) -> None:
        """Limit how long a checkpoint waits for lanes, since the process will be killed in `seconds`. The loop calls this on a signal."""
        self._until = time.monotonic() + seconds

    def drain(self, ctx: Context) -> None:
        """Wait until the lanes have delivered all events so far, for most of each lane's deadline. Called before `on_run_end` is fired."""
        self._drain(share=_BEFORE_THE_END)
        self.process_lane_messages(ctx)

    def close(self) -> None:
        """End the run's lanes and forget its ranks and loops. May be called twice; afterwards the manager may serve another run.

        All lanes are waited for together, each until its deadline. Events that were not delivered by then are logged as an error, and
        counted in `cost_report` until another run begins.
        """
        lanes = list(self._lanes.values())
        try:
            for undelivered in self._drain():
                logger.error("The run ends, and a lane has not delivered all events: %s", undelivered)
        finally:
            for member, each in self._lanes.items():
                self._dropped[member] = each.lane.dropped
                each.end()
            join(lanes)
        self._inbox.log_lost()
        self._inbox = Inbox()  # later messages of these lanes belong to no run
        self._lanes, self._enqueuers, self._behind, self._slow = {}, {}, {}, {}
        self._spans = []
        self._ranks = self._ctx = None
        self._active = self._plain = self._timed = _NOT_COMPILED
        self._is_over = True

    def _drain(self, share: float = 1.0) -> list[Undelivered]:
        left = drain([each.lane for each in self._lanes.values()], share=share)
        if self._lanes:
            self._undelivered = {member: each.lane.left for member, each in self._lanes.items() if each.lane.left}
        return left

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every callback that keeps one, by name, and `user_state`.

        A callback in a lane has until its lane's deadline to give its state. If it does not, or if it or an isolated callback raises,
        the error is logged, and `missing` holds the reason by the callback's name.

        Raises:
            RegistrationError: two callbacks keep their state under one name.
            Exception: what an inline callback that is not isolated raised.
        """
        missing: dict[str, str] = {}

        def failed(member: Registration, error: Exception) -> None:
            missing[member.label] = reason = f"{type(error).__name__}: {text_of(error)}"
            logger.error(
                "The state of callback %s (%s) is missing from this checkpoint: %s",
                member.label,
                member.source,
                reason,
                exc_info=error,
            )

        self._settle_states()
        reads = {member: partial(_state_of, callback) for member, callback in self._stateful.items()}
        states: dict[str, dict[str, Any]] = {}
        for member, state in self._state_calls.results(reads, self._state_deadline, failed).items():
            if state:
                name = label_of(reads[member].args[0])
                if name in states:
                    raise RegistrationError(
                        f"two callbacks keep their state under the name {name!r}; give one another: callback.name = '...'"
                    )
                states[name] = state
        return {"callbacks": states, "user_state": dict(self.user_state)} | ({"missing": missing} if missing else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every callback its state. A callback without a saved state starts fresh; unclaimed and missing states are logged.

        A callback in a lane, or an isolated one, that raises or does not take its state within the lane's deadline is logged and starts
        without it.

        Raises:
            Exception: what an inline callback that is not isolated raised.
        """
        self._settle_states(is_loading=True)
        saved: Mapping[str, Mapping[str, Any]] = state.get("callbacks", {})
        for label, reason in state.get("missing", {}).items():
            logger.warning("The checkpoint has no state of callback %s, which starts without one: %s", label, reason)
        loads = {
            member: partial(member.thing.load_state_dict, saved[label_of(member.thing)])
            for member in self._registrations
            if isinstance(member.thing, Callback) and label_of(member.thing) in saved
        }
        self._state_calls.results(loads, self._state_deadline, _starts_without)
        if unclaimed := sorted(saved.keys() - {label_of(callback) for callback in self.callbacks}):
            logger.warning("the checkpoint holds the state of callbacks that are not here: %s", ", ".join(unclaimed))
        self.user_state.update(state.get("user_state", {}))

    def _move_state(self, old: Registration, giver: Callback, new: Registration, capture: Callback) -> None:
        """Copy the state of a callback from its old lane to its new one."""
        states = self._state_calls.results({old: partial(_state_of, giver)}, self._state_deadline, _starts_without)
        if old in states:
            self._state_calls.results({new: partial(capture.load_state_dict, states[old])}, self._state_deadline, _starts_without)

    @property
    def _stateful(self) -> dict[Registration, Callback]:
        return {
            member: member.thing
            for member in self._registrations
            if isinstance(member.thing, Callback) and keeps_state(member.thing)
        }

    def _state_deadline(self, member: Registration) -> float:
        """Return the seconds that a callback in a lane has for `state_dict` or `load_state_dict`; few if its lane has hung before."""
        lane = self._lanes.get(member)
        own = lane.lane.options.deadline if lane is not None else LaneOptions().deadline
        return min(own, _STATE_SECONDS if member in self._behind else inf, max(self._seconds_for_states, _LEAST_STATE_SECONDS))

    @property
    def _seconds_for_states(self) -> float:
        """How long a checkpoint may wait for lanes; infinite until a signal arrives."""
        return max(0.0, self._until - time.monotonic()) * _GRACE_SHARE

    def _settle_states(self, *, is_loading: bool = False) -> None:
        """Wait until the callbacks in lanes have handled all events so far, before their states are read or loaded."""
        most = self._seconds_for_states
        stateful = {
            member: each.lane
            for member, each in self._lanes.items()
            if isinstance(member.thing, Callback)
            and keeps_state(member.thing)
            and (is_loading or not getattr(inner(member.thing), "state_is_ready", False))
        }
        moving = [lane for member, lane in stateful.items() if self._behind.get(member) != lane.done]
        drain(moving, lambda lane: min(lane.options.deadline, most))  # all at once; a lane that hangs is waited for once only
        self._behind = {member: lane.done for member, lane in stateful.items() if not lane.is_idle}
        for member in self._behind:
            logger.error("The state of %s is out of date: its lane has not handled all events in time", member.label)
        for member in stateful:
            if isinstance(member.thing, Background):  # do not wait again for a lane that has missed its deadline
                member.thing.patience = 0.0 if member in self._behind else self._seconds_for_states

    # --- compiling ---

    def _entry(self, event: str, handler: Handler, member: Registration, owner: Any, given: dict[str, Any]) -> HandlerEntry:
        options = resolve_options(owner, handler, member.label, given)
        return HandlerEntry(
            event=event,
            handler=ungated(handler),
            member=member,
            phase=options.phase,
            ranks=options.ranks,
            lane=options.lane,
            on_error=options.on_error,
            every=options.every,
            draws_random=options.draws_random,
            number=next(self._numbers),
        )

    def _check_unique(self, callback: Callback, members: list[Registration]) -> None:
        for member in members:
            if member.thing is callback:
                raise RegistrationError(
                    f"{label_of(callback)} ({member.source}) is on the call sheet already; add each instance once"
                )
            if (
                isinstance(member.thing, Callback)
                and member.label == label_of(callback)
                and keeps_state(callback)
                and keeps_state(member.thing)
            ):
                raise RegistrationError(
                    f"two callbacks would keep their state under the name {label_of(callback)!r} ({member.source} and {where(type(callback))}); "
                    "give one of them another before adding it: callback.name = '...'"
                )

    def _enter(self, members: list[Registration], lines: list[HandlerEntry]) -> None:
        """Add the members and their entries. If one does not suit the run in progress, none is added."""
        ctx = self._ctx() if self._ctx is not None else None
        for entry in lines:
            if ctx is not None:
                _check_interval(entry, ctx)
        for entry in lines:
            entry.added_at = ctx.state.timestamp if ctx is not None else None
            self._entries[entry.event].append(entry)
        self._registrations = [*self._registrations, *members]
        self._changed()
        if ctx is not None:
            ctx.kept = self._kept()

    def _mute(self, callback: Callback, events: tuple[str, ...], is_muted: bool, until: int | None) -> None:
        member = next((each for each in self._registrations if each.thing is callback), None)
        if member is None:
            raise RegistrationError(f"{label_of(callback)} is not on the call sheet of this run, so it cannot mute events")
        named = frozenset(as_event(event).value for event in events)
        ctx = self._ctx() if self._ctx is not None else None
        if until is not None and ctx is not None:
            # A loop that does not call `between_steps` would never unmute, and unmuting costs as much as a few calls.
            if not self.costs.has_begun or until < ctx.step + _MIN_MUTED_STEPS:
                return
            named -= member.muted - self._waking(member)  # events that are muted for good stay muted
        self._forget_wakes(member, named)
        if until is not None and ctx is not None:
            self._wakes.append((until, member, named))
            ctx.control.is_rescheduled = ctx.control.pending = True  # the loop has to read `next_step` again
        self._set_muted(member, member.muted | named if is_muted else member.muted - named)

    def _waking(self, member: Registration) -> frozenset[str]:
        """Return the events that the member has muted until some step."""
        return frozenset[str]().union(*(events for _, each, events in self._wakes if each is member))

    def _forget_wakes(self, member: Registration, events: frozenset[str]) -> None:
        """Cancel the scheduled unmuting of these events, which a later `mute` or `unmute` replaces."""
        left = [(step, each, named - events if each is member else named) for step, each, named in self._wakes]
        self._wakes = [wake for wake in left if wake[2]]

    def _set_muted(self, member: Registration, muted: frozenset[str]) -> None:
        changed, member.muted = member.muted ^ muted, muted
        if changed:
            self._changed(*changed)

    def _kept(self) -> frozenset[str]:
        return frozenset(name for callback in self.callbacks for name in callback.keep_fields)

    def _changed(self, *events: str) -> None:
        """Recompile these events after the call sheet has changed; all of them if none is given."""
        is_running = bool(self._spans) or self._ranks is not None
        is_compiled = is_running and bool(events) and bool(self._plain)
        if not is_compiled:
            self._active = self._plain = self._timed = _NOT_COMPILED
        if is_running:  # the change must act from the next event on
            self._compile(events if is_compiled else EVENTS)

    def _lookup(self, event: str) -> CompiledEvent:
        if not self._active:
            self._compile()
        return self._active[event]

    def _compile(self, events: Iterable[str] = EVENTS) -> None:
        self._plain, self._timed = self._table(self._plain, events, in_window=False), _NOT_COMPILED
        self.has_listeners.link(self._plain, events)
        self._use_table(events)

    def _use_table(self, events: Iterable[str] = EVENTS) -> None:
        """Dispatch from the timed table inside a timing window, else from the plain one."""
        if self.costs.is_window and not self._timed:
            self._timed = self._table(_NOT_COMPILED, EVENTS, in_window=True)
        self._active = self._timed if self.costs.is_window else self._plain
        for spans in self._spans:
            spans.link(self._active, events)

    def _table(self, table: Mapping[str, CompiledEvent], events: Iterable[str], *, in_window: bool) -> dict[str, CompiledEvent]:
        """Return a copy of `table` in which these events are compiled from the current entries."""
        ranks = self._ranks or read_ranks()
        table = dict(table)
        for event in events:
            timed = self.costs.timed if self.costs.wraps(event, in_window=in_window) else None
            made = compiled(event, self._entries[event], ranks, checking=self._checking, timed=timed, in_lane=self._enqueuer)
            if event == Event.RUN_END:
                made = self._with_lanes_drained(made)
            table[event] = marked(made, self._mark(event)) if in_window and event not in POINTS else made
        return table

    def _enqueuer(self, entry: HandlerEntry) -> Handler:
        if entry not in self._enqueuers:
            self._enqueuers[entry] = LaneDelivery.of_line(entry, self._lane_of(entry.member), self._numbers_of[entry.event])
        return self._enqueuers[entry]

    def _lane_of(self, member: Registration) -> CallbackLane:
        if member not in self._lanes:
            self._lanes[member] = self._left_lane(member) or CallbackLane(member, self._inbox)
        return self._lanes[member]

    def _left_lane(self, member: Registration) -> CallbackLane | None:
        """Return the lane of a callback that was removed and is added again, so that its queued events are delivered before new ones."""
        for old, lane in self._lanes.items():
            if old not in self._registrations and _is_same(old.thing, member.thing):
                del self._lanes[old]
                if old.thing == member.thing:
                    lane.member = member
                    return lane
                drain([lane.lane], lane.lane.options.deadline)  # the callback is inside another `Background` now
                if isinstance(old.thing, Callback) and isinstance(member.thing, Callback) and keeps_state(member.thing):
                    self._move_state(old, old.thing, member, member.thing)  # the state may be in another process
                self._dropped[old] = lane.lane.dropped
                lane.end()
                join([lane])
                return None
        return None

    def _in_its_process(self, callback: Callback) -> Callback:
        """Return `callback`, wrapped in a `Process` if its lane is `process`: the earlier one if the callback was added before."""
        if callback.lane != "process" or isinstance(callback, Background):
            return callback
        for member in self._lanes:
            if isinstance(member.thing, Background) and member.thing.callback is callback:
                return member.thing
        from callsheet.lanes.process import Process

        options = callback.lane_options
        return Process(callback, queue=options.queue, overflow=options.overflow, deadline=options.deadline)

    def _with_lanes_drained(self, run_end: CompiledEvent) -> CompiledEvent:
        """Return `on_run_end` with one more handler, which waits for the lanes before the loggers are called.

        The loggers close their files at `on_run_end`; what the lanes log must arrive before.
        """
        handlers, (_, _, event, entries) = compiled_handlers(run_end), run_end
        both = list(zip(handlers, entries, strict=True))
        place = next((place for place, entry in enumerate(entries) if _is_logger(entry.member)), len(both))
        late = [each for each in both[place:] if each[1].lane != "inline" and not _is_logger(each[1].member)]
        before, after = both[:place] + late, [each for each in both[place:] if each not in late]
        members = {entry.member for _, entry in before if entry.lane != "inline"}
        if not members:
            return run_end

        def drain_lanes(ctx: Context) -> None:
            drain([each.lane for member, each in self._lanes.items() if member in members], share=_BEFORE_LOGGERS_END)
            self.process_lane_messages(ctx)

        ours = self._own_entry(event, drain_lanes, "the wait for lanes", "manager.py")
        both = [*before, (drain_lanes, ours), *after]
        return compile_event([handler for handler, _ in both], event, [entry for _, entry in both])

    def _mark(self, event: str) -> HandlerEntry:
        return self._own_entry(event, self.costs.mark, "the clock of costs", "costs.py")

    def _own_entry(self, event: str, handler: Handler, label: str, source: str) -> HandlerEntry:
        return HandlerEntry(
            event=event,
            handler=handler,
            member=Registration(handler, label, source),
            phase="report",  # this phase is called even after a callback fails
            ranks="all",
            lane="inline",
            on_error="raise",
            every=None,
            draws_random=False,
            number=-1,
        )


def normalize_callbacks(callbacks: CallbackManager | Callback | Iterable[Callback] | None) -> CallbackManager | None:
    """Return a manager of `callbacks`: the given manager itself, a new one for an iterable, or None for None.

    Raises:
        NotACallbackError, UnknownEventError, RegistrationError: as `CallbackManager.add`.
    """
    if callbacks is None or isinstance(callbacks, CallbackManager):
        return callbacks
    manager = CallbackManager()
    manager.add(callbacks)
    return manager


def should_fire(manager: CallbackManager | None, event: str) -> bool:
    """Return whether there is a manager with a handler for `event`. Raises UnknownEventError for an unknown event."""
    return manager is not None and manager.has_callbacks(event)


def _is_same(one: Callback | Handler, other: Callback | Handler) -> bool:
    """Return whether both are the same callback, in whatever lane, or the same function."""
    if isinstance(one, Callback) and isinstance(other, Callback):
        return inner(one) is inner(other)
    return one == other


def _interval(every: str | int | Time, label: str, function: Callable[..., Any]) -> Interval:
    try:
        return Interval(every)
    except ValueError as error:
        raise RegistrationError(f"{error} (callback {label}, {where(function)})") from None


def _check_interval(entry: HandlerEntry, ctx: Context) -> None:
    if entry.every is not None and entry.every.every.unit is TimeUnit.DURATION and ctx.state.max_duration is None:
        raise ConfigError(
            f"{entry.member.label} ({entry.member.source}) handles {entry.event} {entry.every}, but this run has no max_duration; "
            "use another unit"
        )


def _is_logger(member: Registration) -> bool:
    """Return whether the callback is a logger: it takes tables, images, files or hyperparameters."""
    thing = inner(member.thing) if isinstance(member.thing, Callback) else None
    methods = (getattr(thing, method, None) for method in _LOGGER_METHODS)
    return any(method is not None and not getattr(method, "does_nothing", False) for method in methods)


def _starts_without(member: Registration, error: Exception) -> None:
    reason = f"{type(error).__name__}: {text_of(error)}"
    logger.error("Callback %s (%s) starts without its saved state: %s", member.label, member.source, reason, exc_info=error)


def _state_of(callback: Callback) -> dict[str, Any]:
    return dict(callback.state_dict())
