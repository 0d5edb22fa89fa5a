"""Which files a running job's `SaveOnTrigger`s look at, told in the run's folder to whoever wants to ask for something."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LISTENERS = "listeners.json"
"""In the run's folder: for each one's name the file. One in the folder has its bare name: others may see the folder elsewhere."""

_LARGEST = 65536  # bytes that are read


def announce(folder: str | os.PathLike[str], name: str, file: str | os.PathLike[str]) -> None:
    """Say that `name` looks at `file`. Raises OSError where it cannot be written."""
    path = Path(file).absolute()
    is_inside = path.parent.resolve() == Path(folder).resolve()
    _write(Path(folder), {**listeners_in(folder), name: path.name if is_inside else str(path)})


def withdraw(folder: str | os.PathLike[str], name: str) -> None:
    """Say that `name` looks no longer. Raises as `announce` does."""
    told = listeners_in(folder)
    if told.pop(name, None) is not None:
        _write(Path(folder), told)


def listeners_in(folder: str | os.PathLike[str]) -> dict[str, str]:
    """What was announced in the run's folder, and not withdrawn; a job that was killed withdraws nothing."""
    try:
        descriptor = os.open(Path(folder, LISTENERS), os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            told: Any = json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError):  # nobody has, or it is none of ours
        return {}
    return {name: file for name, file in told.items() if isinstance(file, str)} if isinstance(told, dict) else {}


def _write(folder: Path, told: dict[str, str]) -> None:
    path = folder / LISTENERS
    if not told:
        path.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{LISTENERS}.new-{os.getpid()}")
    try:
        draft.write_text(f"{json.dumps(told)}\n", encoding="utf-8")
        os.replace(draft, path)  # a reader sees the old one or the new one
    finally:
        draft.unlink(missing_ok=True)
