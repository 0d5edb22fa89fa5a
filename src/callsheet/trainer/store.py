"""The checkpoints in a run's folder: which one to resume from, and where the next one goes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from callsheet.checkpoint import find_checkpoints, point_latest, read_checkpoint, write_checkpoint
from callsheet.context import CheckpointInfo, RunInfo
from callsheet.errors import CheckpointError, ConfigError

logger = logging.getLogger("callsheet")

AUTO = "auto"


class Store:
    """Reads and writes `<run folder>/checkpoints`."""

    def __init__(self, run: RunInfo) -> None:
        self._run = run
        self._written: set[Path] = set()

    @property
    def folder(self) -> Path:
        """Where the run's checkpoints stand."""
        assert self._run.folder is not None
        return self._run.folder / "checkpoints"

    def choose(self, resume: str | os.PathLike[str] | None) -> tuple[dict[str, Any], CheckpointInfo] | None:
        """The state to resume from, or None to start anew.

        `"auto"` takes the newest checkpoint that holds and is good, and says why it left out others; a path is that one or an error.

        Raises:
            ConfigError: to start anew where another run has written.
            CheckpointError: the path's checkpoint does not hold.
        """
        if resume is None:
            if self._run.folder is not None and self._run.folder.exists() and any(self._run.folder.iterdir()):
                raise ConfigError(
                    f"{self._run.folder} holds a run already; resume='auto' goes on with it, another run_name starts anew beside it"
                )
            return None
        if os.fspath(resume) != AUTO:
            return self._read(Path(resume))
        found = find_checkpoints(self.folder)
        for path, reason in found.skipped:
            logger.warning("not resuming from %s: %s", path, reason)
        for checkpoint in found.checkpoints:
            if not checkpoint.seal.info.get("is_finite", True):
                logger.warning("not resuming from %s: it was saved with a loss or weights that are not finite", checkpoint.path)
                continue
            try:
                return self._read(checkpoint.path)
            except CheckpointError as error:
                logger.warning("not resuming from %s: %s", checkpoint.path, error)
        return None

    def write(self, state: Mapping[str, Any], info: CheckpointInfo, *, is_finite: bool) -> int:
        """Write and seal one checkpoint at `info.path`; returns its size in bytes.

        What stands there from before a resume belongs to a future that did not happen, and is replaced once the new one is sealed.
        """
        path = Path(info.path)
        size = write_checkpoint(
            path, dict(state), {**_without_path(info), "is_finite": is_finite, "run": self._run.name}, overwrite=True
        )
        self._written.add(path)
        if is_finite and path.parent == self.folder:
            point_latest(path)
        return size

    def path_for(self, epoch: int, step: int, kind: str) -> Path:
        """A folder that this process has not written yet."""
        path = self.folder / f"ep{epoch}-ba{step}"
        if path in self._written:
            path = self.folder / f"{path.name}-{kind}"
        number = 2
        while path in self._written:
            path, number = self.folder / f"ep{epoch}-ba{step}-{kind}-{number}", number + 1
        return path

    def _read(self, path: Path) -> tuple[dict[str, Any], CheckpointInfo]:
        state, info = read_checkpoint(path)
        try:
            known = {
                name: info[name]
                for name in ("step", "epoch", "kind", "train_loss", "val_losses", "best_metric_key", "size_bytes")
            }
        except KeyError as error:
            raise CheckpointError(f"{path} is not a checkpoint of a Trainer: its seal does not tell {error}") from None
        return state, CheckpointInfo(path=str(path), **known)


def _without_path(info: CheckpointInfo) -> dict[str, Any]:
    return {name: value for name, value in asdict(info).items() if name != "path"}
