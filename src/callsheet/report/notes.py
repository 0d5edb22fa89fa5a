"""Reads and changes `notes.json` in a run's folder: the user's tags and note, and whether the run is archived."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from callsheet.errors import ConfigError
from callsheet.loggers.support.file_names import replace_file
from callsheet.report.lines import text_of

NOTES = "notes.json"
_MAX_FILE_BYTES = 2**16
_TAG_PATTERN = re.compile(r"[\w.:/+@#-]{1,64}")


@dataclass(frozen=True, slots=True)
class Notes:
    """What a user has noted about a run: sorted tags, a note, and whether the run is archived (left out of lists of runs)."""

    tags: tuple[str, ...] = ()
    note: str = ""
    is_archived: bool = False


def read_notes(folder: str | os.PathLike[str]) -> Notes:
    """Return the notes about the run in `folder`. If the file is missing or invalid, return empty notes."""
    try:
        found = json.loads(text_of(Path(folder), NOTES, at_most=_MAX_FILE_BYTES))
    except (ValueError, RecursionError):
        return Notes()
    if not isinstance(found, dict):
        return Notes()
    tags = found.get("tags")
    valid = {tag for tag in tags if isinstance(tag, str) and _TAG_PATTERN.fullmatch(tag)} if isinstance(tags, list) else set()
    note = found.get("note")
    return Notes(tuple(sorted(valid)), note if isinstance(note, str) else "", found.get("is_archived") is True)


def change_notes(
    folder: str | os.PathLike[str],
    *,
    add: Collection[str] = (),
    remove: Collection[str] = (),
    note: str | None = None,
    is_archived: bool | None = None,
) -> Notes:
    """Change the notes about the run in `folder`, and return the new notes. An argument of None changes nothing.

    Raises:
        ConfigError: a tag is not 1 to 64 letters, digits and `. : / + @ # - _`, the note is too long, or the file cannot be written.
    """
    for tag in add:
        if not _TAG_PATTERN.fullmatch(tag):
            raise ConfigError(
                f"the tag {tag!r} is not possible: a tag has 1 to 64 letters, digits or . : / + @ # - _, and no spaces"
            )
    before = read_notes(folder)
    tags = tuple(sorted({*before.tags, *add} - {*remove}))
    after = replace(
        before,
        tags=tags,
        note=before.note if note is None else note,
        is_archived=before.is_archived if is_archived is None else is_archived,
    )
    content = json.dumps(asdict(after), indent=1).encode()
    if len(content) >= _MAX_FILE_BYTES:
        raise ConfigError(f"the notes of a run have at most {_MAX_FILE_BYTES:,} bytes, and these have {len(content):,}")
    path = Path(folder) / NOTES
    try:
        replace_file(path, content + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from None
    return after
