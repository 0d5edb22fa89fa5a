"""All lanes of one manager. A lane is the thread or process in which a callback runs.

The manager imports this module when a handler has a lane.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import getattr_static
from math import inf
from typing import Any, TypeVar

from callsheet.core.background import Background
from callsheet.core.call_sheet import CompiledEvent, HandlerEntry, Registration, compile_event, internal_entry
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.lane_options import LaneOptions
from callsheet.core.lifecycle import EVENTS
from callsheet.core.states import keeps_state, results_of, starts_without, state_of
from callsheet.core.wrappers import Handler
from callsheet.errors import text_of
from callsheet.lanes.capture import DeviceNumbers
from callsheet.lanes.delivery import CallbackLane, LaneDelivery, finish_tasks, join
from callsheet.lanes.process import Process
from callsheet.lanes.queue import drain
from callsheet.lanes.snapshot import Inbox
from callsheet.lanes.state_calls import StateCalls

logger = logging.getLogger("callsheet")

T = TypeVar("T")

_SHARE_BEFORE_LAST_RECORD = 0.7  # the last metrics record waits for a lane for at most this fraction of the lane's deadline
_SHARE_BEFORE_RUN_END = 0.8  # a lane may use this fraction of its deadline for the events before `on_run_end`
_SHARE_BEFORE_LOGGERS_END = 0.9  # before loggers handle `on_run_end`, other lanes may use this fraction of their deadlines
_STATE_SECONDS = 1.0  # how long `state_dict` may take for a callback whose lane has hung before
_MIN_STATE_SECONDS = 0.1  # `state_dict` is given at least this long, even if a preemption signal leaves no time
_GRACE_SHARE = 1 / 3  # after a preemption signal, lanes may delay a checkpoint for this fraction of the time left
_LOGGER_METHODS = ("log_table", "log_images", "log_file", "log_hyperparameters")


class LaneSet:
    """The lanes (threads and processes) of one manager's callbacks: their queues, messages and states.

    Args:
        is_registered: whether a callback is still on the call sheet.
    """

    def __init__(self, is_registered: Callable[[Registration], bool]) -> None:
        self._is_registered = is_registered
        self._inbox = Inbox()
        self._lanes: dict[Registration, CallbackLane] = {}
        self._enqueuers: dict[HandlerEntry, Handler] = {}
        self._numbers_of = {event: DeviceNumbers() for event in EVENTS}
        self._dropped: dict[Registration, int] = {}  # for each callback, the number of events that its ended lanes have dropped
        self.undelivered: dict[Registration, int] = {}
        """How many events each callback's lane had not delivered when the run ended.

        The counts are kept until another run begins.
        """
        # For each lane that was too slow for a checkpoint, the number of items that it had processed when the checkpoint was saved.
        # The next checkpoint waits for such a lane only if the lane has processed more items since the earlier checkpoint.
        self._behind: dict[Registration, int] = {}
        # For each lane that was too slow for a metrics record, the number of items that it had processed by then.
        self._slow: dict[Registration, int] = {}
        self._until = inf  # the value of `time.monotonic()` at which the process will be killed
        self._state_calls, self._ready_calls = StateCalls(), StateCalls()

    def __iter__(self) -> Iterator[CallbackLane]:
        return iter(self._lanes.values())

    @property
    def dropped(self) -> dict[Registration, int]:
        """How many events each callback's lane (thread or process) has dropped in this run, including lanes that have ended."""
        return self._dropped | {registration: each.lane.dropped for registration, each in self._lanes.items()}

    def reset(self) -> None:
        """At the start of a run, reset the counts of events that were dropped or not delivered in the previous run."""
        self.undelivered, self._dropped, self._until = {}, {}, inf

    def forget(self, registrations: list[Registration]) -> None:
        """Forget the handlers of callbacks that were removed. The callbacks' threads still handle the events in their queues."""
        self._enqueuers = {
            entry: enqueue for entry, enqueue in self._enqueuers.items() if entry.registration not in registrations
        }

    def in_process(self, callback: Callback) -> Callback:
        """Return the callback wrapped in a `Process`, which runs the callback in a separate process.

        If the callback was added before, return the `Process` that was made for it at that time.
        """
        for registration in self._lanes:
            if isinstance(registration.thing, Background) and registration.thing.callback is callback:
                return registration.thing
        options = callback.lane_options
        return Process(callback, queue=options.queue, overflow=options.overflow, deadline=options.deadline)

    # --- putting events into the queues ---

    def enqueuer(self, entry: HandlerEntry) -> Handler:
        """Return the function that the training thread calls in place of a handler that runs in another thread or process.

        The function puts the event into the lane's queue.
        """
        if entry not in self._enqueuers:
            self._enqueuers[entry] = LaneDelivery.of_line(entry, self._lane_of(entry.registration), self._numbers_of[entry.event])
        return self._enqueuers[entry]

    def put_call(self, registration: Registration, method: str, ctx: Context, payload: dict[str, Any], *, is_over: bool) -> None:
        """Put one call of a logger's method, such as `log_table`, into the queue of the logger's lane.

        If the run is over (`is_over`) and the logger's lane has ended, log an error instead.
        """
        if is_over and registration not in self._lanes:
            logger.error("%s does not receive %s: its lane ended with the run", registration.label, method)
            return
        LaneDelivery.put_call(self._lane_of(registration), method, ctx, payload)

    def _lane_of(self, registration: Registration) -> CallbackLane:
        if registration not in self._lanes:
            self._lanes[registration] = self._reclaim_lane(registration) or CallbackLane(registration, self._inbox)
        return self._lanes[registration]

    def _reclaim_lane(self, registration: Registration) -> CallbackLane | None:
        """If a callback was removed and is now added again, return the lane (thread or process) that it had before.

        Return None if there is no such lane.

        The events in the queue of the returned lane are delivered before new events.
        """
        for old, lane in self._lanes.items():
            if not self._is_registered(old) and _is_same(old, registration):
                del self._lanes[old]
                if old.thing == registration.thing:
                    lane.registration = registration
                    return lane
                # The callback has a new `Background` wrapper and therefore a new thread, so end the old thread.
                drain([lane.lane], lane.lane.options.deadline)
                finish_tasks([lane])
                if (
                    isinstance(old.thing, Callback)
                    and isinstance(registration.thing, Callback)
                    and keeps_state(registration.thing)
                ):
                    # The current state may be in the process of the old lane, so move the state before that process ends.
                    self._move_state(old, old.thing, registration, registration.thing)
                self._dropped[old] = lane.lane.dropped
                lane.end()
                join([lane])
                return None
        return None

    def with_drain(self, run_end: CompiledEvent) -> CompiledEvent:
        """Return the handlers of `on_run_end`, with one more handler before the loggers: it waits for callbacks in other threads.

        The loggers close their files at `on_run_end`, so what the lanes log must arrive before that.
        """
        *_, event, calls = run_end
        place = next((place for place, (_, entry) in enumerate(calls) if _is_logger(entry.registration)), len(calls))
        late = [each for each in calls[place:] if each[1].lane != "inline" and not _is_logger(each[1].registration)]
        before, after = [*calls[:place], *late], [each for each in calls[place:] if each not in late]
        registrations = {entry.registration for _, entry in before if entry.lane != "inline"}
        if not registrations:
            return run_end

        def drain_lanes(ctx: Context) -> None:
            drain(
                [each.lane for registration, each in self._lanes.items() if registration in registrations],
                share=_SHARE_BEFORE_LOGGERS_END,
            )
            self._inbox.empty(ctx, is_logging_over=True)

        ours = internal_entry(event, drain_lanes, "the wait for lanes", "lane_set.py")
        return compile_event([*before, (drain_lanes, ours), *after], event)

    # --- waiting for the lanes ---

    def process_messages(self, ctx: Context) -> None:
        """Carry out the messages of callbacks in lanes (other threads): values that they have logged, and their requests."""
        self._inbox.empty(ctx)

    def flush(self) -> None:
        """Wait for callbacks in lanes (threads), so that the run's last metrics record includes what they are logging."""
        moving = {
            registration: each.lane
            for registration, each in self._lanes.items()
            if self._slow.get(registration) != each.lane.done
        }
        drain(moving.values(), share=_SHARE_BEFORE_LAST_RECORD, at_most=self._seconds_for_states)
        self._slow |= {registration: lane.done for registration, lane in moving.items() if not lane.is_idle}
        for lane in moving.values():
            if lane.is_idle:
                lane.waited = 0.0  # it does not hang, so after more training (a further `fit`) it has its whole deadline again

    def limit_waits(self, seconds: float) -> None:
        """Limit how long a checkpoint waits for callbacks in lanes, because this process will be killed in `seconds`."""
        self._until = time.monotonic() + seconds

    def drain(self, share: float = _SHARE_BEFORE_RUN_END) -> list[str]:
        """Wait until callbacks in other threads have handled all events so far, but use up at most `share` of each deadline.

        Return a description of the events that were not delivered.
        """
        left = drain([each.lane for each in self._lanes.values()], share=share)
        if self._lanes:
            self.undelivered = {registration: each.lane.left for registration, each in self._lanes.items() if each.lane.left}
        return [str(each) for each in left]

    def close(self) -> None:
        """End the threads and processes of all callbacks. First wait until each has handled its events, or until its deadline.

        Log which events were not delivered by then.
        """
        lanes = list(self._lanes.values())
        try:
            for undelivered in self.drain(share=1.0):
                logger.error("The run ends, and a lane has not delivered all events: %s", undelivered)
            finish_tasks(lanes)
        finally:
            for registration, each in self._lanes.items():
                self._dropped[registration] = each.lane.dropped
                each.end()
            join(lanes)
        self._inbox.log_lost()
        self._inbox = Inbox()  # a new inbox, because messages that still arrive in the old one belong to no run
        self._lanes, self._enqueuers, self._behind, self._slow = {}, {}, {}, {}

    # --- saving and loading the callbacks' states ---

    def state_calls(self, calls: Mapping[Registration, Callable[[], T]]) -> dict[Registration, Callable[[], T]]:
        """Start calls of `state_dict` or `load_state_dict` for callbacks in lanes, each call on a separate thread.

        Return all `calls`, with those of callbacks in lanes replaced by functions that wait for the results.
        """
        in_lanes = {registration: call for registration, call in calls.items() if not registration.is_inline}
        return {**calls, **self._state_calls.start(in_lanes, self._state_deadline)}

    def wait_for_states(self, *, is_loading: bool = False) -> None:
        """Wait until callbacks in other threads have handled all events so far, before their states are read or loaded."""
        most = self._seconds_for_states
        stateful = {
            registration: each.lane
            for registration, each in self._lanes.items()
            if isinstance(registration.thing, Callback) and keeps_state(registration.thing)
        }
        if not is_loading:
            ready = self._ready(stateful)
            stateful = {registration: lane for registration, lane in stateful.items() if registration not in ready}
        moving = [lane for registration, lane in stateful.items() if self._behind.get(registration) != lane.done]
        # Wait for all lanes at the same time, so that several hanging lanes take no longer than one.
        drain(moving, lambda lane: min(lane.options.deadline, most))
        self._behind = {registration: lane.done for registration, lane in stateful.items() if not lane.is_idle}
        for registration in self._behind:
            logger.error("The state of %s is out of date: its lane has not handled all events in time", registration.label)
        for registration in stateful:
            if isinstance(registration.thing, Background):
                # A lane that has missed its deadline gets no more time for `state_dict`.
                registration.thing.patience = 0.0 if registration in self._behind else self._seconds_for_states

    def _ready(self, registrations: Iterable[Registration]) -> set[Registration]:
        """Return the callbacks whose `state_is_ready` is True: their state can be saved before they have handled all queued events.

        A property is read on another thread, with a deadline, because it is code of the user.
        """
        callbacks = {each: each.callback for each in registrations if each.callback is not None}
        values = {each: getattr_static(callback, "state_is_ready", False) for each, callback in callbacks.items()}
        ready = {each for each, value in values.items() if value is True}
        reads = {
            each: partial(getattr, callbacks[each], "state_is_ready")
            for each, value in values.items()
            if not isinstance(value, bool)
        }
        answers = results_of(self._ready_calls.start(reads, self._state_deadline), _log_not_ready)
        return ready | {each for each, answer in answers.items() if answer}

    def _move_state(self, old: Registration, source: Callback, new: Registration, target: Callback) -> None:
        """Copy the state of a callback that was removed and added again, from its old thread or process to the new one."""
        states = results_of(self.state_calls({old: lambda: state_of(source)}), starts_without)
        if old in states:
            results_of(self.state_calls({new: lambda: target.load_state_dict(states[old])}), starts_without)

    def _state_deadline(self, registration: Registration) -> float:
        """Return the seconds that a callback in another thread or process has for `state_dict` or `load_state_dict`.

        The deadline is short if the callback's lane has hung before.
        """
        lane = self._lanes.get(registration)
        own = lane.lane.options.deadline if lane is not None else LaneOptions().deadline
        return min(
            own, _STATE_SECONDS if registration in self._behind else inf, max(self._seconds_for_states, _MIN_STATE_SECONDS)
        )

    @property
    def _seconds_for_states(self) -> float:
        """How long a checkpoint may wait for callbacks in other threads; infinite until a preemption signal arrives."""
        return max(0.0, self._until - time.monotonic()) * _GRACE_SHARE


def _is_same(one: Registration, other: Registration) -> bool:
    """Return whether two registrations have the same function or the same callback, without regard to `Background` wrappers."""
    return one.thing == other.thing if one.callback is None else one.callback is other.callback


def _log_not_ready(registration: Registration, error: Exception) -> None:
    logger.error(
        "state_is_ready of callback %s (%s) cannot be read, so its lane is waited for: %s: %s",
        registration.label, registration.source, type(error).__name__, text_of(error), exc_info=error,
    )  # fmt: skip


def _is_logger(registration: Registration) -> bool:
    """Return whether the callback is a logger: whether it has a method for tables, images, files or hyperparameters."""
    return any(registration.logger_method(name) is not None for name in _LOGGER_METHODS)
