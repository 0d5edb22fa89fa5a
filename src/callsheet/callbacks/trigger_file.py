"""The file in which a job is asked for something: one wish a line, and why. `SaveOnTrigger` takes it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from callsheet.callback import one_of
from callsheet.errors import ConfigError

WORDS = ("save", "evaluate", "stop")
LONGEST = 4096  # bytes that are read
LONGEST_WHY = 200  # characters


def leave_request(file: str | os.PathLike[str], word: str, why: str = "") -> str:
    """Ask the job whose `SaveOnTrigger` looks at `file` for `save`, `evaluate` or `stop`; returns the line that says so.

    Other wishes that wait there stay; the same one does not wait there twice.

    Raises:
        ConfigError: a word that is no wish, or a `file` that is no plain file.
        OSError: it cannot be written.
    """
    line = f"{one_of('wish', word, WORDS)} {printable(why)[:LONGEST_WHY]}".rstrip()
    _change(Path(file), lambda waiting: [line, *(other for other in waiting if other.split()[0] != word)])
    return line


def withdraw_request(file: str | os.PathLike[str], line: str) -> None:
    """Take back what `leave_request` wrote, if it still waits. Raises as that does."""
    if os.path.lexists(file):
        _change(Path(file), lambda waiting: [other for other in waiting if other != line])


def _change(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    """What waits becomes what `change` makes of it. The file is taken, and stands there anew as a whole: it may be read at any moment."""
    waiting: list[str] = []
    draft = path.with_name(f"{path.name}.new-{os.getpid()}")
    while True:
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise ConfigError(f"{path} is no plain file; remove it")
            waiting += claimed_lines(path, "changed")
        except FileNotFoundError:
            pass  # nothing waits, or it was taken in this moment
        if not (lines := change(waiting)):
            return
        try:
            draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            try:
                os.link(draft, path)
            except FileExistsError:
                continue  # somebody else wrote one in this moment
            except OSError:  # a file system without links
                os.replace(draft, path)
            return
        finally:
            draft.unlink(missing_ok=True)


def claimed_lines(path: Path, by: str) -> list[str]:
    """The lines of the file, which is gone then; an empty one asks for a save. Raises OSError where it cannot be had."""
    claimed = path.with_name(f"{path.name}.{by}-{os.getpid()}")
    os.replace(path, claimed)  # what is written from now on is another file
    with open(claimed, "rb") as file:
        content = file.read(LONGEST)
    os.unlink(claimed)
    return [line for line in content.decode("utf-8", "replace").splitlines() if line.strip()] or ["save"]


def printable(text: str) -> str:
    """`text` without what a terminal or a log would obey."""
    return "".join(char if char.isprintable() else " " for char in text).strip()
