"""A log file of a process's output. If the process rewrites a line, as a progress bar does, the file has only the last state.

This module imports only the standard library and nothing of callsheet. Run as a script, this module copies what is written to
file descriptors to such a file; see `descriptor_capture`.
"""

from __future__ import annotations

import codecs
import os
import re
import select
import signal
import sys
import threading

_MAX_LINE_CHARACTERS = 2**16  # longest line, in characters; longer lines are split
_ERASING_CODES = re.compile(r"\r|\x1b\[2K")  # control codes that erase the text before them in a line
_CONTROL_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")


class OutputLog:
    """A log file for printed text, to which any thread may write. In a forked child process, `write` does nothing.

    If a line is rewritten, as by a progress bar, only its last state is kept. Colors and other codes are removed. A file that
    would become larger than `max_bytes` is renamed to `<path>.1`, replacing an earlier one, and a new file is started. Write
    errors are returned by `failure`, and never raised by `write`.

    Raises:
        OSError: from the constructor, if the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        self._path = os.fspath(path)
        self._max_bytes = max_bytes
        self._lines: dict[str, str] = {}  # for each stream, its last line, which is not complete yet
        self._lock = threading.RLock()  # reentrant, because a signal handler may print while the main thread prints
        self._failure: OSError | None = None
        self._is_failing = self._is_closed = False
        self._process = os.getpid()
        os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        self._descriptor = self._open()

    def write(self, text: str, stream: str = "") -> None:
        """Add text that the process printed. Each line is written to the file once it is complete."""
        if os.getpid() != self._process:
            return
        with self._lock:
            *ended, rest = (self._lines.get(stream, "") + text).split("\n")
            if len(rest) > _MAX_LINE_CHARACTERS:
                # This is probably a progress bar that has redrawn its line for hours: keep only what it shows now.
                rest = rest[rest.rstrip("\r").rfind("\r") + 1 :]
            if len(rest) > _MAX_LINE_CHARACTERS:
                ended, rest = [*ended, rest], ""
            self._lines[stream] = rest
            if shown := [line for line in map(_visible_text, ended) if line is not None]:
                self._append("".join(f"{line}\n" for line in shown).encode("utf-8", "backslashreplace"))

    def failure(self) -> OSError | None:
        """Return the error if writing has begun to fail since the last call, else None. Repeated errors are returned only once."""
        failure, self._failure = self._failure, None
        return failure

    def drop(self) -> None:
        """Stop writing and discard incomplete lines, because the file belongs to another process now."""
        with self._lock:
            self._lines, self._is_closed = {}, True

    def close(self) -> None:
        """Write the incomplete lines, and close the log file. May be called twice."""
        if os.getpid() != self._process:
            return
        with self._lock:
            for stream in [stream for stream, line in self._lines.items() if line]:
                self.write("\n", stream)
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor, self._is_closed = -1, True

    def _append(self, content: bytes) -> None:
        if self._is_closed:
            return
        try:
            if self._max_bytes is not None and 0 < self._size > self._max_bytes - len(content):
                os.close(self._descriptor)
                self._descriptor = -1
                os.replace(self._path, f"{self._path}.1")
            if self._descriptor < 0:
                self._descriptor = self._open()
            while content:
                written = os.write(self._descriptor, content)
                self._size += written
                content = content[written:]
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                self._failure = error
            self._is_failing = True

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        self._size = os.fstat(descriptor).st_size
        return descriptor


def _visible_text(line: str) -> str | None:
    """Return the text that a terminal shows if `line` is printed; None if the line consists only of control codes."""
    written = line.rstrip("\r")
    seen = _CONTROL_CODES.sub("", _ERASING_CODES.split(written)[-1])
    return seen if seen or not written else None


# --- code of the separate process that copies output (see `DescriptorCapture`) ---

DROP = b"\xff\xff\xff\xff"
"""The message after which the copying process writes nothing more to the log."""
END = b"\0\0\0\0"
"""The message that closes the log.

A message that is neither `DROP` nor `END` consists of the length of a text, in four bytes, and the text, which is written to the
log.
"""
CLOSED = b"\0"
"""The answer to the message that closes the log. Any other answer is a list of errors, one per line."""


class _Source:
    """A pipe that replaces a captured file descriptor. Output in the pipe is passed on to the original target and to the log."""

    def __init__(self, name: str, descriptor: int, target: int) -> None:
        self.name = name
        self.descriptor = descriptor
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._target = target

    def read(self) -> bytes:
        """Read the output that is available, pass it on to the original target, and return it.

        Return empty bytes at the end of the output.
        """
        content = rest = os.read(self.descriptor, 65536)
        while rest and self._target >= 0:
            try:
                rest = rest[os.write(self._target, rest) :]
            except BlockingIOError:  # another process has made the terminal non-blocking: wait until the terminal accepts text
                select.select([], [self._target], [])
            except OSError:  # the terminal is gone; keep writing to the log
                self._target = -1
        return content


class Copier:
    """Copies output to the original targets and to the log until all writers have closed the pipes.

    A message from the process whose output is copied may close the log earlier.
    """

    def __init__(self, path: str, max_bytes: int | None, messages: int, answers: int, sources: list[_Source]) -> None:
        self._answers = answers
        self._messages = messages
        self._message = b""
        self._sources = {source.descriptor: source for source in sources}
        self._log: OutputLog | None = None
        try:
            self._log = OutputLog(path, max_bytes)
        except OSError as error:
            self._answer(f"{error}\n".encode())

    def run(self) -> None:
        """Copy until all pipes with output are closed."""
        while self._sources:
            ready = select.select([*self._sources, *([self._messages] if self._messages >= 0 else [])], [], [])[0]
            if self._messages in ready:  # handle messages first: they were sent before the output that waits in the pipes
                self._read_messages()
            else:
                self._copy(ready)
            if self._log is not None and (failure := self._log.failure()) is not None:
                self._answer(f"{failure}\n".encode())
        self._close()

    def _copy(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            source = self._sources[descriptor]
            content = source.read()
            if self._log is not None:
                self._log.write(source.decoder.decode(content), source.name)
            if not content:
                del self._sources[descriptor]

    def _read_messages(self) -> None:
        got = os.read(self._messages, 65536)
        if not got:  # the training process has ended, but its child processes may still print
            self._messages = -1
        self._message += got
        while self._message and len(self._message) >= (size := self._size_of_message()):
            if self._message[:4] == DROP:
                self._message = self._message[4:]
                if self._log is not None:
                    self._log.drop()
                continue
            text, self._message = self._message[4:size], self._message[size:]
            if text and self._log is not None:
                self._log.write(text.decode("utf-8", "replace"))
            if not text:
                while waiting := select.select(list(self._sources), [], [], 0)[0]:
                    self._copy(waiting)
                self._close()
                self._answer(CLOSED)

    def _size_of_message(self) -> int:
        return 4 if self._message[:4] == DROP else 4 + int.from_bytes(self._message[:4], "big")

    def _close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()
            if (failure := log.failure()) is not None:
                self._answer(f"{failure}\n".encode())

    def _answer(self, answer: bytes) -> None:
        try:
            os.write(self._answers, answer)
        except OSError:  # the process whose output is copied has ended already
            return


if __name__ == "__main__":
    # Ignore signals that end a process, because this process must outlive the processes whose output it copies.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    log_path, max_size, message_source, answer_target, *triples = sys.argv[1:]
    watched = [_Source(name, int(source), int(target)) for name, source, target in (each.split(":") for each in triples)]
    Copier(log_path, int(max_size) or None, int(message_source), int(answer_target), watched).run()
