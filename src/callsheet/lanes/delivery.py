"""Delivers events to callbacks in lanes (threads, processes), with snapshots instead of the context."""

from __future__ import annotations

import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from callsheet.core.background import END_SECONDS, inner
from callsheet.core.call_sheet import HandlerEntry, Registration
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.wrappers import record_failure
from callsheet.errors import text_of
from callsheet.lanes.capture import DeviceNumbers, SnapshotCapture, Values, copy_value
from callsheet.lanes.queue import Lane, close, drain
from callsheet.lanes.snapshot import Inbox, Snapshot

if TYPE_CHECKING:
    import asyncio

    from callsheet.lanes.process import Process


# The threads that were still in a handler of a callback when their run ended, by the ids of the callbacks. As long as such a thread is
# in the handler, it keeps the callback alive, so no other callback has this id.
_left_in_handler: weakref.WeakValueDictionary[int, threading.Thread] = weakref.WeakValueDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_left_in_handler.clear)  # the threads do not run in a forked child


class LaneExit(Exception):
    """Takes the place of an exception that would end the program, such as SystemExit, in a callback that runs in another thread.

    A `LaneExit` is not raised, but logged and counted as a failure of the callback.
    """


class CallbackLane:
    """A lane with its callback: a queue of events, and the thread or process that calls the callback's handlers for them."""

    def __init__(self, registration: Registration, inbox: Inbox) -> None:
        self.registration = registration
        owner = registration.thing if isinstance(registration.thing, Callback) else Callback
        self.needs: tuple[str, ...] = owner.snapshot_fields
        self.inbox = inbox
        self._process: Process | None = cast("Process", registration.thing) if owner.lane == "process" else None
        # Find out whether a thread of an earlier run is still in a handler of the callback. A `Process` needs no such check, because
        # it makes only one call at a time.
        callback = registration.callback if self._process is None else None
        earlier = _left_in_handler.get(id(callback)) if callback is not None else None
        if earlier is threading.current_thread():  # that handler has itself started this run, so the run must not wait for it
            earlier = None
        self.lane = Lane(registration.label, None, owner.lane_options, kind=_kind, finish=self._finish, earlier=earlier)
        self._runner: asyncio.Runner | None = None
        if self._process is not None:
            self._process.begin(self)

    def end(self) -> None:
        """End the callback's thread, and also its process if no other run uses the process. A busy process is killed.

        `join` waits until the process has exited.
        """
        is_busy = not self.lane.is_idle
        close([self.lane])
        if self._process is not None:
            self._process.end(self, at_once=is_busy)
        elif (thread := self.lane.busy_thread) is not None and self.registration.callback is not None:
            _left_in_handler[id(self.registration.callback)] = thread

    def join(self, seconds: float) -> None:
        """Wait until the callback's process, if any, has exited. After `seconds`, kill it. The caller must call `end` before."""
        if self._process is not None:
            self._process.join(seconds)

    def bind(self, method: Callable[..., Any], /, **payload: Any) -> Callable[[Snapshot], Any]:
        """Return a function that calls the callback's method on the callback's thread or in its process."""
        if (process := self._process) is not None:
            return lambda snapshot: process.call(method.__name__, snapshot, payload)
        return partial(method, **payload) if payload else method

    def await_answer(self, answer: Any) -> None:
        """Run the awaitable that an `async def` handler returned, until it is done."""
        if inspect.isawaitable(answer):
            self._await(answer)

    def begin_to_finish_tasks(self) -> bool:
        """Let the callback's thread wait for the asyncio tasks that handlers have started. Return False if there are none.

        The wait ends with the lane's deadline. `finish_tasks` waits for it.
        """
        if self._runner is None or not self.lane.is_idle:
            return False
        import asyncio

        from callsheet.lanes.tasks import finish_tasks

        if not asyncio.all_tasks(self._runner.get_loop()):
            return False
        runner, label = self._runner, f"callback {self.registration.label}"

        def finish(_: Values) -> None:
            runner.run(finish_tasks(self.seconds_left, label))

        finish.kind = "tasks"  # type: ignore[attr-defined]  # the lane reads `kind` from the items of its queue
        self.lane.put((finish,))
        return True

    @property
    def seconds_left(self) -> float:
        """How long the end of the run may still wait for this lane."""
        return max(0.0, self.lane.options.deadline - self.lane.waited)

    def _await(self, result: Any) -> None:
        import asyncio

        if self._runner is None:
            # Use one event loop for all events of a callback, because a network client works only in the loop that created it.
            self._runner = asyncio.Runner()

        async def await_result() -> None:
            await result

        self._runner.run(await_result())

    def _finish(self) -> None:
        if self._runner is not None:
            self._runner.close()


