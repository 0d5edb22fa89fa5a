"""Writes lines to files from a background thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

_MAX_KEPT_BYTES = 64 * 2**20  # the most bytes to keep in memory while a file cannot be written


class LineWriter:
    """Appends lines to files in a folder from a background thread, which writes each line within about `seconds`.

    `append` never waits for the disk. Text that cannot be written is kept and written later, from the middle of a line if
    necessary. In a forked process the writer writes nothing, because the queued lines belong to the parent. While `may_write`
    returns False, lines are dropped.

    Raises:
        OSError: raised by `append` and `flush`, once each time that writing begins to fail; the line is kept.
    """

    def __init__(self, folder: Path, seconds: float, *, may_write: Callable[[], bool] = lambda: True) -> None:
        self.lost = 0
        """The number of lines dropped because too much text was waiting."""
        self._folder = folder
        self._seconds = seconds
        self._may_write = may_write
        # A deque's `append` is thread-safe without a lock, so `LineWriter.append` never waits for the disk.
        self._given: deque[tuple[str, bytes]] = deque()
        self._files: dict[str, _File] = {}
        self._writing = threading.Lock()  # protects `_files`
        self._failure: OSError | None = None
        self._is_failing = False
        self._something = threading.Event()
        self._closed = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="callsheet lines", daemon=True)
        self._thread.start()

    def append(self, name: str, line: bytes) -> None:
        """Queue `line` to be appended to the file `name`, a path in the folder."""
        if os.getpid() == self._process:
            self._given.append((name, line))
            if not self._something.is_set():
                self._something.set()
            self._report_failure()

    def flush(self) -> None:
        """Write all queued lines to their files now."""
        if os.getpid() == self._process:
            with self._writing:
                self._write()
            self._report_failure()

    def close(self) -> None:
        """Write the queued lines and end the background thread. May be called twice.

        Raises:
            OSError: the last lines could not be written, and are lost.
        """
        if os.getpid() != self._process:
            return
        self._closed.set()
        self._something.set()
        self._thread.join()
        with self._writing:
            self._write()
            failures = {name: failure for name, file in self._files.items() if (failure := file.write()) is not None}
            for file in self._files.values():
                file.close()
            self._files = {}
        if failures:
            reason = next(iter(failures.values()))
            raise OSError(f"the last lines of {', '.join(failures)} in {self._folder} could not be written: {reason}")

    def _run(self) -> None:
        while not self._closed.is_set():
            self._something.wait()
            self._closed.wait(self._seconds)  # wait until there are more lines, to write them together
            self._something.clear()
            with self._writing:
                self._write()
            if self._is_failing:
                self._something.set()  # after an error, let the loop try again to write the unwritten lines

    def _write(self) -> None:
        if not self._may_write():  # another process has taken over the folder, so discard the lines
            self._given.clear()
            for file in self._files.values():
                file.waits.clear()
            return
        while self._given:
            name, line = self._given.popleft()
            file = self._files.setdefault(name, _File(self._folder / name))
            if len(file.waits) + len(line) > _MAX_KEPT_BYTES:
                file.write()
            if file.waits and len(file.waits) + len(line) > _MAX_KEPT_BYTES:
                self.lost += 1
            else:
                file.waits += line + b"\n"
        failures = [failure for file in self._files.values() if (failure := file.write()) is not None]
        if failures and not self._is_failing:
            self._failure = failures[0]
        self._is_failing = bool(failures)

    def _report_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            failure.add_note("the lines are kept, and are written as soon as possible")
            raise failure


class _File:
    """A file, and the bytes that are still to be appended to it."""

    def __init__(self, path: Path) -> None:
        self.waits = bytearray()
        self._path = path
        self._descriptor: int | None = None

    def write(self) -> OSError | None:
        """Append the queued bytes to the file. If that fails, keep the rest in the queue and return the error."""
        try:
            while self.waits:
                if self._descriptor is None:
                    self._descriptor = self._open()
                del self.waits[: os.write(self._descriptor, self.waits)]
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        if (size := os.lseek(descriptor, 0, os.SEEK_END)) and _byte_at(descriptor, size - 1) != b"\n":
            self.waits[:0] = b"\n"  # end the incomplete line that a killed process has left
        return descriptor


def _byte_at(descriptor: int, place: int) -> bytes:
    os.lseek(descriptor, place, os.SEEK_SET)  # seeking does not affect later writes, since O_APPEND writes at the end
    return os.read(descriptor, 1)
