"""`callsheet export`: the weights of a run as others load them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from callsheet.commands.opened import name_of, opened
from callsheet.errors import ConfigError


def export(run: str, overrides: Sequence[str], *, folder: str, checkpoint: str | None = None) -> str:
    """Write the model of the checkpoint, with its tokenizer or processor, and say what was written; of several ranks, rank 0 does and says.

    Raises:
        ConfigError: no such run or checkpoint, or something stands in the folder already.
        CheckpointError: the checkpoint does not hold, or the folder cannot be written.
    """
    path = Path(folder)
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty; name a new folder")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; name a new folder")
    job = opened(run, overrides, command="export", checkpoint=checkpoint)
    with job.trainer:
        job.export(path)
    if job.ranks.rank != 0:  # which may have no such folder
        return ""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files) / 1e6
    return f"{name_of(job)}: {path} ({size:.1f} MB): {', '.join(file.name for file in files)}"
