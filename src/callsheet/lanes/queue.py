"""Lanes: queues with one thread each, for work that should not run on the training thread.

The training thread only appends to a bounded deque, because waking a sleeping thread would cost a step tens of microseconds. A
lane's thread checks its queue ten times a second as long as it finds items; when it finds none, it sleeps. A dispatcher thread
checks all queues and wakes the lanes that have items. The dispatcher checks less often while all lanes are idle or check their
queues themselves. This module does not depend on callbacks: an item is anything that the lane's function accepts.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, NamedTuple

from callsheet.core.lane_options import LaneOptions
from callsheet.errors import text_of
from callsheet.lanes.load_warnings import LoadWarnings

logger = logging.getLogger("callsheet")

_starting = threading.RLock()  # this lock is held while a lane's thread is started
_LOOK_SECONDS = 0.1  # time between two checks of a queue; a check wakes a thread, which delays training by about 0.2 ms
_IDLE_LOOK_SECONDS = 0.4  # the longest time between two checks by the dispatcher thread, while all lanes are idle
_WAIT_SECONDS = 0.002  # time between two checks of a lane while the training thread waits for the lane
_EARLIER_SECONDS = 1.0  # how long a lane waits for the handler of an earlier run before it logs a warning
_ITEMS_PER_LOOK = 64  # while a lane always has items, it checks the processor time of its thread after this number of items


class Undelivered(NamedTuple):
    """The items that a lane (a queue with a thread) had not delivered at its deadline.

    `in_hand` says whether the lane was still processing an item, perhaps because the item's function hangs.
    """

    lane: str
    waiting: int
    in_hand: bool

    def __str__(self) -> str:
        stuck = ", and one has not returned" if self.in_hand else ""
        return f"{self.lane}: {self.waiting} waiting{stuck}"


class Lane:
    """One queue and its thread, which processes the items one at a time, in the order in which they were put into the queue.

    Args:
        name: the callback's name, for messages.
        run: called with each item on the lane's thread. Its errors are logged, and the lane continues. None: the first element of
            each item is called with the item.
        options: see `LaneOptions`.
        kind: returns the kind of an item, for `overflow="latest"`.
        finish: called on the lane's thread when it ends.
        earlier: the thread of an earlier run that is still in a handler of the same callback, or None. The lane processes no item
            before this thread has ended, so that two threads do not call the callback at once.
        wake_on_put: whether every `put` wakes the thread, so that an item is processed at once and not within a tenth of a second. It costs
            the caller some tens of microseconds an item.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Any], object] | None,
        options: LaneOptions | None = None,
        *,
        kind: Callable[[Any], object] = type,
        finish: Callable[[], object] = lambda: None,
        earlier: threading.Thread | None = None,
        wake_on_put: bool = False,
    ) -> None:
        self.name = name
        self.options = options or LaneOptions()
        self.dropped = 0
        """How many items were dropped because the queue was full."""
        self.done = 0
        """How many items were processed so far."""
        self.is_inert = False
        """Whether the lane accepts no more items, because it was closed or belongs to the parent of this forked process."""
        self.waited = 0.0
        """How many seconds the end of the run has waited for this lane."""
        self.looks_itself = False
        """Whether the lane's thread checks the queue at present, so that the dispatcher thread need not check it.

        The lane's thread does so as long as it finds items.
        """
        self._limit = self.options.queue
        # The queue length from which `put` calls `look`: 0 until the lane's thread has started, then half of the queue's limit.
        self._looked_from = 0
        self.items: deque[Any] = deque()
        """The items in the queue. With `overflow="latest"`, each item is wrapped in a `_Waiting`."""
        self.room = 0
        """As long as the queue is shorter than `room`, callers may use `items.append`, which is faster than `put`."""
        self._forgets_kinds = self.options.overflow == "latest"
        self._run = run if not self._forgets_kinds else lambda waiting: (run or waiting.item[0])(waiting.item)
        self._kind = kind
        self._finish = finish
        self._wake_on_put = wake_on_put
        self._in_hand = False
        self._has_given_up = False  # True if `put` no longer waits for room in a full queue
        self._load = LoadWarnings(name, self._limit)
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._helping = threading.Lock()  # held by a caller that processes the items itself, since no thread can start
        self._earlier = earlier
        _dispatcher.take(self)

    def put(self, item: Any) -> None:
        """Put `item` into the queue; if the queue is full, do what the option `overflow` says.

        This costs no more than an append, unless the item is the first one or the queue is more than half full.
        """
        waiting = len(self.items)
        if waiting >= self._looked_from:
            # Start the thread at the first item and not later, because no thread can start while the interpreter shuts down.
            if self._thread is None:
                self._begin()
            self.look()  # wake the lane's thread, because the queue may overflow before the dispatcher checks it next
            if waiting >= self._limit and not self._make_room(item):
                return
        if not self.is_inert:
            self.items.append(_Waiting(item) if self._forgets_kinds else item)
            if self._wake_on_put:
                self._wake.set()

    @property
    def waiting(self) -> int:
        """How many items wait in the queue. The item that is being processed is not counted."""
        return len(self.items)

    @property
    def left(self) -> int:
        """How many items are not done yet, including the one that is being processed."""
        return len(self.items) + self._in_hand

    @property
    def is_idle(self) -> bool:
        """Whether the lane (a queue with a thread) has processed all its items."""
        return not self.items and not self._in_hand

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs on the thread of this queue."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Accept no more items, and end the thread after the current item. Items that still wait are dropped (see `drain`)."""
        with _starting:
            self.is_inert, self.room = True, 0
        self.items.clear()
        self._wake.set()

    def look(self) -> None:
        """Wake the queue's thread if the thread sleeps and the queue has items."""
        if not self.items or self._in_hand:
            return
        if self._thread is None and not self._begin():
            self._help()
        self._wake.set()

    def _begin(self) -> bool:
        """Start the queue's thread if it has not been started. Return False if no thread can be started."""
        with _starting:  # the dispatcher's thread, and threads that call `put` or `drain`, may get here at the same time
            if self._thread is None and not self.is_inert:
                thread = threading.Thread(target=self._work, name=f"callsheet-lane-{self.name}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no thread can start while the interpreter shuts down
                    return False
                self._thread, self._looked_from = thread, max(1, self._limit // 2)
                self.room = 0 if self._forgets_kinds else self._looked_from
        return True

    def _help(self) -> None:
        """Process the waiting items in the calling thread. Used if the queue's own thread cannot be started."""
        is_blocked = self._earlier is not None and self._earlier.is_alive()
        if not is_blocked and self._helping.acquire(blocking=False):
            self._thread = threading.current_thread()
            self._load.begin()
            try:
                self._run_waiting_items()
            finally:
                self._thread = None
                self._helping.release()

    def _make_room(self, item: Any) -> bool:
        """Make room for `item` in a full queue, as the option `overflow` says. Return whether `item` may be added."""
        if self._forgets_kinds:
            newer = {self._kind(item)}
            for waiting in reversed(list(self.items)):
                if (kind := self._kind(waiting.item)) in newer:
                    self._forget(waiting)
                newer.add(kind)
            return True  # `item` may be added even to a full queue, because the queue now holds only the latest item of each kind
        if self.options.overflow == "block" and not self._has_given_up and not self.is_own_thread:
            if self._wait_for_room():
                return True
            self._has_given_up = True
            logger.error(
                "The lane of %s has made no progress for %g s with %d events waiting: from now on the oldest events are dropped",
                self.name,
                self.options.deadline,
                len(self.items),
            )
        try:
            self.items.popleft()
            self.dropped += 1
        except IndexError:  # the lane's thread has emptied the queue in the meantime
            pass
        return True

    def _wait_for_room(self) -> bool:
        """Wait until the queue has room. Return False if the queue's thread makes no progress before the deadline."""
        left, now = len(self.items), time.monotonic()
        moved_at = now
        while len(self.items) >= self._limit and not self.is_inert:
            self.look()
            time.sleep(_WAIT_SECONDS)
            before, now = now, time.monotonic()
            self._load.add_wait(before, now)
            if len(self.items) < left:
                left, moved_at = len(self.items), now
            elif now - moved_at > self.options.deadline:
                return False
        return True

    def _forget(self, waiting: _Waiting) -> None:
        try:
            self.items.remove(waiting)
        except (ValueError, IndexError):  # the lane's thread has removed this item or another one at the same time
            return
        self.dropped += 1

    def _work(self) -> None:
        self._load.begin()
        while not self.is_inert:
            done = self.done
            self._wake.wait(_LOOK_SECONDS if self.looks_itself else None)
            self._wake.clear()
            if self.items and self._wait_for_earlier_thread():
                self._run_waiting_items()
            self.looks_itself = self.done > done
        self._finish()

    @property
    def busy_thread(self) -> threading.Thread | None:
        """The thread that is processing an item of this lane, or None."""
        return self._thread if self._in_hand else None

    def _wait_for_earlier_thread(self) -> bool:
        """Wait for the thread of an earlier run that is still in a handler of the callback. Return False if this lane is closed."""
        is_logged = False
        while self._earlier is not None and self._earlier.is_alive():
            self._earlier.join(_EARLIER_SECONDS)
            if self.is_inert:
                return False
            if self._earlier.is_alive() and not is_logged:
                is_logged = True
                logger.warning(
                    "A handler of callback %s that an earlier run has called has not returned yet. The events of this run wait until it "
                    "returns, because two threads must not call a callback at once; use another callback object for each run",
                    self.name,
                )  # fmt: skip
        self._earlier = None
        return True

    def _run_waiting_items(self) -> None:
        items, popleft, run = self.items, self.items.popleft, self._run
        self._in_hand = True  # set before the item leaves the queue, so that `left` counts the item at any time
        while items:
            for _ in range(_ITEMS_PER_LOOK):
                try:
                    item = popleft()
                except IndexError:  # the queue is empty, perhaps because its last item was just dropped
                    break
                try:
                    (run or item[0])(item)
                except BaseException as error:  # catches SystemExit too, which must not end the lane's thread
                    logger.error(
                        "An error in the lane of %s: %s: %s", self.name, type(error).__name__, text_of(error), exc_info=error
                    )
                self.done += 1
            item = None  # release the item, so that it does not stay in memory while the lane waits
            self._load.check_thread()
        self._in_hand = False


class _Waiting:
    """A wrapper around one item in a queue. It equals only itself, so `remove` never removes another wrapper with an equal item."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item


class _Dispatcher:
    """The thread that checks the queues of all lanes of this process, and wakes the lanes that have items."""

    def __init__(self) -> None:
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, lane: Lane) -> None:
        """Begin to check the queue of this lane regularly."""
        with self._lock:
            self._lanes.add(lane)
            if self._thread is None:
                thread = threading.Thread(target=self._look, name="callsheet-lanes", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # at the interpreter's shutdown, no thread can start; `drain` checks the lane instead
                    return
                self._thread = thread

    @property
    def lanes(self) -> list[Lane]:
        """All lanes of this process."""
        with self._lock:
            return list(self._lanes)

    def leave(self, lane: Lane) -> None:
        """Stop checking the queue of this lane."""
        with self._lock:
            self._lanes.discard(lane)

    def forget_all(self) -> None:
        """In a forked child process, forget all lanes, because their threads run only in the parent."""
        global _starting
        _starting = threading.RLock()
        lanes = list(self._lanes)
        self.__init__()  # type: ignore[misc]  # `__init__` resets all attributes
        for lane in lanes:
            lane.is_inert, lane.room = True, 0
            lane.items.clear()

    def _look(self) -> None:
        pause = _LOOK_SECONDS
        while True:
            time.sleep(pause)
            with self._lock:
                lanes = list(self._lanes)
                if not lanes:
                    self._thread = None
                    return
            is_idle = True
            for lane in lanes:
                if not lane.looks_itself:
                    is_idle = is_idle and lane.is_idle
                    lane.look()
            pause = min(2 * pause, _IDLE_LOOK_SECONDS) if is_idle else _LOOK_SECONDS
            del lane, lanes  # drop these references, so that a lane that nobody uses can be freed


_dispatcher = _Dispatcher()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_dispatcher.forget_all)


def drain(
    lanes: Iterable[Lane],
    deadline: float | Callable[[Lane], float] | None = None,
    *,
    share: float = 1.0,
    at_most: float = inf,
) -> list[Undelivered]:
    """Wait until the lanes (queues with threads) have processed all items. Return the lanes with items left at their deadlines.

    Args:
        lanes: all are waited for at the same time.
        deadline: seconds for all lanes, or a function that returns the seconds of a lane. None: each lane's own deadline, less the time
            that earlier calls have waited for it.
        share: used if `deadline` is None: the share of its deadline that a lane may use up in this call and earlier ones.
        at_most: the seconds after which this call returns in any case.
    """
    began = time.monotonic()
    seconds_of = deadline if callable(deadline) else lambda _: deadline
    busy = [lane for lane in lanes if not lane.is_inert and not lane.is_own_thread]
    left: list[Undelivered] = []
    pause = 0.0002
    while busy:
        seconds = time.monotonic() - began
        for lane in busy[:]:
            own = seconds_of(lane)
            is_late = seconds >= min(at_most, share * lane.options.deadline - lane.waited if own is None else own)
            if not lane.is_idle and not is_late:
                lane.look()
                continue
            if not lane.is_idle:
                left.append(Undelivered(lane.name, lane.waiting, lane._in_hand))
            if deadline is None:
                lane.waited += seconds
            busy.remove(lane)
        if busy:
            time.sleep(pause)
            pause = min(_WAIT_SECONDS, pause * 1.5)
    return left


def _flush() -> None:
    """At the interpreter's end, drain all lanes, including those that were not closed."""
    for undelivered in drain(_dispatcher.lanes):
        logger.error("The program ends, and a lane has not delivered all events: %s", undelivered)


atexit.register(_flush)


def close(lanes: Iterable[Lane]) -> None:
    """Close these lanes (queues with threads): accept no more items, and end their threads."""
    for lane in lanes:
        lane.close()
        _dispatcher.leave(lane)
