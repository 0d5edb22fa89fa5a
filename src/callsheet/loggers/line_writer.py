"""Lines for files, written by a thread of their own a moment after they were given."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

_KEPT_BYTES = 64 * 2**20  # so much waits for a disk that cannot be written to


class LineWriter:
    """Appends lines to files of a folder, each at the latest about `seconds` after it was given.

    A line is given with `append`, which waits for no disk. What cannot be written stays, is tried again, and goes on in the midst of a
    line where it has to. A process that was forked from the one that made the writer writes nothing: the lines that wait are its
    parent's. While `may_write` says no, what was given is dropped.

    Raises:
        OSError: from `append` and `flush`, once for each time that writing begins to fail; the line that was given is kept.
    """

    def __init__(self, folder: Path, seconds: float, *, may_write: Callable[[], bool] = lambda: True) -> None:
        self.lost = 0
        """Lines that were given up, since too many waited already."""
        self._folder = folder
        self._seconds = seconds
        self._may_write = may_write
        self._given: deque[tuple[str, bytes]] = (
            deque()
        )  # its own lock is held for an append alone, never while something is written
        self._files: dict[str, _File] = {}
        self._writing = threading.Lock()  # of `_files`
        self._failure: OSError | None = None
        self._is_failing = False
        self._something = threading.Event()
        self._closed = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="callsheet lines", daemon=True)
        self._thread.start()

    def append(self, name: str, line: bytes) -> None:
        """Have `line` written to the file `name`, a path in the folder."""
        if os.getpid() == self._process:
            self._given.append((name, line))
            if not self._something.is_set():
                self._something.set()
            self._report_failure()

    def flush(self) -> None:
        """Write what waits, now."""
        if os.getpid() == self._process:
            with self._writing:
                self._write()
            self._report_failure()

    def close(self) -> None:
        """Write what waits and end the thread; may be called twice.

        Raises:
            OSError: what waits could not be written, and is lost.
        """
        if os.getpid() != self._process:
            return
        self._closed.set()
        self._something.set()
        self._thread.join()
        with self._writing:
            self._write()
            waits = [name for name, file in self._files.items() if file.waits]
            for file in self._files.values():
                file.close()
            self._files = {}
        if waits:
            raise OSError(f"the last lines of {', '.join(waits)} in {self._folder} could not be written; free space on the disk")

    def _run(self) -> None:
        while not self._closed.is_set():
            self._something.wait()
            self._closed.wait(self._seconds)  # more lines may come
            self._something.clear()
            with self._writing:
                self._write()
            if self._is_failing:
                self._something.set()  # try again

    def _write(self) -> None:
        if not self._may_write():  # the folder is somebody else's now
            self._given.clear()
            for file in self._files.values():
                file.waits.clear()
            return
        while self._given:
            name, line = self._given.popleft()
            file = self._files.setdefault(name, _File(self._folder / name))
            if len(file.waits) + len(line) > _KEPT_BYTES:
                file.write()
            if file.waits and len(file.waits) + len(line) > _KEPT_BYTES:
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
            failure.add_note("the lines wait, and are written as soon as they can be")
            raise failure


class _File:
    """A file that is appended to, and the bytes that wait for it."""

    def __init__(self, path: Path) -> None:
        self.waits = bytearray()
        self._path = path
        self._descriptor: int | None = None

    def write(self) -> OSError | None:
        """Write as much as can be; what stopped it, where not all could."""
        try:
            while self.waits:
                if self._descriptor is None:
                    self._descriptor = self._opened()
                del self.waits[: os.write(self._descriptor, self.waits)]
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Let the file go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        if (size := os.lseek(descriptor, 0, os.SEEK_END)) and _byte_at(descriptor, size - 1) != b"\n":
            self.waits[:0] = b"\n"  # a killed process left a torn line: end it
        return descriptor


def _byte_at(descriptor: int, place: int) -> bytes:
    os.lseek(descriptor, place, os.SEEK_SET)  # appending goes to the end all the same
    return os.read(descriptor, 1)
