"""What filled the device when it was out of memory."""

from __future__ import annotations

import logging
import os
import weakref
from pathlib import Path
from typing import Any

import torch

from callsheet.callback import Callback, label_of
from callsheet.callbacks.memory_pages import Drawing
from callsheet.callbacks.memory_snapshot import memory_folder
from callsheet.context import Context
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")


class OOMObserver(Callback):
    """Record the allocations on the CUDA device all the time, and write them down when it is out of memory.

    At the moment of the failure, when everything is still there, each rank that it happens on writes
    `memory/<name>-oom-rank<rank>.pickle` to the run's folder, in torch's own format, which https://pytorch.org/memory_viz reads;
    when the exception leaves the trainer a process of its own makes of it two pages `.html`, by tensors and by the allocator's
    segments, which take their script from the network; the run's end waits for it, two minutes at most, and rank 0's are given to
    the loggers. An out-of-memory error that somebody catches is written too;
    the last one stays. Recording costs every allocation some microseconds.

    Without CUDA there is nothing to observe: it says so, once. The process has one recording: do not use it beside
    `MemorySnapshot`.

    Args:
        max_entries: allocations and frees that are kept; older ones are forgotten.
        stacks: `"all"`, with C++, or `"python"`.
        folder: where to write, if not to the run's folder.

    Raises:
        ConfigError: an argument that cannot work, or a run without a folder where none was given.
    """

    def __init__(
        self, *, max_entries: int = 100_000, stacks: str = "python", folder: str | os.PathLike[str] | None = None
    ) -> None:
        if max_entries < 1:
            raise ConfigError(f"max_entries={max_entries}: give at least one")
        if stacks not in ("all", "python"):
            raise ConfigError(f"stacks={stacks!r}: give 'all' or 'python'")
        self._options: dict[str, Any] = {"max_entries": max_entries, "stacks": stacks}
        self._given_folder = Path(folder) if folder is not None else None
        self._path: Path | None = None  # while it observes
        self._is_attached = self._has_seen = False
        self._drawing: Drawing | None = None

    def on_run_start(self, ctx: Context) -> None:
        """Begin to record, before the model comes to the device."""
        folder = memory_folder(ctx, self._given_folder, label_of(self))
        if not ctx.run.device.startswith("cuda"):
            logger.warning("%s: there is no CUDA device that could run out of memory", label_of(self))
            return
        self._path = folder / f"{label_of(self).replace('/', '-')}-oom-rank{ctx.run.rank}.pickle"
        self._has_seen = False
        torch.cuda.init()
        torch.cuda.memory._record_memory_history(**self._options)
        if not self._is_attached:  # torch knows no way to take an observer off again
            self._is_attached = True
            me = weakref.ref(self)

            def observe(device: int, allocated: int, total: int, free: int) -> None:
                if (observer := me()) is not None:
                    observer.write(device, allocated)

            bindings: Any = torch._C
            bindings._cuda_attach_out_of_memory_observer(observe)

    def on_exception(self, ctx: Context) -> None:
        """Draw what was written."""
        path, self._path = self._path, None
        if path is None:
            return
        torch.cuda.memory._record_memory_history(enabled=None)
        if self._has_seen:
            self._drawing = Drawing()
            self._drawing.begin(ctx, path)

    def on_run_end(self, ctx: Context) -> None:
        """Nothing is recorded any more, and the pages are there."""
        if self._drawing is not None:
            self._drawing.end(ctx)
            self._drawing = None
        if self._path is not None:
            self._path = None
            torch.cuda.memory._record_memory_history(enabled=None)

    def write(self, device: int, asked: int) -> None:
        """For torch's allocator, which calls it before it raises: `asked` bytes could not be had."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._path))
            self._has_seen = True
            logger.error(
                "%s: no room for %d bytes on device %d; what fills it is in %s", label_of(self), asked, device, self._path
            )
        except Exception:
            logger.exception("%s: the memory cannot be written down", label_of(self))
