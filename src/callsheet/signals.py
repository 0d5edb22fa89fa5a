"""Signals that ask a run to make way.

The handler only notes the signal: saving inside one can hang. Since Python runs handlers between bytecodes, a handler waits as long as
a collective or another call into C blocks; the time of arrival is noted by a thread that the interpreter's C handler wakes at once.
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

_active: list[SignalWatch] = []  # the outermost first


class SignalWatch:
    """Notes signals while it is entered; earlier handlers are called too, and put back afterwards.

    Ctrl-C after another signal, or after another Ctrl-C, raises KeyboardInterrupt at once.

    `received` is the first signal, or None; `arrived_at` when it came, in seconds of `time.monotonic()`. Outside the main thread Python
    allows no handlers, and entering does nothing. A forked child is born with the earlier handlers.

    Args:
        signals: names such as `"SIGTERM"`, or numbers.
        grace: seconds between the signal and the moment when the process will be killed.

    Raises:
        ConfigError: a signal that this system does not have, or that cannot be handled.
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
        """Of the grace period; infinite while no signal has come."""
        return float("inf") if self.arrived_at is None else self.arrived_at + self.grace - time.monotonic()

    def __enter__(self) -> Self:
        if self._signals and threading.current_thread() is threading.main_thread() and not self._earlier:
            for number in self._signals:
                if number is signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                    continue  # a job in the background: Ctrl-C is meant for somebody else
                self._earlier[number] = signal.signal(number, self._note)
            self._clock = _Clock(self)
            _active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        self._put_back()
        if self._clock is not None:
            self._clock.close()
            self._clock = None

    def saw(self, number: int) -> None:
        """For the clock's thread: a signal has arrived, whether or not its handler has run yet."""
        if number in self._signals and self.arrived_at is None:
            self.arrived_at = time.monotonic()

    def after_fork(self) -> None:
        """For a forked child: these signals are not its business, and its clock has no thread."""
        self._put_back()
        if self._clock is not None:
            self._clock.let_go()
            self._clock = None

    def _put_back(self) -> None:
        if self in _active:
            _active.remove(self)
        for number, earlier in self._earlier.items():
            if earlier is not None:  # None: it was set by C code, and cannot be put back from here
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
    """A thread that reads signal numbers from the descriptor to which the interpreter writes them at once."""

    def __init__(self, watch: SignalWatch) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        earlier = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if earlier != -1:  # somebody else, such as an asyncio loop, is woken through it: leave it to them
            signal.set_wakeup_fd(earlier)
        self._thread = threading.Thread(target=self._run, args=(watch,), name="callsheet-signals", daemon=True)
        self._thread.start()

    def _run(self, watch: SignalWatch) -> None:
        while True:
            for number in os.read(self._read, 64):
                if number == 0:  # no signal has this number: it is time to go
                    return
                watch.saw(number)

    def close(self) -> None:
        """End the thread. Not by closing the pipe: a forked child may hold it open for as long as it lives."""
        os.write(self._write, b"\0")
        self._thread.join()
        self.let_go()

    def let_go(self) -> None:
        """Give back the descriptors."""
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._write):  # somebody else's by now
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
    for watch in reversed(_active.copy()):  # the innermost first, as each knows only the handler before its own
        watch.after_fork()


os.register_at_fork(after_in_child=_after_fork)
