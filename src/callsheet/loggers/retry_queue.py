"""What is on its way to a tracker: it outlives the tracker's absence."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

_SHARE = 10  # a tracker that is down may take one part in so many of the time


class RetryQueue:
    """Sends entries in their order; what cannot be sent is kept, and sent with what comes later.

    After a failure a pause is made, of ten times what the attempt took and until at least one more call: a tracker that is down must
    hold up its lane little, since the lane's queue is bounded, and must not be given up.

    Args:
        send: takes a few entries, and raises where that fails.
        at_once: how many it takes.
        limit: how many are kept; the oldest are given up first.
        is_hopeless: whether an error of `send` is the entries' own, so that sending them again would fail again; they are given up.
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
        """Send `entries`, after those that wait; or have them wait, where it failed a short while ago. Raises what `send` raises."""
        self.waiting += entries
        del self.waiting[: -self._limit]
        if self._has_failed:
            self._has_failed = False
        elif time.monotonic() >= self._not_before:
            self.flush()

    def flush(self) -> None:
        """Send what waits, now."""
        start = time.monotonic()
        while self.waiting:
            some = self.waiting[: self._at_once]
            try:
                self._send(some)
            except Exception as error:
                self._has_failed, now = True, time.monotonic()
                self._not_before = now + _SHARE * (now - start)
                if self._is_hopeless(error):
                    del self.waiting[: len(some)]
                raise
            del self.waiting[: len(some)]
