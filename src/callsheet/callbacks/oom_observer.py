"""Writes a memory snapshot when the device runs out of memory."""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import Any

import torch

from callsheet.callbacks.memory_snapshot import STACKS, Stacks, memory_folder
from callsheet.callbacks.support.memory_pages import Drawing
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.run_state import RunInfo
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")


class OOMObserver(Callback):
    """Record the allocations on the CUDA device all the time, and write a snapshot if the device runs out of memory.

    At the moment of the failure, while everything is still allocated, each affected rank writes
    `memory/<name>-oom-rank<rank>.pickle` to the run's folder, in torch's own format, which https://pytorch.org/memory_viz reads.
    When the exception leaves the trainer, another process draws two `.html` pages from the snapshot, one by tensors and one by
    the allocator's segments; the pages load their script from the network. The end of the run waits up to two minutes for the
    pages, and the pages of rank 0 are logged. A snapshot is also written for an out-of-memory error that the program catches;
    each snapshot replaces the one before. Recording makes each allocation slower.

    Without CUDA there is nothing to observe, and a warning says so. Torch keeps only one recording per process, so do not use
    this callback together with `MemorySnapshot`.

    Args:
        max_entries: the number of allocations and frees to keep; older ones are dropped.
        stacks: `"all"` records Python and C++ frames, `"python"` only Python frames.
        folder: where to write instead of the run's folder.

    Raises:
        ConfigError: an argument is invalid, or the run has no folder and none was given.
    """

    writes_to_run_folder = True

    def __init__(
        self, *, max_entries: int = 100_000, stacks: Stacks = "python", folder: str | os.PathLike[str] | None = None
    ) -> None:
        if max_entries < 1:
            raise ConfigError(f"max_entries={max_entries}: give at least one")
        if stacks not in STACKS:
            raise ConfigError(f"stacks={stacks!r}: give 'all' or 'python'")
        self._options: dict[str, Any] = {"max_entries": max_entries, "stacks": stacks}
        self._given_folder = Path(folder) if folder is not None else None
        self._path: Path | None = None  # file of the snapshot; None while allocations are not recorded
        self._run: RunInfo | None = None
        self._is_attached = self._has_seen = False
        self._drawing: Drawing | None = None

    def on_run_start(self, ctx: Context) -> None:
        """Start to record allocations before the model is moved to the device."""
        folder = memory_folder(ctx, self._given_folder, label_of(self))
        if not ctx.run.device.startswith("cuda"):
            logger.warning("%s: there is no CUDA device, so nothing is observed", label_of(self))
            return
        self._path = folder / f"{label_of(self).replace('/', '-')}-oom-rank{ctx.run.rank}.pickle"
        self._has_seen, self._run = False, ctx.run
        torch.cuda.init()
        torch.cuda.memory._record_memory_history(**self._options)
        if not self._is_attached:  # attach only once, since torch cannot remove an observer
            self._is_attached = True
            me = weakref.ref(self)

            def observe(device: int, allocated: int, total: int, free: int) -> None:
                if (observer := me()) is not None:
                    observer.write(device, allocated)

            bindings: Any = torch._C
            bindings._cuda_attach_out_of_memory_observer(observe)

    def on_exception(self, ctx: Context) -> None:
        """Stop recording allocations. If a snapshot was written, start to render the snapshot as HTML pages."""
        path, self._path = self._path, None
        if path is None:
            return
        torch.cuda.memory._record_memory_history(enabled=None)
        if self._has_seen and ctx.run.may_write(path):
            self._drawing = Drawing()
            self._drawing.begin(ctx, path)

    def on_run_end(self, ctx: Context) -> None:
        """Wait until the HTML pages are written, for up to two minutes, and then stop recording allocations."""
        if self._drawing is not None:
            self._drawing.end(ctx)
            self._drawing = None
        if self._path is not None:
            self._path = None
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, device: int, asked: int) -> None:
        """Write a snapshot of the allocations.

        Torch's allocator calls this method before it raises an out-of-memory error.

        Args:
            device: the index of the CUDA device that has too little memory.
            asked: how many bytes were requested.
        """
        if self._path is None or (self._run is not None and not self._run.may_write(self._path)):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._path))
            self._has_seen = True
            logger.error(
                "%s: no room for %d bytes on device %d; a snapshot of its memory is in %s",
                label_of(self),
                asked,
                device,
                self._path,
            )
        except Exception:  # torch is about to raise OutOfMemoryError, which another error must not replace
            logger.exception("%s: the memory snapshot could not be written", label_of(self))
