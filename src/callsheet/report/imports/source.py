"""Finds other tools' files below a path. Symbolic links to folders, and to files outside of the path, are not followed."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from callsheet.errors import ConfigError
from callsheet.report.lines import inside

EVENT_FILE_INFIX = "events.out.tfevents."
"""A text that the name of every TensorBoard event file contains."""

_MAX_ENTRIES = 1_000_000
_FILE_PATTERN = re.compile(
    r".*events\.out\.tfevents\..*|.*\.wandb|trainer_state\.json|metrics\.csv|meta\.yaml|.*\.(db|sqlite|sqlite3)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Source:
    """A path to import from, with symbolic links resolved, and the files below it that may belong to another tool's run.

    If the path is a file, `folder` is the folder of the file, otherwise the path itself.
    """

    path: Path
    files: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        """The folder that contains all files of the source, directly or in subfolders."""
        return self.path if self.path.is_dir() else self.path.parent

    @classmethod
    def at(cls, given: str | os.PathLike[str]) -> Source:
        """Return the source for `given`, which is a path, `file:...` or `sqlite:///...`.

        Raises:
            ConfigError: there is no such file or folder, `given` is the address of a server, or the folder has too many files.
        """
        text = os.fspath(given)
        for scheme in ("sqlite:///", "file://", "file:"):
            if text.startswith(scheme):
                text = text.removeprefix(scheme)
                break
        if "://" in text:
            raise ConfigError(
                f"{given} is on a server; import reads files: give the folder or the SQLite file that the server uses"
            )
        try:
            path = Path(text).expanduser().resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"there is no file or folder {given} to import from ({type(error).__name__})") from None
        return cls(path, tuple(_files_below(path)) if path.is_dir() else (path,))


def _files_below(folder: Path) -> list[Path]:
    found, entries = [], 0
    for place, folders, files in os.walk(folder):  # links to folders are not followed, because they may form a loop
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        entries += len(folders) + len(files)
        if entries > _MAX_ENTRIES:
            raise ConfigError(f"{folder} has more than {_MAX_ENTRIES:,} files; give a folder further down")
        relative = Path(place).relative_to(folder)
        names = sorted(name for name in files if not name.startswith(".") and _FILE_PATTERN.fullmatch(name))
        found += [folder / relative / name for name in names if inside(folder, relative / name) is not None]
    return found
