"""Warnings that a lane slows training."""

from __future__ import annotations

import logging
import time
from math import inf

logger = logging.getLogger("callsheet")

_BUSY_SHARE = 0.02  # a lane whose thread computes for more than this fraction of the time causes a warning
_BUSY_CHECK_SECONDS = 5.0  # the interval at which a lane checks how much processor time its thread has used
_BUSY_SECONDS = 0.5  # after this much processor time since the last check, check again before the interval is over
_BLOCKED_SECONDS = 0.5  # how long training must have waited for a full queue before a warning


class LoadWarnings:
    """Warns if a lane's thread computes a lot, and if training waits because the lane's queue is full. Each warning is logged once.

    Args:
        name: the callback's name.
        limit: the number of items that the queue can hold.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._has_warned_busy = self._has_warned_blocked = False
        self._blocked = 0.0  # seconds that training has waited for room in the queue
        self._blocked_since = inf  # when training first waited for room in the queue; inf if training has not waited
        self._checked = time.monotonic(), 0.0  # the wall clock and the thread's processor time at the last check

    def begin(self) -> None:
        """Begin to measure the processor time of the lane's thread, which calls this method."""
        self._checked = time.monotonic(), time.thread_time()

    def check_thread(self) -> None:
        """Warn if the lane's thread, which calls this method, computes a lot. While it runs Python code, training must wait."""
        if self._has_warned_busy:
            return
        (began, used), now = self._checked, (time.monotonic(), time.thread_time())
        seconds, busy = now[0] - began, now[1] - used
        if seconds < _BUSY_CHECK_SECONDS and busy < _BUSY_SECONDS:
            return
        self._checked = now
        if busy >= _BUSY_SHARE * seconds:
            self._has_warned_busy = True
            logger.warning(
                "Callback %s used %.2g s of processor time in its lane in the last %.2g s (%.0f %%). Python code in a thread stops the training "
                "thread for as long as it holds the interpreter lock: let the callback do less, or run it in a process of its own with "
                "callsheet.Process(...)",
                self._name,
                busy,
                seconds,
                100 * busy / seconds,
            )

    def add_wait(self, began: float, ended: float) -> None:
        """Record that training waited for room in the queue between these two times of `time.monotonic`. Warn if it waited for long."""
        self._blocked_since = min(self._blocked_since, began)
        self._blocked += ended - began
        if self._has_warned_blocked or self._blocked < _BLOCKED_SECONDS:
            return
        self._has_warned_blocked = True
        logger.warning(
            "Training waited %.1f s of the last %.1f s for callback %s: its lane's queue of %d events is full (overflow='block'). "
            "Let it handle fewer events (an interval), or pass overflow='drop_oldest' or overflow='latest'",
            self._blocked,
            ended - self._blocked_since,
            self._name,
            self._limit,
        )
