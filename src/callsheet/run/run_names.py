"""Checks of the arguments that name a run and its folders; the name of a run is also the name of its folder."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from callsheet.errors import ConfigError

_MAX_NAME_BYTES = 200
"""The longest name of a run. File systems allow 255 bytes, and callsheet's own files next to the run's folder have longer names."""


def check_run_name(run_name: str | None, resume: object) -> None:
    """Raise ConfigError if `run_name` cannot be used for a folder, or is missing although `resume="auto"` needs it."""
    check_resume(resume)
    if run_name is not None and (not isinstance(run_name, str) or Path(run_name).name != run_name or run_name in ("", "..")):
        raise ConfigError(f"run_name={run_name!r} must be a plain name: it is also the name of the run's folder")
    if run_name is not None and len(os.fsencode(run_name)) > _MAX_NAME_BYTES:
        raise ConfigError(f"run_name={run_name[:40]!r}... is longer than {_MAX_NAME_BYTES} bytes; give a shorter one")
    if resume == "auto" and run_name is None:
        raise ConfigError("resume='auto' needs a run_name: a new name has no checkpoints to resume from")


def check_resume(resume: object) -> None:
    """Raise ConfigError if `resume` is not a string, a path or None."""
    if resume is not None and not isinstance(resume, (str, os.PathLike)):
        raise ConfigError(f"resume={resume!r}: give 'auto', the path of a checkpoint, or None")


def check_folder(argument: str, folder: object) -> None:
    """Raise ConfigError if `folder` is neither a path nor None. `argument` is the argument's name, for the error message."""
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise ConfigError(f"{argument}={folder!r}: give the path of a folder, such as 'runs'")


def new_name() -> str:
    """Return a name for a run that the user did not name.

    The name is the time with random digits, because two runs may begin within a second.
    """
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
