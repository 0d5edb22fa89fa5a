"""Reads the lines that were appended to the files in a run's folder since the last reading."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MAX_LINE_BYTES = 32 * 2**20
_PIECE_BYTES = 2**20
_MAX_DEPTH = 64  # the maximum depth of nesting in a line, so that recursive code does not reach Python's recursion limit
_MAX_UNIX_SECONDS = 1e11  # the latest valid Unix time in seconds (in the year 5138)


def inside(folder: Path, name: str | os.PathLike[str]) -> Path | None:
    """Return the path of the regular file `name` in `folder`, with symbolic links resolved.

    Return None if it is missing or outside `folder`.
    """
    try:
        path = (folder / name).resolve()
        if path.is_relative_to(folder.resolve()) and stat.S_ISREG(path.stat().st_mode):
            return path
    except (OSError, ValueError, RuntimeError):  # the file is missing, its name has a zero byte, or links form a loop
        pass
    return None


def text_of(folder: Path, name: str | os.PathLike[str], *, at_most: int, from_end: bool = False) -> str:
    """Return the first (or last) `at_most` bytes of a file in `folder` as text; an empty text if there is no such file."""
    path = inside(folder, name)
    if path is None:
        return ""
    try:
        with open(path, "rb") as file:
            if from_end:
                file.seek(max(0, os.fstat(file.fileno()).st_size - at_most))
            return file.read(at_most).decode("utf-8", "replace")
    except OSError:  # the file was deleted in the meantime, or is not readable
        return ""


class JsonLines:
    """A file of JSON lines that may still grow. `new()` yields the objects in lines that were appended since the last call.

    A line that is not a JSON object, for example because the run was killed while it wrote the line, is skipped and counted in
    `torn`. An incomplete last line is read once it is complete.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self.torn = 0

    def is_another(self) -> bool:
        """Return whether the file was deleted, replaced or truncated since it was last read."""
        if self._identity is None:
            return False
        path = inside(self._folder, self._name)
        try:
            status = path.stat() if path is not None else None
        except OSError:
            status = None
        return status is None or (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects that were appended to the file since the last call."""
        path = inside(self._folder, self._name)
        if path is None:
            return
        try:
            file = open(path, "rb")  # noqa: SIM115 - closed below
        except OSError:  # the file was deleted in the meantime, or is not readable
            return
        with file:
            status = os.fstat(file.fileno())
            self._identity = (status.st_dev, status.st_ino)
            file.seek(self._offset)
            while line := file.readline(_MAX_LINE_BYTES):
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) == _MAX_LINE_BYTES:  # no run writes a line of this length, so skip the rest of it
                    while (piece := file.readline(_PIECE_BYTES)) and not piece.endswith(b"\n"):
                        pass
                    line, is_whole = b"too long", True
                found = _object(line)
                # The line is incomplete, perhaps because it is still being written; the next call reads it again.
                if found is None and not is_whole:
                    break
                self._offset = file.tell()
                if found is not None:
                    yield found
                elif line.strip():
                    self.torn += 1


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and (_brackets(line) <= _MAX_DEPTH or is_shallow(found)) else None


def _brackets(line: bytes) -> int:
    return line.count(b"[") + line.count(b"{")


def is_shallow(value: Any) -> bool:
    """Return whether recursive functions can process `value`: its lists and mappings are nested at most `_MAX_DEPTH` levels deep.

    An object that occurs several times, because of a YAML anchor, is checked once.
    """
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [
            child
            for each in level
            if isinstance(each, (dict, list, tuple))
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list, tuple))
        ]
        level = list({id(each): each for each in inner}.values())
        if not level:
            return True
    return False


def printable(text: str) -> str:
    """Return the text with question marks in place of control characters, which a terminal would execute."""
    return "".join(char if char.isprintable() else "?" for char in text)


def number(value: Any) -> float:
    """Return `value` as a float, or NaN if it is not a number."""
    try:
        return float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def moment(value: Any) -> float:
    """Return `value` as a float if it is a valid Unix time in seconds, otherwise NaN."""
    found = number(value)
    return found if abs(found) < _MAX_UNIX_SECONDS else math.nan


def finite(value: Any) -> float:
    """Return `value` as a float, or 0 if it is not a finite number."""
    found = number(value)
    return found if math.isfinite(found) else 0.0


def whole(value: Any) -> int:
    """Return `value` as an int, or 0 if it is not a finite number."""
    found = number(value)
    return int(found) if math.isfinite(found) else 0
