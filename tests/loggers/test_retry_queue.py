"""Entries that cannot be sent are kept and sent later."""

from __future__ import annotations

import time
from typing import Any

import pytest

from callsheet.loggers.support.retry_queue import RetryQueue


class Destination:
    """A destination for entries, which fails while `is_down`."""

    def __init__(self, *, takes: float = 0.0) -> None:
        self.is_down = False
        self.takes = takes
        self.sent: list[list[Any]] = []
        self.attempts = 0

    def send(self, entries: list[Any]) -> None:
        self.attempts += 1
        time.sleep(self.takes)
        if self.is_down or "bad" in entries:
            raise ValueError("bad entry") if "bad" in entries else ConnectionError("down")
        self.sent.append(list(entries))


def wait_until_sent(queue: RetryQueue) -> None:
    """Wait until the pause is over and the waiting entries are sent."""
    deadline = time.monotonic() + 30
    while queue.waiting and time.monotonic() < deadline:
        queue.put([])


def test_entries_are_sent_at_once_and_in_portions() -> None:
    line = Destination()
    RetryQueue(line.send, at_once=2).put([1, 2, 3])
    assert line.sent == [[1, 2], [3]]


def test_entries_that_could_not_be_sent_are_sent_first_later() -> None:
    line = Destination()
    queue = RetryQueue(line.send, at_once=10)
    line.is_down = True
    with pytest.raises(ConnectionError):
        queue.put([1])
    line.is_down = False
    queue.put([2])
    assert line.sent == []  # no attempt in the next call: three failures in a row would disable a logger
    wait_until_sent(queue)
    queue.put([3])
    assert line.sent == [[1, 2], [3]]


def test_the_pause_is_longer_than_the_attempt() -> None:
    line = Destination(takes=0.5)
    queue = RetryQueue(line.send, at_once=1000)
    line.is_down = True
    with pytest.raises(ConnectionError):
        queue.put([1])
    for entry in range(100):
        queue.put([entry])
    assert line.attempts == 1
    line.is_down = False
    queue.flush()
    assert len(line.sent[0]) == 101
    assert queue.waiting == []


def test_the_oldest_entries_are_dropped_first() -> None:
    line = Destination()
    line.is_down = True
    queue = RetryQueue(line.send, at_once=10, limit=3)
    with pytest.raises(ConnectionError):
        queue.put([1, 2, 3])
    queue.put([4])
    assert queue.waiting == [2, 3, 4]


def test_an_entry_that_can_never_be_sent_does_not_block_the_rest() -> None:
    line = Destination()
    queue = RetryQueue(line.send, at_once=1, is_hopeless=lambda error: isinstance(error, ValueError))
    with pytest.raises(ValueError, match="bad entry"):
        queue.put([1, "bad", 2])
    wait_until_sent(queue)
    assert line.sent == [[1], [2]]
