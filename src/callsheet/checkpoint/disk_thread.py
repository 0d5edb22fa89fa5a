"""Threads for disk work, with a lower priority than training."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_NICENESS_INCREMENT = 5
"""The difference between the niceness of a disk thread and that of the process. A higher niceness means a lower priority.

A higher value would make a save very slow if many processes compete for the processor.
"""

_deleter: ThreadPoolExecutor | None = None
_deletions: list[Future[None]] = []


def disk_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor with one thread, which on Linux has a lower priority than training.

    When the interpreter exits, it waits for the thread.
    """
    return ThreadPoolExecutor(1, name, initializer=_lower_priority)


def begin_deletion(delete: Callable[[], None]) -> None:
    """Call `delete` in a background thread, and return at once. Deleting a large file may take long."""
    global _deleter  # the thread is made at the first use
    if _deleter is None:
        _deleter = disk_thread("callsheet-deletion")
    _deletions[:] = [each for each in _deletions if not each.done()]
    _deletions.append(_deleter.submit(delete))


def finish_deletions() -> None:
    """Wait for the deletions that `begin_deletion` started. Then the disk space and names of the deleted files are free again."""
    for each in tuple(_deletions):  # iterate over a copy, since another thread may begin a deletion
        each.result()


def _lower_priority() -> None:
    if sys.platform == "linux":  # other systems have no priority for a single thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS_INCREMENT)
