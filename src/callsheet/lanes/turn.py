"""`Turn`: a lock that the lanes of one callback share, so that two threads do not call the callback at once."""

from __future__ import annotations

import os
import threading
import time
import weakref


class Turn:
    """A lock that the lanes of one callback share, such as those of two runs.

    A thread that holds the lock releases it between two calls of the callback if `is_wanted`. If it then acquires the lock again, the
    waiting thread goes first, so that no lane waits until the queue of another lane is empty.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = threading.Lock()  # held by the thread that waits for `_lock`
        self._holder: int | None = None  # the identifier of the thread that holds `_lock`

    @property
    def is_wanted(self) -> bool:
        """Whether another thread waits for the lock."""
        return self._next.locked()

    def acquire(self, seconds: float, lender: int | None = None) -> bool:
        """Wait until the caller may call the callback. Return False if that takes longer than `seconds`.

        Args:
            seconds: how long to wait.
            lender: the identifier of the thread that trains the caller's run. If this thread holds the lock, the caller may call the
                callback at once: a handler has started this run with its own callback, and waits for its end.
        """
        if lender is not None and self._holder == lender:
            return True
        until = time.monotonic() + seconds
        if not self._next.acquire(timeout=seconds):
            return False
        is_acquired = self._lock.acquire(timeout=max(0.0, until - time.monotonic()))
        if is_acquired:
            self._holder = threading.get_ident()
        self._next.release()
        return is_acquired

    def release(self) -> None:
        """Release the lock if the caller holds it. Do nothing if a lender holds it."""
        if self._holder == threading.get_ident():
            self._holder = None
            self._lock.release()


# The locks of callbacks, by the callbacks' ids. An id is not used for another callback as long as its lock is here, because the lanes
# that hold the lock also hold the callback.
_turns: weakref.WeakValueDictionary[int, Turn] = weakref.WeakValueDictionary()
_finding = threading.Lock()


def turn_of(callback: object) -> Turn:
    """Return the lock that all lanes of this callback share."""
    with _finding:
        return _turns.setdefault(id(callback), Turn())


def _forget_all() -> None:
    """In a forked child process, forget all locks, because the threads that hold them run only in the parent."""
    global _finding
    _finding = threading.Lock()
    _turns.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
