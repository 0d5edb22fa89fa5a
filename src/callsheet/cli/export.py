"""`callsheet export`: write the weights of a run in the format of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from callsheet.cli.opened import name_of, open_run
from callsheet.errors import ConfigError


def export(run: str, overrides: Sequence[str], *, folder: str, checkpoint: str | None = None) -> str:
    """Write a run's model, with its tokenizer or processor, to a Hugging Face folder. Only rank 0 writes. Return a summary.

    Raises:
        ConfigError: there is no such run or checkpoint, or the folder is not empty.
        CheckpointError: the checkpoint is invalid, or the folder cannot be written.
    """
    path = Path(folder)
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty; name a new folder")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; name a new folder")
    job = open_run(run, overrides, command="export", checkpoint=checkpoint)
    with job.trainer:
        job.export(path)
    if job.ranks.rank != 0:  # only rank 0 looks at the folder, which may not exist on the machines of other ranks
        return ""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files) / 1e6
    return f"{name_of(job)}: {path} ({size:.1f} MB): {', '.join(file.name for file in files)}"
