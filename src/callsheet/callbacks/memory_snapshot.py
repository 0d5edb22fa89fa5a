"""Writes a snapshot of every allocation on the device during a few steps."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from callsheet.callbacks.support.memory_pages import Drawing
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.ranks import RankGate
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

Stacks = Literal["all", "python"]
STACKS: tuple[Stacks, ...] = get_args(Stacks)


class MemorySnapshot(Callback):
    """Once per run, record every allocation on the CUDA device during a few steps, with its call stack, and write a snapshot.

    After `skip_batches` steps it records `interval` steps and writes `memory/<name>-step<step>-rank<rank>.pickle` to the run's
    folder, in torch's own format, which https://pytorch.org/memory_viz reads. Another process draws two `.html` pages from the
    snapshot, one by tensors and one by the allocator's segments; the pages load their script from the network. Training continues
    while they are drawn; the end of the run waits up to two minutes for them. Loggers receive rank 0's snapshot, and its pages
    when the run ends. If an exception ends the recording early, what was recorded is written. A run that is resumed after those
    steps records nothing. Recording makes each allocation slower; before and after, the callback costs a comparison per
    step.

    Without CUDA there is nothing to record, and a warning says so. Torch keeps only one recording per process: if the recordings
    of two such callbacks overlap, the first to end also ends the other.

    Args:
        skip_batches: the number of steps before the recording.
        interval: the number of steps to record.
        max_entries: the number of allocations and frees to keep; older ones are dropped.
        stacks: `"all"` records Python and C++ frames, `"python"` only Python frames.
        ranks: which ranks record: `zero`, `local_zero`, `all` or a set of ranks.
        folder: where to write instead of the run's folder.

    Raises:
        ConfigError: an argument is invalid, or the run has no folder and none was given.
    """

    writes_to_run_folder = True

    def __init__(
        self,
        *,
        skip_batches: int = 1,
        interval: int = 3,
        max_entries: int = 100_000,
        stacks: Stacks = "python",
        ranks: RankGate = "all",
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if skip_batches < 0 or interval < 1 or max_entries < 1:
            values = f"skip_batches={skip_batches}, interval={interval}, max_entries={max_entries}"
            raise ConfigError(f"{values}: give 0 or more, 1 or more, and 1 or more")
        if stacks not in STACKS:
            raise ConfigError(f"stacks={stacks!r}: give 'all' or 'python'")
        self._first, self._last = skip_batches + 1, skip_batches + interval
        self._options: dict[str, Any] = {"max_entries": max_entries, "stacks": stacks}
        self.ranks = ranks
        self._given_folder = Path(folder) if folder is not None else None
        self._is_able = self._is_recording = False
        self._drawing: Drawing | None = None

    def on_run_start(self, ctx: Context) -> None:
        """Raise ConfigError if there is no folder for snapshots. Warn if there is no CUDA device."""
        memory_folder(ctx, self._given_folder, label_of(self))
        self._is_able = ctx.run.device.startswith("cuda")
        if not self._is_able:
            logger.warning("%s: there is no CUDA device, so nothing is recorded", label_of(self))

    def on_train_step_start(self, ctx: Context) -> None:
        """Start recording allocations at the first of the steps to record."""
        if ctx.step == self._first and self._is_able:
            torch.cuda.memory._record_memory_history(**self._options)
            self._is_recording = True

    def on_train_step_end(self, ctx: Context) -> None:
        """Write the snapshot after the last of the steps to record."""
        if ctx.step >= self._last and self._is_recording:
            self._end(ctx)

    def on_train_end(self, ctx: Context) -> None:
        """Write the snapshot if training ends during the recording."""
        if self._is_recording:
            self._end(ctx)

    on_exception = on_train_end

    def on_run_end(self, ctx: Context) -> None:
        """Wait, for up to two minutes, until the HTML pages are written."""
        if self._drawing is not None:
            self._drawing.end(ctx)
            self._drawing = None

    def _end(self, ctx: Context) -> None:
        self._is_recording = False
        try:
            folder = memory_folder(ctx, self._given_folder, label_of(self))
            if not ctx.run.may_write(folder):
                return
            path = folder / f"{label_of(self).replace('/', '-')}-step{ctx.step}-rank{ctx.run.rank}.pickle"
            folder.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._drawing = Drawing()
        self._drawing.begin(ctx, path)


def memory_folder(ctx: Context, given: Path | None, label: str) -> Path:
    """Return the folder for snapshots. Raise ConfigError if there is none."""
    if given is None and ctx.run.folder is None:
        raise ConfigError(f"the run has no folder for memory snapshots; give {label} a folder=")
    return given or Path(ctx.run.folder or "", "memory")
