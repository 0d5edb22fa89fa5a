"""A thread that shows which handler is running, and for how long, while nothing else is shown."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from callsheet.core.events import Event

_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_EVENT_NAMES = frozenset(str(event) for event in Event)


class SilenceWatch:
    """A thread that calls `show` with a text once a second while nothing else has been shown for at least `patience` seconds.

    The text counts the seconds. If the thread that created this object is running a handler, the text names the handler.

    Args:
        last_shown: returns when something was last shown, in the time of `time.perf_counter()`.
        show: shows the text. If it raises an exception, the watch ends.
        patience: after how many seconds the text is shown.
    """

    def __init__(self, last_shown: Callable[[], float], show: Callable[[str], None], *, patience: float) -> None:
        self._last_shown, self._show, self._patience = last_shown, show, patience
        self._watched = threading.get_ident()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch_silence, name="callsheet-silence-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait a few seconds for its end."""
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)  # do not wait forever: the thread is blocked as long as the terminal accepts no text

    def _watch_silence(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            silent = time.perf_counter() - self._last_shown()
            if silent < self._patience:
                continue
            handler = _handler_of(self._watched)
            try:
                self._show(f"({f'in {handler}' if handler else 'no news'} for {silent:.0f} s)")
            except Exception:  # the terminal is gone: end this thread; the training thread gets the same error when it draws
                return


def _handler_of(thread: int) -> str:
    """Return the name of the handler that a thread is running, such as `Generate.on_eval_all_end`; empty if there is none."""
    # Do not read the frames' variables, because that would keep their values alive.
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name in _EVENT_NAMES:
            return frame.f_code.co_qualname
        frame = frame.f_back
    return ""
