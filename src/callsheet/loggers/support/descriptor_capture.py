"""Copies everything that is written to the file descriptors 1 (stdout) and 2 (stderr) to a file.

`wurlitzer` (3.1) is not used, for three reasons. It reads the pipes on a thread of this process: a library that holds the
interpreter lock blocks that thread, and in a crash the last output is lost. It waits for that thread without a time limit. And it
has no type annotations.
"""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

from callsheet.errors import ConfigError
from callsheet.loggers.support import output_log

DESCRIPTORS = {"stdout": 1, "stderr": 2}

_CLOSE_SECONDS = 10.0  # how long `close` waits for the rest of the output

_live: list[DescriptorCapture] = []


class DescriptorCapture:
    """Copies the standard output and error of this process, its native libraries and its child processes to an `OutputLog`.

    The descriptors become pipes to a small process, which forwards everything to the original destination. A thread is not
    enough: a library that fills the pipe while it holds the interpreter lock would block forever, and the last output before a
    crash would be lost. A process that is forked from this one can write too, and the capture continues when such a process ends.

    Raises:
        ConfigError: the descriptors cannot be passed to another process, as on Windows.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        if os.name != "posix" or not sys.executable:
            raise ConfigError('capture="fd" needs a POSIX system and a Python executable; choose "python"')
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._is_writing = self._is_closed = self._is_dropped = False
        message_source, self._messages = os.pipe()
        self._answers, answer_target = os.pipe()
        os.set_blocking(self._answers, False)
        self._under = {each: _owner(each) for each in DESCRIPTORS.values()}
        self._before = {each: os.dup(each) for each in DESCRIPTORS.values()}
        pipes = {each: os.pipe() for each in DESCRIPTORS.values()}
        theirs = [message_source, answer_target, *(source for source, _ in pipes.values())]
        ours = {each: target for each, (_, target) in pipes.items()}
        triples = [f"{name}:{pipes[each][0]}:{self._before[each]}" for name, each in DESCRIPTORS.items()]
        command = [sys.executable, "-I", "-S", os.path.abspath(output_log.__file__)]
        arguments = [os.path.abspath(path), str(max_bytes or 0), str(message_source), str(answer_target), *triples]
        try:
            self._copier = subprocess.Popen(
                [*command, *arguments],
                pass_fds=[*theirs, *self._before.values()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Start a new session, so that signals to the training's process group do not reach the copying process.
                start_new_session=True,
            )
            _flush()
            for descriptor, target in ours.items():
                os.dup2(target, descriptor)
        except BaseException:
            _close(self._messages, self._answers, *self._before.values())
            raise
        finally:
            _close(*theirs, *ours.values())
        self._pipes = {each: _identity(each) for each in DESCRIPTORS.values()}
        _live.append(self)

    def write(self, text: str, stream: str = "") -> None:
        """Write text to the log, but not to the terminal."""
        with self._lock:
            if not text or self._is_closed or self._is_writing or os.getpid() != self._process:
                return  # `_is_writing` is True if a signal handler calls `write` while another call of `write` is running
            self._is_writing = True
            try:
                content = text.encode("utf-8", "backslashreplace")
                self._send(len(content).to_bytes(4, "big") + content)
            except OSError:  # the copying process has ended; `failure` reports this later
                return
            finally:
                self._is_writing = False

    def drop(self) -> None:
        """Stop writing to the log, because the file belongs to another process now. Output still appears on the terminal."""
        with self._lock:
            if self._is_closed or self._is_writing or self._is_dropped or os.getpid() != self._process:
                return
            self._is_dropped = True
            try:
                self._send(output_log.DROP)
            except OSError:  # the copying process has ended; `failure` reports this later
                return

    def failure(self) -> OSError | None:
        """Return the error if writing to the log has failed since the last call of this method, otherwise None."""
        if self._is_closed:
            return None
        try:
            answer = os.read(self._answers, 65536)
        except BlockingIOError:
            return None
        if not answer:
            self.close()
            return OSError(f"the process that copies output ended with {self._copier.poll()}; nothing more is captured")
        return OSError(answer.decode().splitlines()[0])

    def close(self) -> None:
        """Restore stdout and stderr, unless other code has replaced them since, and wait until all output is in the log.

        This may be called twice.

        Raises:
            OSError: output was lost, or could not be written in time.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        _flush()
        for descriptor in DESCRIPTORS.values():
            if self._has(descriptor):
                self._put_back(descriptor)
        _live.remove(self)
        try:
            self._end_log()
        finally:
            _close(self._messages, self._answers)

    def _has(self, descriptor: int) -> bool:
        return self._pipes[descriptor] == _identity(descriptor)

    def _put_back(self, descriptor: int) -> None:
        """Make file descriptor 1 or 2 point to its original target again.

        If that target belonged to another capture that is closed by now, restore the original target of that capture instead.
        """
        passed = [self]
        while (under := passed[-1]._under[descriptor]) is not None and under._is_closed:
            passed.append(under)
        os.dup2(passed[-1]._before[descriptor], descriptor)
        _close(*(each._before[descriptor] for each in passed))

    def _end_log(self) -> None:
        try:
            self._send(output_log.END)
        except BrokenPipeError:  # the copying process has ended; the caller can learn this from `failure`
            self._copier.wait()
            return
        answer = b""
        while output_log.CLOSED not in answer and select.select([self._answers], [], [], _CLOSE_SECONDS)[0]:
            if not (got := os.read(self._answers, 65536)):
                break
            answer += got
        try:
            self._copier.wait(0.0 if any(map(self._has, DESCRIPTORS.values())) else 1.0)
        except subprocess.TimeoutExpired:
            pass  # another process still has a pipe open; the copying process runs until the pipe is closed
        if answer != output_log.CLOSED:
            reason = answer.decode("utf-8", "replace").strip("\0\n")
            raise OSError(f"not all output is in the log: {reason or 'writing it took too long'}")

    def _send(self, message: bytes) -> None:
        while message:
            message = message[os.write(self._messages, message) :]


def _owner(descriptor: int) -> DescriptorCapture | None:
    return next((each for each in reversed(_live) if each._has(descriptor)), None)


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _flush() -> None:
    """Flush the output buffers of Python and C to the current targets of stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    ctypes.CDLL(None).fflush(None)
