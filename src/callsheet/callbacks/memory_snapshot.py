"""Every allocation on the device during a few steps."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from callsheet.callback import Callback, label_of
from callsheet.callbacks.memory_pages import Drawing
from callsheet.context import Context
from callsheet.distributed import RankGate
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")


class MemorySnapshot(Callback):
    """Record every allocation on the CUDA device for a few steps, with its stack, and write it down, once a run.

    After `skip_batches` steps it records `interval` steps and writes `memory/<name>-step<step>-rank<rank>.pickle` to the run's
    folder, in torch's own format, which https://pytorch.org/memory_viz reads. A process of its own makes of it two pages `.html`,
    by tensors and by the allocator's segments, which take their script from the network. Training goes on meanwhile; the run's end
    waits for them, two minutes at most. The loggers are given rank 0's, the pages at the run's end. What an exception cuts short
    is written as far as it got. A resumed run that has passed those steps records nothing. Recording costs every allocation some
    microseconds; before and after it costs a comparison a step.

    Without CUDA there is nothing to record: it says so, once. The process has one recording: two of these that overlap end each
    other.

    Args:
        skip_batches: see above, like `interval`.
        interval: how many steps.
        max_entries: allocations and frees that are kept; older ones are forgotten.
        stacks: `"all"`, with C++, or `"python"`.
        ranks: which ranks record: `zero`, `local_zero`, `all` or a set of ranks.
        folder: where to write, if not to the run's folder.

    Raises:
        ConfigError: an argument that cannot work, or a run without a folder where none was given.
    """

    def __init__(
        self,
        *,
        skip_batches: int = 1,
        interval: int = 3,
        max_entries: int = 100_000,
        stacks: str = "python",
        ranks: RankGate = "all",
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if skip_batches < 0 or interval < 1 or max_entries < 1:
            values = f"skip_batches={skip_batches}, interval={interval}, max_entries={max_entries}"
            raise ConfigError(f"{values}: give 0 or more, 1 or more, and 1 or more")
        if stacks not in ("all", "python"):
            raise ConfigError(f"stacks={stacks!r}: give 'all' or 'python'")
        self._first, self._last = skip_batches + 1, skip_batches + interval
        self._options: dict[str, Any] = {"max_entries": max_entries, "stacks": stacks}
        self.ranks = ranks
        self._given_folder = Path(folder) if folder is not None else None
        self._is_able = self._is_recording = False
        self._drawing: Drawing | None = None

    def on_run_start(self, ctx: Context) -> None:
        """See whether there is anything to record."""
        memory_folder(ctx, self._given_folder, label_of(self))
        self._is_able = ctx.run.device.startswith("cuda")
        if not self._is_able:
            logger.warning("%s: there is no CUDA device whose memory could be recorded", label_of(self))

    def on_train_step_start(self, ctx: Context) -> None:
        """Begin to record."""
        if ctx.step == self._first and self._is_able:
            torch.cuda.memory._record_memory_history(**self._options)
            self._is_recording = True

    def on_train_step_end(self, ctx: Context) -> None:
        """Write it down."""
        if ctx.step >= self._last and self._is_recording:
            self._end(ctx)

    def on_train_end(self, ctx: Context) -> None:
        """Write what there is."""
        if self._is_recording:
            self._end(ctx)

    on_exception = on_train_end

    def on_run_end(self, ctx: Context) -> None:
        """The pages are there."""
        if self._drawing is not None:
            self._drawing.end(ctx)
            self._drawing = None

    def _end(self, ctx: Context) -> None:
        self._is_recording = False
        try:
            folder = memory_folder(ctx, self._given_folder, label_of(self))
            path = folder / f"{label_of(self).replace('/', '-')}-step{ctx.step}-rank{ctx.run.rank}.pickle"
            folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._drawing = Drawing()
        self._drawing.begin(ctx, path)


def memory_folder(ctx: Context, given: Path | None, label: str) -> Path:
    """Where snapshots are written; ConfigError where nobody said."""
    if given is None and ctx.run.folder is None:
        raise ConfigError(f"the run has no folder for memory snapshots; give {label} a folder=")
    return given or Path(ctx.run.folder or "", "memory")
