"""The file in a run's folder that lists the run's trigger files, from which `SaveOnTrigger` callbacks read a user's requests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LISTENERS = "listeners.json"
"""The name of the file in the run's folder that lists the trigger files.

The list maps the name of each callback to the callback's trigger file. A trigger file in the run's folder is listed without the
folder, because on another machine the folder may have another path.
"""

_MAX_FILE_BYTES = 65536  # read at most this many bytes of the file `LISTENERS`


def announce(folder: str | os.PathLike[str], name: str, file: str | os.PathLike[str]) -> None:
    """Add the trigger file `file` of the callback `name` to the list of trigger files. Raise OSError if writing the list fails."""
    path = Path(file).absolute()
    is_inside = path.parent.resolve() == Path(folder).resolve()
    _write(Path(folder), {**listeners_in(folder), name: path.name if is_inside else str(path)})


def withdraw(folder: str | os.PathLike[str], name: str) -> None:
    """Remove the callback `name` from the list of trigger files. Raise OSError if writing the list fails."""
    listed = listeners_in(folder)
    if listed.pop(name, None) is not None:
        _write(Path(folder), listed)


def listeners_in(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the trigger files that are listed in the run's folder, by callback name. Callbacks of killed jobs may be included."""
    try:
        descriptor = os.open(Path(folder, LISTENERS), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            listed: Any = json.loads(file.read(_MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):  # the file does not exist, or is not a list that callsheet wrote
        return {}
    return {name: file for name, file in listed.items() if isinstance(file, str)} if isinstance(listed, dict) else {}


def _write(folder: Path, listed: dict[str, str]) -> None:
    path = folder / LISTENERS
    if not listed:
        path.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{LISTENERS}.new-{os.getpid()}")
    try:
        draft.write_text(f"{json.dumps(listed)}\n", encoding="utf-8")
        os.replace(draft, path)  # `os.replace` is atomic: a reader sees the old list or the new one
    finally:
        draft.unlink(missing_ok=True)
