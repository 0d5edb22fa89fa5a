"""The callback manager: it holds the table of all handlers (the call sheet) and fires the events."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, count
from typing import Any, TypeVar, Unpack, overload

from callsheet.core.background import Background, inner
from callsheet.core.call_sheet import CallSheet, HandlerEntry, Registration, recover
from callsheet.core.callback import Callback, Lane, OnError, Phase, label_of
from callsheet.core.context import Context
from callsheet.core.costs import CostMode, CostReport, Costs, failures_of
from callsheet.core.dispatch_table import DispatchTable
from callsheet.core.events import Event, as_event
from callsheet.core.lifecycle import EVENTS
from callsheet.core.muting import Muting
from callsheet.core.ranks import RankGate, read_ranks
from callsheet.core.registration import (
    RegisterOptions,
    check_callback,
    check_interval,
    check_unique,
    entries_of,
    entries_of_function,
)
from callsheet.core.spans import Spans
from callsheet.core.states import load_states, states_of
from callsheet.core.time import Interval, Time
from callsheet.core.wrappers import FAILURES_ALLOWED, Handler, call_isolated, in_gate
from callsheet.errors import NotACallbackError, RegistrationError, RequestRejected, where

F = TypeVar("F", bound=Callable[..., Any])


class CallbackManager:
    """Hold the callbacks and functions of a run, and call them in order when an event is fired.

    Args:
        callbacks: the first callbacks, or one callback; more can be added later.
        checking: raise if a handler outside the phases `change` and `restore` draws random numbers without `draws_random`. All
            random states are compared before and after every handler, so use this option in tests only.
        costs: which calls are timed: `sampled` (a few steps from time to time), `all` or `off`. See `cost_report`.
        warn_share: warn once about each callback that takes more than this fraction of a step. None: never warn.

    Raises:
        ConfigError: `costs` is unknown, or `warn_share` is not a positive fraction.

    Examples:
        >>> manager = CallbackManager()
        >>> @manager.register("on_train_step_end", every="10ba")
        ... def show(ctx):
        ...     print(ctx.step)
    """

    def __init__(
        self,
        callbacks: Callback | Iterable[Callback] = (),
        *,
        checking: bool = False,
        costs: CostMode = "sampled",
        warn_share: float | None = 0.05,
    ) -> None:
        self.user_state: dict[str, Any] = {}
        self.current: Event | None = None  # the event that is being fired, which `ctx.event` returns
        self.costs = Costs(costs, warn_share)
        self._table = DispatchTable(self.costs, checking=checking)
        self.has_listeners = self._table.has_listeners
        self._active = self._table.active  # the same dict, stored here because `fire` then reads it faster
        self._muting = Muting(self._table)
        self._numbers = count()  # numbers callbacks and functions in the order in which they are added, the same on all ranks
        self._ctx: weakref.ref[Context] | None = None  # the context of the run in progress
        self._is_over = False  # True from the end of a run until another run begins
        self.add(callbacks)

    # --- adding and removing callbacks and functions ---

    @property
    def events(self) -> frozenset[str]:
        """The names of all events."""
        return frozenset(EVENTS)

    @property
    def callbacks(self) -> list[Callback]:
        """The callback objects, in the order in which they were added. Plain functions are not included."""
        return [each.thing for each in self._table.registrations if isinstance(each.thing, Callback)]

    def add(self, callbacks: Callback | Iterable[Callback]) -> None:
        """Add callbacks. If one of them is rejected, none is added.

        Args:
            callbacks: one callback, or any iterable of callbacks.

        Raises:
            NotACallbackError, UnknownEventError, RegistrationError: the message names the callback, its line and a hint.
            ConfigError: a callback with `lane = "process"` cannot be built in another process; or an interval is a fraction of
                `max_duration`, and the current run has no `max_duration`.
        """
        if isinstance(callbacks, (str, bytes, Mapping)):
            raise NotACallbackError(f"{callbacks!r} is not a callback, nor an iterable of callbacks")
        if isinstance(callbacks, (Callback, type)) or not isinstance(callbacks, Iterable):
            callbacks = [callbacks]
        registrations: list[Registration] = []
        entries: list[HandlerEntry] = []
        for given in callbacks:
            callback = check_callback(given)
            if callback.lane == "process" and not isinstance(callback, Background):
                callback = self._table.lane_set().in_process(callback)
            earlier = [*self._table.registrations, *registrations]
            check_unique(callback, earlier)
            if callback.lane == "inline":
                callback.share_with([each.thing for each in earlier if isinstance(each.thing, Callback)])
            registrations.append(Registration(callback, label_of(callback), where(type(inner(callback))), next(self._numbers)))
            entries += entries_of(callback, registrations[-1])
        self._enter(registrations, entries)

    @overload
    def register(self, event: str, function: F, *, name: str = ..., **options: Unpack[RegisterOptions]) -> F: ...
    @overload
    def register(
        self, event: str, function: None = None, *, name: str = ..., **options: Unpack[RegisterOptions]
    ) -> Callable[[F], F]: ...
    def register(
        self,
        event: str,
        function: F | None = None,
        *,
        every: str | int | Time | Interval | None = None,
        phase: Phase | None = None,
        ranks: RankGate | None = None,
        lane: Lane | None = None,
        on_error: OnError | None = None,
        name: str = "",
    ) -> Any:
        """Register a function as a handler of an event.

        The options have the same meaning as on a `Callback`. The value of an option that is None comes from a decorator of the
        function, such as `rank_zero_only`, or otherwise from the default of `Callback`.

        Args:
            event: the name of the event, or `"*"` for every event.
            function: called with the context; None: return a decorator.
            every: the interval at which to call it, such as `"100ba"`, a number of batches, or an `Interval`. None: at every
                event.
            phase: when to call it, relative to the other handlers of the event.
            ranks: the ranks on which to call it.
            lane: `inline` or `background`. A function cannot run in the lane `process`.
            on_error: what happens when it raises an error: `raise` or `isolate`.
            name: its name in messages and tables; empty: its qualified name.

        Returns:
            `function` itself or, if it is None, a decorator that registers a function and returns it.

        Raises:
            UnknownEventError: no such event.
            NotACallbackError: `function` cannot be called, or is a callback or a class.
            RegistrationError: an option's value is not allowed, the function is registered for the event already, or it cannot be
                called with the context alone.
            ConfigError: `every` is a fraction of `max_duration`, and the current run has no `max_duration`.
        """
        options = RegisterOptions(every=every, phase=phase, ranks=ranks, lane=lane, on_error=on_error)
        if function is None:
            if event != "*":
                as_event(event)
            return lambda given: self.register(event, given, name=name, **options)
        if isinstance(function, (type, Callback)) or not callable(function):
            raise NotACallbackError(f"register takes a function of the context, not {function!r}; for a callback there is add()")
        label = name or getattr(function, "__qualname__", repr(function))
        registration = Registration(function, label, where(function), next(self._numbers))
        entries = entries_of_function(event, function, registration, options)
        if any(each.registration.thing == function for entry in entries for each in self._table.entries[entry.event]):
            raise RegistrationError(
                f"{label} ({registration.source}) is registered for {event} already; register each function once an event"
            )
        self._enter([registration], entries)
        return function

    def remove(self, what: Callback | type[Callback] | Callable[..., Any]) -> int:
        """Remove a callback, all callbacks of a class, or a function that was added with `register`.

        Args:
            what: a callback, a class of callbacks (every instance of it is removed), or a function.

        Returns:
            How many callbacks or functions were removed.

        Raises:
            RegistrationError: nothing on the call sheet matches.
        """
        gone = [registration for registration in self._table.registrations if registration.matches(what)]
        if not gone:
            labels = ", ".join(registration.label for registration in self._table.registrations) or "nothing"
            raise RegistrationError(f"{what!r} is not on the call sheet, which holds {labels}")
        self._muting.forget(gone)
        if self._table.lanes is not None:
            self._table.lanes.forget(gone)
        self._table.remove(gone)
        return len(gone)

    def list_callbacks(self, event: str) -> list[Callback | Handler]:
        """Return the callbacks and functions that handle an event on any rank, in the order of calls, as a new list.

        Args:
            event: the name of the event.

        Raises:
            UnknownEventError: no such event.
        """
        return [entry.registration.thing for entry in self._table.entries[as_event(event)]]

    def has_callbacks(self, event: str) -> bool:
        """Return whether an event has a handler on this rank.

        Args:
            event: the name of the event.

        Raises:
            UnknownEventError: no such event.
        """
        return self._table.has_handlers(as_event(event))

    def call_sheet(self) -> CallSheet:
        """Return a printable table of all handlers of all ranks."""
        return CallSheet(tuple(chain.from_iterable(self._table.entries.values())), tuple(self._table.registrations))

    # --- firing events ---

    def fire(self, event: str, ctx: Context) -> None:
        """Call all handlers of an event, in order.

        Args:
            event: the name of the event, such as `"on_train_step_end"`.
            ctx: a context that was passed to `open` or `spans`, or one that the method `sibling` of such a context returned. The
                caller must set the event's fields on it before.

        Raises:
            UnknownEventError: no such event.
            BaseException: the error of a callback that is not isolated. Before the error is raised, the remaining handlers of
                phases `report` and `restore` are called.
        """
        try:
            first, second, more, named, calls = self._active[event]
        except KeyError:
            first, second, more, named, calls = self._table.lookup(as_event(event))
            ctx.dispatcher = self  # `open` sets this too, but a loop may fire events without calling `open` first
            self._is_over = False
        if first is not None:
            outer, self.current = self.current, named
            rest = more
            handler = first
            try:
                first(ctx)
                if second is not None:
                    handler = second
                    second(ctx)
                    while rest is not None:
                        handler, fourth, fifth, rest = rest
                        handler(ctx)
                        if fourth is not None:
                            handler = fourth
                            fourth(ctx)
                            if fifth is not None:
                                handler = fifth
                                fifth(ctx)
            except BaseException as error:
                try:
                    recover((first, second, more, named, calls), handler, error, ctx)
                finally:
                    self.current = outer
            self.current = outer

    def spans(self, ctx: Context) -> Spans:
        """Return a context manager for each span, with which a loop fires the span's events. The handlers are called with `ctx`."""
        return self._table.spans(ctx, self)

    def open(self, ctx: Context) -> None:
        """Prepare for a run that begins: compile the table of handlers, reset costs and failures, and set `ctx.user_state`.

        Call this when the ranks of the run are known.

        Raises:
            ConfigError: an interval is a fraction of `max_duration`, and this run has none.
            RequestRejected: the manager serves another run that has not ended.
        """
        other = self._open_ctx
        if other is not None and other is not ctx:
            raise RequestRejected(
                f"this manager serves the run {other.run.name!r}; close that first, or give each run a manager of its own"
            )
        for entry in self.call_sheet().entries:
            check_interval(entry, ctx)
        ctx.user_state = self.user_state
        ctx.kept = self._kept_fields()
        ctx.dispatcher = self
        self._ctx = weakref.ref(ctx)
        self._is_over = False
        self._muting.reset()
        self.costs.reset()
        if self._table.lanes is not None:
            self._table.lanes.reset()
        self._table.open(ctx.run.ranks)

    def mute(self, ctx: Context, callback: Callback, events: tuple[str, ...], is_muted: bool, until: int | None = None) -> None:
        """Stop calling the callback's handlers for these events, or call them again. `Context.mute` and `Context.unmute` call this.

        Args:
            ctx: the context of the run.
            callback: the callback whose handlers are muted or unmuted.
            events: the names of the events.
            is_muted: True to stop calling the handlers, False to call them again.
            until: the step at whose beginning the handlers are unmuted. None: they stay muted until the run's end.

        Raises:
            UnknownEventError: no such event.
            RegistrationError: the callback is not on the run's call sheet.
        """
        self._muting.mute(ctx, callback, events, is_muted, until)

    def notify_loggers(self, method: str, ctx: Context, /, **payload: Any) -> None:
        """Call a logger method, such as `log_table`, on every callback that has this method. Errors are logged and do not end the run.

        Tables, images and files reach the loggers this way.

        Args:
            method: the name of the method, such as `"log_table"`.
            ctx: the first argument of the method.
            payload: the other arguments of the method, by name.
        """
        ranks = self._table.ranks or read_ranks()
        for registration in self._table.registrations:
            callback, handler = registration.thing, registration.logger_method(method)
            if handler is None or not isinstance(callback, Callback) or not ranks.passes(callback.ranks):
                continue
            if callback.lane == "inline":
                call = partial(handler, **payload)
                call_isolated(call if callback.ranks == "all" else partial(in_gate, call), registration, method, ctx)
            else:
                self._table.lane_set().put_call(registration, method, ctx, payload, is_over=self._is_over)

    # --- the time that callbacks take ---

    @property
    def next_step(self) -> int:
        """The step after which the loop must call `between_steps`. When `control.pending` is set, this step may have changed."""
        return int(min(self.costs.next_step, self._muting.next_step))

    def between_steps(self, step: int) -> None:
        """Do what is due after `step`: start or stop timing the handlers, and unmute the handlers that were muted until now.

        The loop calls this before the first step, and after each step that `next_step` names.

        Args:
            step: the number of completed steps.
        """
        self._muting.unmute_due(step)
        if self.costs.advance(step, is_needed=bool(self._table.registrations)):
            self._table.use_window()

    def cost_report(self, step: int) -> CostReport:
        """Return how much time the callbacks of this process have taken, and which of them failed.

        Args:
            step: the number of completed steps, up to which the report extends.
        """
        lanes = self._table.lanes
        dropped, undelivered = (lanes.dropped, lanes.undelivered) if lanes is not None else ({}, {})
        return self.costs.report(step, failures_of(self._table.registrations, dropped, undelivered))

    # --- callbacks in lanes (threads and processes) ---

    def process_lane_messages(self, ctx: Context) -> None:
        """Process what callbacks in other threads and processes have sent: log their values, and add their requests.

        Also disable the callbacks that failed too often, once all ranks agree on this.

        The loop calls this at each boundary.
        """
        # Clear this flag before reading the messages, so that a message that arrives during the reading sets the flag again.
        ctx.control.is_boundary_requested = False
        if self._table.lanes is not None:
            self._table.lanes.process_messages(ctx)
        while ctx.control.switched_off:
            request = ctx.control.switched_off.pop()
            for registration in self._table.registrations:
                if str(registration.number) == request.kind:
                    registration.switch_off(FAILURES_ALLOWED)
        ctx.control.look_again()

    def flush_lanes(self, ctx: Context) -> None:
        """Wait for callbacks in other threads, so that the next metrics record includes what they are logging.

        The loop calls this before a metrics record that may be the last.
        """
        if self._table.lanes is not None:
            self._table.lanes.flush()
        self.process_lane_messages(ctx)

    def limit_lane_waits(self, seconds: float) -> None:
        """Limit how long a checkpoint waits for callbacks in other threads, because this process will soon be killed.

        The loop calls this when it receives a signal.

        Args:
            seconds: how many seconds are left until the process is killed.
        """
        if self._table.lanes is not None:
            self._table.lanes.limit_waits(seconds)

    def drain(self, ctx: Context) -> None:
        """Wait until callbacks in other threads have handled all events, but use up at most 80 % of each callback's deadline.

        Called before `on_run_end` is fired.
        """
        if self._table.lanes is not None:
            self._table.lanes.drain()
        self.process_lane_messages(ctx)

    def close(self) -> None:
        """End the callbacks' threads and processes, and forget the run's ranks and spans. May be called twice.

        Afterwards the manager may serve another run.

        The manager waits for all lanes at the same time, for each until its deadline. Events that are not delivered by then are
        logged as an error, and counted in `cost_report` until another run begins.
        """
        if self._table.lanes is not None:
            self._table.lanes.close()
        self._table.close()
        self._ctx = None
        self._is_over = True

    # --- saving and loading the callbacks' state ---

    def state_dict(self, *, copied: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> dict[str, Any]:
        """Return the state of every callback that has a state, and `user_state`, the dict that all callbacks share.

        A callback in a lane must return its state within its lane's deadline. If it misses the deadline, the error is logged, and
        the checkpoint records that the state is missing. The same happens if a callback in a lane or an isolated callback raises.

        Args:
            copied: copies the state of a callback that is isolated or has a lane. It may raise an error if the state cannot be
                saved.

        Returns:
            `callbacks`: the states by the callbacks' names. `user_state`: a copy of the shared dict. `missing`, if a state could
            not be saved: the reasons by the callbacks' names.

        Raises:
            RegistrationError: two callbacks with a state have the same name.
            Exception: what an inline callback that is not isolated raised.
        """
        states, missing = states_of(self._table.registrations, self._table.lanes, copied)
        return {"callbacks": states, "user_state": dict(self.user_state)} | ({"missing": missing} if missing else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the saved state of every callback. A callback without a saved state starts without one.

        Callbacks whose state could not be saved, and saved states that belong to no callback, are logged.

        If a callback in a lane or an isolated one raises, or does not load its state within the lane's deadline, the error is
        logged and the callback starts without the state.

        Raises:
            Exception: what an inline callback that is not isolated raised.
        """
        load_states(self._table.registrations, self._table.lanes, state.get("callbacks", {}), state.get("missing", {}))
        self.user_state.update(state.get("user_state", {}))

    # --- private methods that the methods above share ---

    def _enter(self, registrations: list[Registration], entries: list[HandlerEntry]) -> None:
        """Add callbacks, with the call-sheet entries of their handlers. If one entry is invalid in the current run, add none."""
        ctx = self._open_ctx
        if ctx is not None:
            for entry in entries:
                check_interval(entry, ctx)
                entry.added_at = ctx.state.timestamp
        self._table.add(registrations, entries)
        if ctx is not None:
            ctx.kept = self._kept_fields()

    @property
    def _open_ctx(self) -> Context | None:
        return self._ctx() if self._ctx is not None else None

    def _kept_fields(self) -> frozenset[str]:
        return frozenset(name for callback in self.callbacks for name in callback.keep_fields)
