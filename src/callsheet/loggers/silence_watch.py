"""A thread that notices when a loop has shown nothing for a while, and says what it is doing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from callsheet.events import Event

_LOOK_SECONDS = 1.0
_JOIN_SECONDS = 5.0
_EVENTS = frozenset(str(event) for event in Event)


class SilenceWatch:
    """Call `show` with a text every second in which nothing has been shown for a while. It begins when it is made.

    The text counts the seconds, and names the handler that the thread which made this is in, if there is one.

    Args:
        last_shown: returns when something was last shown, as `time.perf_counter()` has it.
        show: shows the text. If it fails, the watch ends.
        patience: how many seconds without anything shown are no silence.
    """

    def __init__(self, last_shown: Callable[[], float], show: Callable[[str], None], *, patience: float) -> None:
        self._last_shown, self._show, self._patience = last_shown, show, patience
        self._watched = threading.get_ident()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="callsheet-silence-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. After that it shows nothing."""
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)  # a terminal that takes no more text must not hold up the run

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            silent = time.perf_counter() - self._last_shown()
            if silent < self._patience:
                continue
            handler = _handler_of(self._watched)
            try:
                self._show(f"({f'in {handler}' if handler else 'no news'} for {silent:.0f} s)")
            except Exception:  # the terminal is gone, which the training thread notices when it draws
                return


def _handler_of(thread: int) -> str:
    """Return the handler that a thread is in, such as `Generate.on_eval_all_end`, or an empty text."""
    # The frames' variables are left alone: reading them would keep what they hold alive.
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name in _EVENTS:
            return frame.f_code.co_qualname
        frame = frame.f_back
    return ""