def join(lanes: Iterable[CallbackLane]) -> None:
    """Wait, at most `END_SECONDS` in total, for the processes of these lanes to exit. The caller must first call `end` on each."""
    until = time.monotonic() + END_SECONDS
    for lane in lanes:
        lane.join(max(0.0, until - time.monotonic()))


def finish_tasks(lanes: Iterable[CallbackLane]) -> None:
    """Wait for the asyncio tasks that handlers in these lanes have started, for each lane until its deadline."""
    seconds = {each.lane: each.seconds_left for each in lanes if each.begin_to_finish_tasks()}
    drain(seconds, lambda lane: seconds[lane] + END_SECONDS)


class LaneDelivery:
    """Delivers one event, or one call of a logger's method, to one callback in a lane (a background thread or process).

    Args:
        event: the event's or method's name, for messages about failures.
        kind: identifies what is delivered; a lane with `overflow="latest"` keeps only the newest item of each kind.
        registration: the callback.
        lane: the callback's lane.
        handler: called in the lane with a snapshot.
        capture: captures the snapshots.
    """

    def __init__(
        self,
        event: str,
        kind: object,
        registration: Registration,
        lane: CallbackLane,
        handler: Callable[[Snapshot], Any],
        capture: SnapshotCapture,
    ) -> None:
        self._event, self._registration, self._lane, self._capture = event, registration, lane, capture
        self._deliver = capture.deliverer(event, registration, handler, lane.await_answer, self._fails)
        self._deliver.kind = kind  # type: ignore[attr-defined]  # the lane reads `kind` from the items of its queue

    @classmethod
    def of_line(cls, entry: HandlerEntry, lane: CallbackLane, numbers: DeviceNumbers) -> Callable[[Context], None]:
        """Return a function that puts the event into the lane's queue.

        The training thread calls the function in place of the handler, which runs in another thread or process.
        """
        capture = SnapshotCapture(entry.event, lane.needs, entry.registration.label, lane.inbox, numbers)
        made = cls(str(entry.event), entry.event, entry.registration, lane, lane.bind(entry.handler), capture)
        return capture.enqueuer(made._deliver, entry.registration, lane.lane, made.put)

    @classmethod
    def put_call(cls, lane: CallbackLane, method: str, ctx: Context, payload: dict[str, Any]) -> None:
        """Put one call of a logger's method, such as `log_table`, into the queue of the logger's thread."""
        assert isinstance(lane.registration.thing, Callback)
        called = getattr(inner(lane.registration.thing), method)
        capture = SnapshotCapture(ctx.event, lane.needs, lane.registration.label, lane.inbox, DeviceNumbers())
        try:
            handler = lane.bind(called, **copy_value(payload, {}))
        except Exception as error:  # a value that cannot be copied counts as a failure of the logger
            record_failure(lane.registration, method, ctx, error)
        else:
            cls(method, (method, payload.get("name")), lane.registration, lane, handler, capture).put(ctx)

    def put(self, ctx: Context) -> None:
        """Put the event into the queue of the callback's thread.

        The training thread calls this method if a value must be copied or the callback may be disabled or muted.
        """
        if self._registration.is_off and self._registration.is_silent_at(self._event):
            return
        try:
            values = self._capture.take(self._deliver, ctx)
        except Exception as error:  # a value that cannot be copied counts as a failure of the callback
            record_failure(self._registration, self._event, ctx, error)
        else:
            self._lane.lane.put(values)

    def _fails(self, ctx: Snapshot, error: BaseException) -> None:
        """Log the error of a handler, and count it as a failure of the callback.

        This method is called on the lane's thread. It also handles errors that would end a program, such as SystemExit.
        """
        record_failure(self._registration, self._event, ctx, error if isinstance(error, Exception) else as_failure(error))


def _kind(values: Values) -> object:
    return values[0].kind


def as_failure(error: BaseException) -> LaneExit:
    """Return a `LaneExit` to use in place of an error that would end the program, such as SystemExit."""
    failure = LaneExit(f"{type(error).__name__}: {text_of(error)}")
    failure.__cause__ = error
    return failure
