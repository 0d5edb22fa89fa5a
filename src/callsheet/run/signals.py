"""Records the signals, such as SIGTERM, that preempt a run.

The signal handler only records the signal, because saving a checkpoint inside a handler can hang. Python calls handlers between
bytecodes, so a handler has to wait while a collective or another C call blocks. Therefore a thread records the time of arrival;
the interpreter's C handler wakes this thread at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

from callsheet.errors import ConfigError

GRACE_SECONDS = 30.0
"""How long launchers commonly wait between SIGTERM and SIGKILL."""

PreemptSignals = str | int | Iterable[str | int]
"""One or several signals: names such as `"SIGTERM"`, or numbers."""

_active: list[SignalWatch] = []  # the watches whose `with` blocks are running, outermost first


def signals_of(preempt_signals: PreemptSignals) -> tuple[str | int, ...]:
    """Return the argument `preempt_signals` of a loop, which is one signal or several, as a tuple."""
    return (preempt_signals,) if isinstance(preempt_signals, (str, int)) else tuple(preempt_signals)


class SignalWatch:
    """A context manager that records signals.

    When a signal arrives, the handler that was set for it before is called too. These handlers are restored when the block ends.

    Ctrl-C after another signal, or after another Ctrl-C, raises KeyboardInterrupt at once.

    `received` is the first signal, or None; `arrived_at` is its time in seconds of `time.monotonic()`. Python allows signal
    handlers only in the main thread; in another thread, entering the block does nothing. In a forked child, the handlers that were set
    before are restored.

    Args:
        signals: names such as `"SIGTERM"`, or numbers.
        grace: seconds between the signal and the time when the process will be killed.

    Raises:
        ConfigError: this system does not have the signal, or it cannot be handled.
    """

    def __init__(self, signals: Iterable[str | int] = ("SIGTERM",), *, grace: float = GRACE_SECONDS) -> None:
        self.received: signal.Signals | None = None
        self.arrived_at: float | None = None
        self.grace = grace
        self._signals = tuple(dict.fromkeys(_signal(given) for given in signals))
        self._earlier: dict[signal.Signals, Any] = {}
        self._clock: _Clock | None = None

    @property
    def seconds_left(self) -> float:
        """How many seconds of the grace period are left; infinite until a signal arrives."""
        return float("inf") if self.arrived_at is None else self.arrived_at + self.grace - time.monotonic()

    def __enter__(self) -> Self:
        if self._signals and threading.current_thread() is threading.main_thread() and not self._earlier:
            for number in self._signals:
                if number is signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # SIGINT is ignored, as in a background process: keep that, because Ctrl-C should not end the process
                self._earlier[number] = signal.signal(number, self._note)
            self._clock = _Clock(self)
            _active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        self._restore_handlers()
        if self._clock is not None:
            self._clock.close()
            self._clock = None

    def saw(self, number: int) -> None:
        """Record when a signal arrived, whether or not its handler has run yet. The thread of `_Clock` calls this."""
        if number in self._signals and self.arrived_at is None:
            self.arrived_at = time.monotonic()

    def after_fork(self) -> None:
        """In a forked child process, restore the signal handlers that were in place before this object installed its own.

        The thread that records the time exists only in the parent.
        """
        self._restore_handlers()
        if self._clock is not None:
            self._clock.close_descriptors()
            self._clock = None

    def _restore_handlers(self) -> None:
        if self in _active:
            _active.remove(self)
        for number, earlier in self._earlier.items():
            if earlier is not None:  # if C code has set the handler, `earlier` is None, and Python cannot restore it
                signal.signal(number, earlier)
        self._earlier.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
        self.saw(number)
        earlier = self._earlier.get(signal.Signals(number))
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)


class _Clock:
    """A thread that records when a signal arrives, by reading signal numbers from a file descriptor.

    The interpreter writes each number to the descriptor as soon as the signal arrives.
    """

    def __init__(self, watch: SignalWatch) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        earlier = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if earlier != -1:  # other code, such as an asyncio loop, already receives the signal numbers: restore its descriptor
            signal.set_wakeup_fd(earlier)
        self._thread = threading.Thread(target=self._run, args=(watch,), name="callsheet-signals", daemon=True)
        self._thread.start()

    def _run(self, watch: SignalWatch) -> None:
        while True:
            for number in os.read(self._read, 64):
                if number == 0:  # no signal has the number 0: `close` sends 0 to end this thread
                    return
                watch.saw(number)

    def close(self) -> None:
        """End the thread by sending a message through the pipe. Closing the pipe is not enough, because a forked child may hold the pipe open."""
        os.write(self._write, b"\0")
        self._thread.join()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close the file descriptors of the pipe."""
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._write):  # other code has set its own file descriptor since: restore that descriptor
            signal.set_wakeup_fd(current)
        os.close(self._write)
        os.close(self._read)


def _signal(given: str | int) -> signal.Signals:
    try:
        number = signal.Signals[given] if isinstance(given, str) else signal.Signals(given)
    except (KeyError, ValueError):
        raise ConfigError(f"this system has no signal {given!r}; write its name, such as 'SIGTERM' or 'SIGUSR1'") from None
    if number.name in ("SIGKILL", "SIGSTOP"):
        raise ConfigError(f"{number.name} cannot be handled by any program; launchers send SIGTERM before it")
    return number


def _after_fork() -> None:
    for watch in reversed(_active.copy()):  # innermost first: each watch restores the handler that it has replaced
        watch.after_fork()


os.register_at_fork(after_in_child=_after_fork)
