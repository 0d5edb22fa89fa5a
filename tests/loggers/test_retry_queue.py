"""Entries that cannot be sent wait for better times."""

from __future__ import annotations

import time
from typing import Any

import pytest

from callsheet.loggers.support.retry_queue import RetryQueue


class Line:
    """A line to somewhere, which may be down."""

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


def pass_by(queue: RetryQueue) -> None:
    """Wait until the pause is over and what waited is sent."""
    deadline = time.monotonic() + 30
    while queue.waiting and time.monotonic() < deadline:
        queue.put([])


def test_entries_are_sent_at_once_and_in_portions() -> None:
    line = Line()
    RetryQueue(line.send, at_once=2).put([1, 2, 3])
    assert line.sent == [[1, 2], [3]]


def test_what_could_not_be_sent_comes_first_when_it_can() -> None:
    line = Line()
    queue = RetryQueue(line.send, at_once=10)
    line.is_down = True
    with pytest.raises(ConnectionError):
        queue.put([1])
    line.is_down = False
    queue.put([2])
    assert line.sent == []  # the next call is never an attempt: three failures in a row would switch a logger off
    pass_by(queue)
    queue.put([3])
    assert line.sent == [[1, 2], [3]]


def test_the_pause_is_longer_than_the_attempt() -> None:
    line = Line(takes=0.5)
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


def test_the_oldest_are_given_up_first() -> None:
    line = Line()
    line.is_down = True
    queue = RetryQueue(line.send, at_once=10, limit=3)
    with pytest.raises(ConnectionError):
        queue.put([1, 2, 3])
    queue.put([4])
    assert queue.waiting == [2, 3, 4]


def test_what_can_never_be_sent_does_not_keep_the_rest_back() -> None:
    line = Line()
    queue = RetryQueue(line.send, at_once=1, is_hopeless=lambda error: isinstance(error, ValueError))
    with pytest.raises(ValueError, match="bad entry"):
        queue.put([1, "bad", 2])
    pass_by(queue)
    assert line.sent == [[1], [2]]
