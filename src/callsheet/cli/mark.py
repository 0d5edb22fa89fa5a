"""The commands `callsheet mark`, which tags, annotates and archives runs, and `callsheet delete`, which deletes runs."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from callsheet.cli.named_run import runs_named
from callsheet.core.working import working
from callsheet.errors import ConfigError
from callsheet.report.lines import printable
from callsheet.report.notes import Notes, change_notes, read_notes
from callsheet.run.lock_claims import claim_of


def mark(
    given: Sequence[str],
    *,
    folder: str = "runs",
    add: Sequence[str] = (),
    remove: Sequence[str] = (),
    note: str | None = None,
    is_archived: bool | None = None,
) -> str:
    """Change the notes about runs (tags, note, archived), and return the new notes as text, one line for each run.

    Raises:
        ConfigError: there is no such run, a tag is invalid, or a file cannot be written.
    """
    found = _choose_folders(given, Path(folder))
    if not add and not remove and note is None and is_archived is None:
        return "\n".join(_line(path, read_notes(path)) for path in found)
    changed = [(path, change_notes(path, add=add, remove=remove, note=note, is_archived=is_archived)) for path in found]
    return "\n".join(_line(path, notes) for path, notes in changed)


def delete(given: Sequence[str], *, folder: str = "runs", is_confirmed: bool = False) -> Iterator[str]:
    """Delete the folders of runs after a confirmation on the terminal. Yield a line of text for each deleted run.

    Before its files are deleted, a run's folder is renamed, so that an interruption does not leave an incomplete run.

    Raises:
        ConfigError: there is no such run, a run is being trained, is a link or cannot be deleted, or the user does not confirm.
    """
    found = _choose_folders(given, Path(folder))
    _check_can_be_deleted(found)
    if not is_confirmed:
        _confirm(found)
        _check_can_be_deleted(found)  # check again, because training may have begun while the user was asked
    for path in found:
        place = path.resolve()
        gone = place.with_name(f".{place.name}.deleted-{secrets.token_hex(4)}")
        try:
            os.rename(place, gone)
        except OSError as error:
            raise ConfigError(f"{printable(str(path))} cannot be deleted: {error}") from None
        try:
            with working(f"deleting {path}", is_shown=sys.stderr.isatty()):
                shutil.rmtree(gone)
        except OSError as error:
            raise ConfigError(
                f"{printable(str(path))} is no longer a run, but not all of it can be deleted: {error}. The rest is in {gone}"
            ) from None
        yield f"deleted {printable(str(path))}"


def _check_can_be_deleted(found: Sequence[Path]) -> None:
    for path in found:
        claim = claim_of(path)
        if claim is not None and claim.is_alive:
            raise ConfigError(f"{printable(str(path))} is being trained by {claim}; end it first. Nothing was deleted")
        if path.is_symlink():
            raise ConfigError(
                f"{printable(str(path))} is a link; delete the folder that it leads to, or remove the link. Nothing was deleted"
            )


def _confirm(found: Sequence[Path]) -> None:
    """Ask on the terminal whether to delete the runs. Raise ConfigError unless the answer is yes."""
    what = f"{len(found)} {'run' if len(found) == 1 else 'runs'} ({_size(sum(map(_bytes_in, found)))})"
    if not sys.stdin.isatty():
        names = ", ".join(printable(str(path)) for path in found)
        raise ConfigError(f"this would delete {what}: {names}. Confirm it with --yes. Nothing was deleted")
    print("\n".join(f"  {printable(str(path))}" for path in found), file=sys.stderr)
    print(f"Delete {what}, with their checkpoints? This cannot be undone. [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was deleted")


def _choose_folders(given: Sequence[str], folder: Path) -> list[Path]:
    """Return the folders of the given runs, including archived runs, without duplicates."""
    paths = [path for word in given for path in runs_named(word, folder, with_archived=True)]
    found: dict[Path, Path] = {}
    for path in paths:
        found.setdefault(path.absolute() if path.is_symlink() else path.resolve(), path)
    return list(found.values())


def _line(path: Path, notes: Notes) -> str:
    parts = [f"tags {' '.join(notes.tags)}" if notes.tags else "no tags", *(["archived"] if notes.is_archived else [])]
    return printable(f"{path}: {', '.join(parts)}{f'; {notes.note}' if notes.note else ''}")


def _bytes_in(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # the file was deleted after it was listed
                continue
    return total


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
