"""Stops training with a checkpoint before the disk is full."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from callsheet.checkpoint.disk_thread import finish_deletions
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.ranks import RankGate
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

# Warn, and stop, when the free space falls below these multiples of the largest checkpoint's size.
_WARN_CHECKPOINTS, _STOP_CHECKPOINTS = 3.0, 1.1


class DiskSpaceGuard(Callback):
    """Warn when the disk that holds the checkpoints runs full, and stop training while there is room for a last checkpoint.

    One rank of each machine checks the disk when a metrics record is made and before a checkpoint; all ranks stop together. The
    limit for the warning is `warn_below` or the size of three checkpoints, whichever is larger. The limit for the stop is
    `stop_below` or 1.1 times the size of a checkpoint, whichever is larger. The warning is logged once, and again if there was
    enough room in between. If the checkpoints are at a URL, the disk of the run's folder is checked.

    A run that starts with too little free space stops at its first metrics record, before much work could be lost.

    Args:
        warn_below: free bytes below which to warn.
        stop_below: free bytes below which to stop; 0 never stops.
        path: any folder or file on the disk to check; None means the disk of the checkpoints.

    Raises:
        ConfigError: an argument is invalid.
    """

    phase = "decide"
    ranks: RankGate = "local_zero"
    requests = ("stop", "save")

    def __init__(
        self, *, warn_below: int = 10 * 2**30, stop_below: int = 2**30, path: str | os.PathLike[str] | None = None
    ) -> None:
        if stop_below < 0 or warn_below < stop_below:
            raise ConfigError(f"warn_below={warn_below}, stop_below={stop_below}: give 0 <= stop_below <= warn_below")
        self._warn_below = warn_below
        self._stop_below = stop_below
        self._path = Path(path) if path is not None else None
        self._place: Path | None = None  # the folder whose disk is checked; None until the folder is looked up
        self._largest = 0  # size of the largest checkpoint, in bytes
        self._has_warned = self._has_stopped = False

    def on_train_start(self, ctx: Context) -> None:
        """Reset what this object stored in an earlier call of `fit`: whether it requested a stop, and which folder it checked."""
        self._has_stopped, self._place = False, None

    def on_log(self, ctx: Context) -> None:
        """Request a stop if the disk is nearly full. Request a last checkpoint too, if there is still room for one."""
        free = self._check_disk(ctx)
        if free is None or not self._stop_below or self._has_stopped:
            return
        limit = max(self._stop_below, int(self._largest * _STOP_CHECKPOINTS))
        if free < limit:
            self._has_stopped = True
            why = f"only {_size(free)} of disk space are free at {self._place} on node {ctx.run.node_rank}, below the limit of {_size(limit)}"
            logger.error("%s: training stops: %s; free some space, then resume", label_of(self), why)
            if free > self._largest:
                ctx.control.save(why, by=label_of(self))
            ctx.control.stop(why, resumable=True)

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        """Warn if there may not be enough room for the checkpoint."""
        free = self._check_disk(ctx)
        if free is not None and free < self._largest:
            sizes = f"{_size(free)} are free at {self._place}, and the last one took {_size(self._largest)}"
            logger.warning("%s: the checkpoint that is being written may not fit: %s", label_of(self), sizes)

    def on_checkpoint_published(self, ctx: Context) -> None:
        """Store the size of the largest checkpoint so far, because the limits for free space depend on this size."""
        self._place = None  # look up the checkpoint folder at the next check, because the first save creates this folder
        if ctx.checkpoint is not None:
            self._largest = max(self._largest, ctx.checkpoint.size_bytes)

    on_checkpoint_load_end = on_checkpoint_published

    def state_dict(self) -> Mapping[str, Any]:
        return {"largest": self._largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._largest = state["largest"]

    def _find_folder(self, ctx: Context) -> Path:
        """Return the checkpoint folder or, if it does not exist yet, its nearest existing parent."""
        place = self._path
        if place is None:
            place = Path(ctx.run.checkpoints) if "://" not in ctx.run.checkpoints else (ctx.run.folder or Path())
        place = place.absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        return place

    def _free(self, ctx: Context) -> int:
        """Return the free bytes on the disk of the checkpoint folder.

        If the folder has been removed, look it up again.
        """
        finish_deletions()
        if self._place is not None:
            with suppress(FileNotFoundError):
                return shutil.disk_usage(self._place).free
        self._place = self._find_folder(ctx)
        return shutil.disk_usage(self._place).free

    def _check_disk(self, ctx: Context) -> int | None:
        """Return the number of free bytes on the checkpoint disk, and warn if it is low. If the check fails, return None."""
        try:
            free = self._free(ctx)
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s: the disk at %s cannot be checked: %s", label_of(self), self._place, error)
            self._has_warned = True
            return None
        limit = max(self._warn_below, int(self._largest * _WARN_CHECKPOINTS))
        if free < limit and not self._has_warned:
            logger.warning("%s: only %s are free at %s, below %s", label_of(self), _size(free), self._place, _size(limit))
        self._has_warned = free < limit
        return free


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
