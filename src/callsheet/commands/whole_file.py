"""A file that is there whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from callsheet.errors import CallsheetError


def write_whole(path: Path, content: str) -> None:
    """Write the text; CallsheetError where that cannot be done."""
    with whole_file(path) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A file to write to, which takes its name, and the place of an earlier one, when the block ends without an error.

    Raises:
        CallsheetError: nothing can be written there.
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
