"""Messages between the run's process and the process of a callback. Each message is its length and its bytes, sent through a socket."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from math import inf
from struct import Struct
from typing import TypeVar

T = TypeVar("T")

_LOOK_SECONDS = 0.5  # the time between two checks whether the child process still runs
_CHUNK_BYTES = 2**18
_LENGTH = Struct("!Q")


class MessageSocket:
    """One end of a connection between the run's process and the process of a callback.

    `send` and `receive` do not wait for a child process that has ended, even if its end of the connection is still open because a
    process that the child has forked still runs.

    Args:
        line: a connected socket.
    """

    def __init__(self, line: socket.socket) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        """The child process that has the other end; None in the child process itself."""
        self._line = line
        line.setblocking(True)  # after `socket.setdefaulttimeout`, new sockets do not block
        self._received = bytearray()  # what has arrived, beginning with the next message
        # When to stop reading after the child has ended. A process that the child has forked could send without end.
        self._last_read = inf

    def send(self, content: bytes, *, until: float = inf) -> None:
        """Send a message.

        Args:
            content: the message.
            until: the time, as of `time.monotonic`, at which to give up.

        Raises:
            TimeoutError: the message was not sent in time. A part of it may have been sent.
            EOFError, OSError: the child process or the connection has ended.
        """
        length = _LENGTH.pack(len(content))
        for part in (length, content) if len(content) > _CHUNK_BYTES else (length + content,):
            left = memoryview(part)
            while left:
                left = left[self._attempt(partial(self._line.send, left), until) :]

    def receive(self, *, until: float = inf) -> bytearray:
        """Wait for a message, and return it.

        Args:
            until: the time, as of `time.monotonic`, at which to give up.

        Raises:
            TimeoutError: the message has not arrived in time.
            EOFError, OSError: the child process or the connection has ended, and no complete message is left.
        """
        while (message := self._next_message()) is None:
            chunk = self._attempt(partial(self._line.recv, _CHUNK_BYTES), until)
            if not chunk:
                raise EOFError
            self._received += chunk
        return message

    def shut_down(self) -> None:
        """End the connection for all processes, also for forked processes that have a copy of the socket."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        """Close the socket in this process. A forked process that has a copy of the socket keeps the connection open."""
        self._line.close()

    def _next_message(self) -> bytearray | None:
        """Remove the next message from what has arrived, and return it. Return None if it is not complete."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        message = self._received[_LENGTH.size : end]
        del self._received[:end]
        return message

    def _attempt(self, operation: Callable[[], T], until: float) -> T:
        """Call a method of the socket and return its result. If the child process runs, wait until the socket is ready."""
        if self.child is None:
            return operation()
        while True:
            has_ended = self.child.poll() is not None  # checked before the socket, so that all that the child has sent is read
            now = time.monotonic()
            if has_ended:
                self._last_read = min(self._last_read, now + _LOOK_SECONDS)
            if now > self._last_read:
                raise EOFError
            if now > until:
                raise TimeoutError
            self._line.settimeout(0 if has_ended else min(_LOOK_SECONDS, until - now))
            try:
                return operation()
            except BlockingIOError:  # the socket is not ready
                if has_ended:
                    raise EOFError from None
            except TimeoutError:  # check again whether the child runs
                pass
