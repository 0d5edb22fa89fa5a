"""Makes paths in a run's folder from names that users choose."""

from __future__ import annotations

import os
import re
from pathlib import Path

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.errors import ConfigError


def path_from(name: str) -> str:
    """Convert `name` to a relative path that every file system accepts and that does not lead out of its folder, as `..` would.

    Slashes in the name separate folders.
    """
    return "/".join(re.sub(r"[^\w.-]", "_", part).lstrip(".") or "_" for part in name.split("/"))


def folder_of(logger: Callback, ctx: Context) -> Path:
    """Return the folder of a logger: the run's folder or, if the logger has a `name`, a folder of that name in the run's folder.

    Raises:
        ConfigError: the run has no folder.
    """
    if ctx.run.folder is None:
        kind = type(logger).__name__
        raise ConfigError(f"the run has no folder to write to; give it one, or leave {kind} out")
    return ctx.run.folder / path_from(logger.name) if logger.name else ctx.run.folder


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically, so that a reader sees either the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)  # after an error, remove the draft to free space on a full disk
        raise
