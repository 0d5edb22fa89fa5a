"""A status line for work that has no progress bar."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_TERMINAL_PAUSE_SECONDS = 1.0
# If standard error is not a terminal: the time until the first line is written, and the time between further lines.
_FIRST_LINE_SECONDS, _NEXT_LINE_SECONDS = 5.0, 30.0


@contextmanager
def working(what: str, *, is_shown: bool = True) -> Iterator[None]:
    """While the `with` block runs, show on standard error that `what` is in progress.

    On a terminal, one line counts the seconds and is erased at the end. Elsewhere, a line is written after five seconds and then
    every thirty seconds. Work that ends before the first line is due shows nothing.
    """
    if not is_shown:
        yield
        return
    is_done = threading.Event()
    thread = threading.Thread(target=_show, args=(what, is_done), name="callsheet-working", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _show(what: str, is_done: threading.Event) -> None:
    stream, began = sys.stderr, time.monotonic()
    try:
        is_terminal = stream.isatty()
        pause = _TERMINAL_PAUSE_SECONDS if is_terminal else _FIRST_LINE_SECONDS
        is_shown = False
        while not is_done.wait(pause):
            seconds = time.monotonic() - began
            # On a terminal, the cursor returns to the start of the status line, so that other output overwrites it.
            stream.write(f"\r{what}: {seconds:.0f} s\x1b[K\r" if is_terminal else f"{what}: {seconds:.0f} s so far\n")
            stream.flush()
            is_shown, pause = True, _TERMINAL_PAUSE_SECONDS if is_terminal else _NEXT_LINE_SECONDS
        if is_shown and is_terminal:
            stream.write("\r\x1b[K")
            stream.flush()
    except (OSError, ValueError, AttributeError):  # standard error is closed or missing, which must not stop the work
        return
