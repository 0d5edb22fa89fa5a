"""A queue of entries for an experiment tracker. While the tracker cannot be reached, the queue keeps the entries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

_PAUSE_FACTOR = 10  # after a failed attempt, the pause is this many times as long as the attempt took


class RetryQueue:
    """Sends entries to a tracker in order. Entries that cannot be sent are kept, to be sent later.

    After a failure it pauses for ten times as long as the attempt took, and for at least one call of `put`. An unavailable
    tracker must not block the logger's thread (its lane) for long, because the thread's queue of events is bounded.

    Args:
        send: sends some entries, and raises an exception if that fails.
        at_once: the most entries to pass to `send`.
        limit: the most entries to keep; the oldest are dropped first.
        is_hopeless: returns whether sending the same entries again would raise the same error. Such entries are dropped.
    """

    def __init__(
        self,
        send: Callable[[list[Any]], None],
        *,
        at_once: int,
        limit: int = 100_000,
        is_hopeless: Callable[[Exception], bool] = lambda error: False,
    ) -> None:
        self.waiting: list[Any] = []
        self._send = send
        self._at_once = at_once
        self._limit = limit
        self._is_hopeless = is_hopeless
        self._not_before = 0.0
        self._has_failed = False

    def put(self, entries: Sequence[Any]) -> None:
        """Queue `entries`. Then send all queued entries, unless sending failed a short time ago. Raise what `send` raises."""
        self.waiting += entries
        del self.waiting[: -self._limit]
        if self._has_failed:
            self._has_failed = False
        elif time.monotonic() >= self._not_before:
            self.flush()

    def flush(self) -> None:
        """Send all queued entries now."""
        start = time.monotonic()
        while self.waiting:
            some = self.waiting[: self._at_once]
            try:
                self._send(some)
            except Exception as error:  # `send` may raise any error of the client library
                self._has_failed, now = True, time.monotonic()
                self._not_before = now + _PAUSE_FACTOR * (now - start)
                if self._is_hopeless(error):
                    del self.waiting[: len(some)]
                raise
            del self.waiting[: len(some)]
