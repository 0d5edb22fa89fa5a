"""The file with requests to a running job: one request and its reason per line. `SaveOnTrigger` reads it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from callsheet.core.callback import one_of
from callsheet.errors import ConfigError

TRIGGER_WORDS = ("save", "evaluate", "stop")
MAX_FILE_BYTES = 4096  # read at most this many bytes of the file
MAX_REASON_CHARACTERS = 200


def leave_request(file: str | os.PathLike[str], word: str, why: str = "") -> str:
    """Write a request for the job whose `SaveOnTrigger` reads the file.

    Other requests in the file stay. A request of the same kind is replaced.

    Args:
        file: the trigger file, which need not exist.
        word: the request: `save`, `evaluate` or `stop`.
        why: the reason, of which 200 characters are kept.

    Returns:
        The line that was written, with which `withdraw_request` removes the request.

    Raises:
        ConfigError: `word` is not a request, or `file` is not a regular file.
        OSError: the file cannot be written.
    """
    line = f"{one_of('request', word, TRIGGER_WORDS)} {printable(why)[:MAX_REASON_CHARACTERS]}".rstrip()
    _change(Path(file), lambda waiting: [line, *(other for other in waiting if other.split()[0] != word)])
    return line


def withdraw_request(file: str | os.PathLike[str], line: str) -> None:
    """Remove a request from the trigger file, if the job has not read it yet.

    Args:
        file: the trigger file.
        line: the line that `leave_request` returned.

    Raises:
        ConfigError: `file` is not a regular file.
        OSError: the file cannot be written.
    """
    if os.path.lexists(file):
        _change(Path(file), lambda waiting: [other for other in waiting if other != line])


def _change(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    """Call `change` with the requests in the trigger file. Write the requests that `change` returns to the file.

    The file is replaced atomically, because the job may read it at any time.
    """
    waiting: list[str] = []
    draft = path.with_name(f"{path.name}.new-{os.getpid()}")
    while True:
        waiting += _take_lines(path)
        if not (lines := change(waiting)):
            return
        try:
            draft.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            try:
                os.link(draft, path)
            except FileExistsError:
                continue  # another process has just written the file, so start again and include the requests in it
            except OSError:  # the disk has no hard links: use `replace`, which may overwrite another process's request
                os.replace(draft, path)
            return
        finally:
            draft.unlink(missing_ok=True)


def _take_lines(path: Path) -> list[str]:
    """Remove the trigger file and return its lines; none if there is no such file, perhaps because the job has just read it."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise ConfigError(f"{path} is not a regular file; remove it")
        return claim_lines(path, "changed")
    except FileNotFoundError:
        return []


def claim_lines(path: Path, by: str) -> list[str]:
    """Remove the trigger file and return its lines. An empty file counts as a request to save. Raise OSError on failure."""
    claimed = path.with_name(f"{path.name}.{by}-{os.getpid()}")
    os.replace(path, claimed)  # after the rename, requests of other processes go to a new file
    with open(claimed, "rb") as file:
        content = file.read(MAX_FILE_BYTES)
    os.unlink(claimed)
    return [line for line in content.decode("utf-8", "replace").splitlines() if line.strip()] or ["save"]


def printable(text: str) -> str:
    """Return `text` with a space in place of each control character, and without spaces at its ends."""
    return "".join(char if char.isprintable() else " " for char in text).strip()
