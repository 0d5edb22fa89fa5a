"""Lanes: queues with a thread each, for what should not run on the training thread.

The training thread only appends to a bounded deque: waking a sleeping thread would cost a step tens of microseconds. A lane's thread looks at its
queue ten times a second, as long as it finds something there; then it sleeps, until a dispatcher wakes it, which looks at all queues as often, and
less often while all are empty or looked at. This file knows nothing of callbacks: an item is whatever the lane's function takes.
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
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from callsheet.errors import ConfigError, did_you_mean, text_of

logger = logging.getLogger("callsheet")

OVERFLOWS = ("block", "drop_oldest", "latest")

_starting = threading.RLock()  # of lanes' threads
_LOOK_SECONDS = 0.1  # a thread that wakes up costs the training thread a fifth of a millisecond, however little it does
_IDLE_LOOK_SECONDS = 0.4  # to which that grows while no lane has anything to do
_WAIT_SECONDS = 0.002  # between the looks of somebody who waits
_BUSY_SHARE = 0.02  # of the wall clock that a lane may spend holding the interpreter
_BUSY_AFTER_SECONDS = 5.0  # until which nobody is named
_BUSY_SECONDS = 0.5  # of a core, after which a lane is named at once
_BLOCKED_SECONDS = 0.5  # that training has waited for a full queue, after which the lane is named
_LOOK_EVERY = 64  # so many items, in a lane that is never empty, is it looked whether to name it


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """How a lane behaves.

    Args:
        queue: how many events may wait.
        overflow: what happens when that many do: `block` has the training thread wait, `drop_oldest` forgets the oldest, `latest` keeps
            of each kind of event the newest alone. What is forgotten is counted.
        deadline: seconds that the end waits for it in all. A queue that has been full for so long while its lane stands still is not
            waited for again.

    Raises:
        ConfigError: a value that cannot work.
    """

    queue: int = 1024
    overflow: str = "block"
    deadline: float = 10.0

    def __post_init__(self) -> None:
        if isinstance(self.queue, bool) or not isinstance(self.queue, int) or self.queue < 1:
            raise ConfigError(f"queue={self.queue!r}: give how many events may wait, at least one")
        if self.overflow not in OVERFLOWS:
            raise ConfigError(
                f"unknown overflow {self.overflow!r}{did_you_mean(str(self.overflow), OVERFLOWS)} (one of {', '.join(OVERFLOWS)})"
            )
        if not self.deadline > 0:
            raise ConfigError(f"deadline={self.deadline!r}: give seconds above zero")


class Undelivered(NamedTuple):
    """What a lane had not done when the deadline ran out; `in_hand` says whether it was at work, or stuck."""

    lane: str
    waiting: int
    in_hand: bool

    def __str__(self) -> str:
        stuck = ", and one has not returned" if self.in_hand else ""
        return f"{self.lane}: {self.waiting} waiting{stuck}"


class Lane:
    """One queue and its thread. Items are done one at a time, in the order in which they were put.

    Args:
        name: of whose items they are, for messages.
        run: takes an item; runs on the lane's thread. What it raises is logged, and the lane goes on. None: the first in the item does that.
        kind: of an item, by which `latest` compares.
        finish: called on the lane's thread when it ends.
        wake_on_put: whether every `put` wakes the thread, so that an item is handled at once rather than within a tenth of a second. It costs the
            caller some tens of microseconds an item.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[Any], object] | None,
        options: LaneOptions | None = None,
        *,
        kind: Callable[[Any], object] = type,
        finish: Callable[[], object] = lambda: None,
        wake_on_put: bool = False,
    ) -> None:
        self.name = name
        self.options = options or LaneOptions()
        self.dropped = 0
        """How many items were forgotten since a queue was full."""
        self.done = 0
        """How many items were worked off."""
        self.is_inert = False
        """It takes nothing any more: it was closed, or belongs to the process that this one was forked from."""
        self.waited = 0.0
        """Seconds that the end has waited for it."""
        self.looks_itself = False
        """It has just had something to do, and its thread looks whether there is more: the dispatcher need not."""
        self._limit = self.options.queue
        self._looked_from = 0  # how many wait when whoever puts looks by itself; half of the queue, once the thread runs
        self.items: deque[Any] = deque()
        """What waits; with `latest` each as a `_Waiting`."""
        self.room = 0
        """While fewer wait, `items.append` may stand for `put`."""
        self._forgets_kinds = self.options.overflow == "latest"
        self._run = run if not self._forgets_kinds else lambda waiting: (run or waiting.item[0])(waiting.item)
        self._kind = kind
        self._finish = finish
        self._wake_on_put = wake_on_put
        self._in_hand = False
        self._has_given_up = False  # on waiting for room
        self._is_named = False  # as one that burns the interpreter
        self._blocked = 0.0  # seconds that training has waited for room in the queue
        self._blocked_since = inf  # when it first did
        self._is_block_named = False
        self._looked_at = time.monotonic(), 0.0  # and the processor's time of its thread
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._helping = threading.Lock()  # where there is no thread
        _dispatcher.take(self)

    def put(self, item: Any) -> None:
        """Hand `item` over. Costs an append, unless it is the first or the queue is filling up."""
        waiting = len(self.items)
        if waiting >= self._looked_from:
            if self._thread is None:  # the first item: when the interpreter goes down no thread can be started any more
                self._begin()
            self.look()  # the dispatcher would come too late
            if waiting >= self._limit and not self._make_room(item):
                return
        if not self.is_inert:
            self.items.append(_Waiting(item) if self._forgets_kinds else item)
            if self._wake_on_put:
                self._wake.set()

    @property
    def waiting(self) -> int:
        """How many items wait, without the one in hand."""
        return len(self.items)

    @property
    def left(self) -> int:
        """How many items are not done, with the one in hand."""
        return len(self.items) + self._in_hand

    @property
    def is_idle(self) -> bool:
        """Everything that was put is done."""
        return not self.items and not self._in_hand

    @property
    def is_own_thread(self) -> bool:
        """The caller is an item of this lane."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Take nothing more; the thread ends when the item in hand is done. What waits is forgotten: drain first."""
        with _starting:
            self.is_inert, self.room = True, 0
        self.items.clear()
        self._wake.set()

    def look(self) -> None:
        """For the dispatcher, and whoever waits: wake the thread if there is something to do and it sleeps."""
        if not self.items or self._in_hand:
            return
        if self._thread is None and not self._begin():
            self._help()
        self._wake.set()

    def _begin(self) -> bool:
        """Have a thread; False where none can be started."""
        with _starting:  # the dispatcher looks, and so do who puts and who drains
            if self._thread is None and not self.is_inert:
                thread = threading.Thread(target=self._work, name=f"callsheet-lane-{self.name}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is going down
                    return False
                self._thread, self._looked_from = thread, max(1, self._limit // 2)
                self.room = 0 if self._forgets_kinds else self._looked_from
        return True

    def _help(self) -> None:
        """Do the work here and now."""
        if self._helping.acquire(blocking=False):
            self._thread = threading.current_thread()
            try:
                self._work_off()
            finally:
                self._thread = None
                self._helping.release()

    def _make_room(self, item: Any) -> bool:
        """The queue is full: whether `item` may be put."""
        if self._forgets_kinds:
            newer = {self._kind(item)}
            for waiting in reversed(list(self.items)):
                if (kind := self._kind(waiting.item)) in newer:
                    self._forget(waiting)
                newer.add(kind)
            return True  # as many as there are kinds may wait
        if self.options.overflow == "block" and not self._has_given_up and not self.is_own_thread:
            if self._waited_for_room():
                return True
            self._has_given_up = True
            logger.error(
                "the lane of %s has stood still for %g s with %d events waiting: from here on the oldest are dropped",
                self.name,
                self.options.deadline,
                len(self.items),
            )
        try:
            self.items.popleft()
            self.dropped += 1
        except IndexError:  # the thread was faster
            pass
        return True

    def _waited_for_room(self) -> bool:
        """Wait as long as the lane gets on; False when it stood still for the deadline."""
        left, now = len(self.items), time.monotonic()
        moved_at = now
        self._blocked_since = min(self._blocked_since, now)
        while len(self.items) >= self._limit and not self.is_inert:
            self.look()
            time.sleep(_WAIT_SECONDS)
            before, now = now, time.monotonic()
            self._blocked += now - before
            self._warn_if_blocked(now)
            if len(self.items) < left:
                left, moved_at = len(self.items), now
            elif now - moved_at > self.options.deadline:
                return False
        return True

    def _warn_if_blocked(self, now: float) -> None:
        """Say once that a slow lane throttles training."""
        if self._is_block_named or self._blocked < _BLOCKED_SECONDS:
            return
        self._is_block_named = True
        logger.warning(
            "Training waited %.1f s of the last %.1f s for callback %s: its lane's queue of %d events is full (overflow='block'). "
            "Let it handle fewer events (an interval), or pass overflow='drop_oldest' or overflow='latest'",
            self._blocked,
            now - self._blocked_since,
            self.name,
            self._limit,
        )

    def _forget(self, waiting: _Waiting) -> None:
        try:
            self.items.remove(waiting)
        except (ValueError, IndexError):  # it is being done, or another is and they moved up
            return
        self.dropped += 1

    def _work(self) -> None:
        self._looked_at = time.monotonic(), time.thread_time()
        while not self.is_inert:
            done = self.done
            self._wake.wait(_LOOK_SECONDS if self.looks_itself else None)
            self._wake.clear()
            self._work_off()
            self.looks_itself = self.done > done
        self._finish()

    def _work_off(self) -> None:
        items, popleft, run = self.items, self.items.popleft, self._run
        self._in_hand = True  # before one leaves the queue: at every moment it is in one of the two
        while items:
            for _ in range(_LOOK_EVERY):
                try:
                    item = popleft()
                except IndexError:  # that was all, or it was dropped meanwhile
                    break
                try:
                    (run or item[0])(item)
                except BaseException as error:  # SystemExit too: it is meant for a program, and a lane is none
                    logger.error("the lane of %s: %s: %s", self.name, type(error).__name__, text_of(error), exc_info=error)
                self.done += 1
            item = None  # nothing is held while it waits
            self._name_if_busy()
        self._in_hand = False

    def _name_if_busy(self) -> None:
        """Name a lane that computes on its thread: its callback takes the interpreter from the training thread."""
        if self._is_named:
            return
        (began, used), now = self._looked_at, (time.monotonic(), time.thread_time())
        seconds, busy = now[0] - began, now[1] - used
        if seconds < _BUSY_AFTER_SECONDS and busy < _BUSY_SECONDS:
            return
        self._looked_at = now
        if busy >= _BUSY_SHARE * seconds:
            self._is_named = True
            logger.warning(
                "Callback %s used %.2g s of processor time in its lane in the last %.2g s (%.0f %%). Python code in a thread stops the training "
                "thread for as long as it holds the interpreter lock: let the callback do less, or run it in a process of its own with "
                "callsheet.Process(...)",
                self.name,
                busy,
                seconds,
                100 * busy / seconds,
            )


class _Waiting:
    """One item of a queue: equal to itself alone, whatever it holds."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item


class _Dispatcher:
    """One thread that looks at all lanes of this process."""

    def __init__(self) -> None:
        self._lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def take(self, lane: Lane) -> None:
        """Look at this lane from now on."""
        with self._lock:
            self._lanes.add(lane)
            if self._thread is None:
                thread = threading.Thread(target=self._look, name="callsheet-lanes", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is going down: who drains looks
                    return
                self._thread = thread

    @property
    def lanes(self) -> list[Lane]:
        """All that there are."""
        with self._lock:
            return list(self._lanes)

    def leave(self, lane: Lane) -> None:
        """Look at it no more."""
        with self._lock:
            self._lanes.discard(lane)

    def forget_all(self) -> None:
        """In a forked child: the lanes are the parent's, and so are the threads and whoever held the lock."""
        global _starting
        _starting = threading.RLock()
        lanes = list(self._lanes)
        self.__init__()  # type: ignore[misc]  # as new
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
            del lane, lanes  # one that nobody holds any more may go


_dispatcher = _Dispatcher()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_dispatcher.forget_all)


def drain(
    lanes: Iterable[Lane], deadline: float | Callable[[Lane], float] | None = None, *, share: float = 1.0
) -> list[Undelivered]:
    """Wait until the lanes have done everything; what those had left whose time ran out.

    Args:
        deadline: seconds, for all of them, or what gives those of a lane. None: to each its own deadline, less what the end has waited
            for it before. They run at the same time, so that the longest is all that this takes.
        share: of the lanes' own deadlines, that may have passed after this.
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
            is_late = seconds >= (share * lane.options.deadline - lane.waited if own is None else own)
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
    """The interpreter ends: what lanes have still to do is done, also for those that nobody closes."""
    for undelivered in drain(_dispatcher.lanes):
        logger.error("the program ends, and a lane has not told everything: %s", undelivered)


atexit.register(_flush)


def close(lanes: Iterable[Lane]) -> None:
    """The lanes take nothing more, and their threads end."""
    for lane in lanes:
        lane.close()
        _dispatcher.leave(lane)
