"""Training stops with a checkpoint before the disk is full."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from callsheet.callback import Callback, label_of
from callsheet.context import Context
from callsheet.disk_thread import finish_deletions
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

_WARN_CHECKPOINTS, _STOP_CHECKPOINTS = 3.0, 1.1  # how many of the largest must still have room


class DiskSpaceGuard(Callback):
    """Warn when the disk of the checkpoints runs full, and stop, with a last checkpoint, while there is room for one.

    It looks at log boundaries and before a checkpoint, on one rank of each machine; all ranks agree on the stop. The limits are
    the given ones, or what three, and one, of the run's largest checkpoints take, where that is more. A limit is warned of once,
    and again when there was room in between. Checkpoints at a URL are not looked at: the run's folder is then.

    A run that begins below the limit for stopping stops at its first record: it has nothing to lose yet.

    Args:
        warn_below: free bytes.
        stop_below: free bytes; 0 never stops.
        path: what to look at instead: any folder or file on that disk.

    Raises:
        ConfigError: an argument that cannot work.
    """

    phase = "decide"
    ranks = "local_zero"

    def __init__(
        self, *, warn_below: int = 10 * 2**30, stop_below: int = 2**30, path: str | os.PathLike[str] | None = None
    ) -> None:
        if stop_below < 0 or warn_below < stop_below:
            raise ConfigError(f"warn_below={warn_below}, stop_below={stop_below}: give 0 <= stop_below <= warn_below")
        self._warn_below = warn_below
        self._stop_below = stop_below
        self._path = Path(path) if path is not None else None
        self._place: Path | None = None  # that is looked at
        self._largest = 0  # checkpoint, in bytes
        self._has_warned = self._has_stopped = False

    def on_train_start(self, ctx: Context) -> None:
        """A new stretch of training may stop anew."""
        self._has_stopped, self._place = False, None

    def on_log(self, ctx: Context) -> None:
        """Look; stop while there is room."""
        free = self._look(ctx)
        if free is None or not self._stop_below or self._has_stopped:
            return
        limit = max(self._stop_below, int(self._largest * _STOP_CHECKPOINTS))
        if free < limit:
            self._has_stopped = True
            why = f"only {_size(free)} of disk space are free at {self._place} on node {ctx.run.node_rank}, below the limit of {_size(limit)}"
            logger.error("%s: training stops: %s; free some, and resume", label_of(self), why)
            if free > self._largest:
                ctx.control.save(why, by=label_of(self))
            ctx.control.stop(why, resumable=True)

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        """Look before it is written."""
        free = self._look(ctx)
        if free is not None and free < self._largest:
            sizes = f"{_size(free)} are free at {self._place}, and the last one took {_size(self._largest)}"
            logger.warning("%s: the checkpoint that is being written may not fit: %s", label_of(self), sizes)

    def on_checkpoint_published(self, ctx: Context) -> None:
        """So large they are."""
        self._place = None  # it is made with the first
        if ctx.checkpoint is not None:
            self._largest = max(self._largest, ctx.checkpoint.size_bytes)

    on_checkpoint_load_end = on_checkpoint_published

    def state_dict(self) -> Mapping[str, Any]:
        """The size of the largest checkpoint."""
        return {"largest": self._largest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._largest = state["largest"]

    def _found(self, ctx: Context) -> Path:
        """Where to look: what there is of the path to the checkpoints."""
        place = self._path
        if place is None:
            place = Path(ctx.run.checkpoints) if "://" not in ctx.run.checkpoints else (ctx.run.folder or Path())
        place = place.absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        return place

    def _free(self, ctx: Context) -> int:
        """The free bytes where it looks, which is found anew where it has gone."""
        finish_deletions()
        if self._place is not None:
            with suppress(FileNotFoundError):
                return shutil.disk_usage(self._place).free
        self._place = self._found(ctx)
        return shutil.disk_usage(self._place).free

    def _look(self, ctx: Context) -> int | None:
        """The free bytes, after a warning where they are few; None where they cannot be known."""
        try:
            free = self._free(ctx)
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s: the disk at %s cannot be looked at: %s", label_of(self), self._place, error)
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
