"""Writes files atomically, so that they are never incomplete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from callsheet.errors import CallsheetError


def write_whole(path: Path, content: str) -> None:
    """Write the text to a file atomically. Raise CallsheetError if writing fails."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Open a new file. If the `with` block ends without an error, the new file replaces the file at `path` atomically.

    Raises:
        CallsheetError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        file = draft.open("w", encoding="utf-8")
    except OSError as error:
        raise CallsheetError(f"{path} cannot be written: {error}; name another file with --out") from error
    try:
        with file:
            yield file
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
