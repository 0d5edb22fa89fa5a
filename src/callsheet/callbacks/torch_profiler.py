"""Writes traces of a few steps with torch's profiler."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.ranks import RankGate
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

_ACTIVE_PROFILERS: WeakSet[TorchProfiler] = WeakSet()
"""The `TorchProfiler` callbacks of this process that are profiling now.

Torch's own flags do not show a profiler that is in its warm-up, and two profilers at once crash the process.
"""


class TorchProfiler(Callback):
    """Profile some steps, and write a Chrome trace of them, which Perfetto and `chrome://tracing` show.

    After `skip_first` steps, it repeats the following cycle `repeat` times: `wait` steps without profiling, `warmup` steps that
    are profiled and discarded, and `active` steps that are written to `traces/<name>-step<last step>-rank<rank>.json` in the
    run's folder, one file per rank. Loggers receive the trace of rank 0. Steps are counted from the start of the run, so a
    resumed run does not profile earlier steps again. If an exception or the end of training ends a cycle early, the steps so far
    are written. Outside of these cycles, the callback costs one comparison per step.

    A process can run one profiler at a time. A cycle that would begin while another profiler runs is skipped with a warning.

    Args:
        wait: the number of steps of a cycle without profiling.
        warmup: the number of steps of a cycle whose profile is discarded; at least 1 avoids measuring the start of the tracer.
        active: the number of steps of a cycle that are written.
        repeat: the number of cycles; 0 repeats until training ends.
        skip_first: the number of steps before the first cycle.
        record_shapes: record the shapes of the operators' inputs.
        profile_memory: record allocations.
        with_stack: record the Python source of each operation, which is slow.
        ranks: which ranks profile: `all`, `zero`, `local_zero` or a set of ranks.
        folder: where to write instead of the run's folder.

    Raises:
        ConfigError: an argument is invalid, or the run has no folder and none was given.
    """

    writes_to_run_folder = True

    def __init__(
        self,
        *,
        wait: int = 5,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        skip_first: int = 10,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        ranks: RankGate = "all",
        folder: str | Path | None = None,
    ) -> None:
        for name, value, least in (
            ("wait", wait, 0),
            ("warmup", warmup, 0),
            ("active", active, 1),
            ("repeat", repeat, 0),
            ("skip_first", skip_first, 0),
        ):
            if value < least:
                raise ConfigError(f"{name}={value}: give {least} or more")
        self._skip, self._wait, self._warmup, self._active, self._repeat = skip_first, wait, warmup, active, repeat
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._folder = Path(folder) if folder is not None else None
        self.ranks = ranks
        self._profiler: profile | None = None
        self._last = 0  # the last step to be recorded by the current profiler

    def on_run_start(self, ctx: Context) -> None:
        """Raise ConfigError if there is no folder for the traces."""
        if self._folder is None and ctx.run.folder is None:
            raise ConfigError("the run has no folder for traces; give TorchProfiler a folder=")

    def on_train_start(self, ctx: Context) -> None:
        """Start the profiler if the first step is the first profiled step of a cycle."""
        self._begin(ctx)

    def on_train_step_end(self, ctx: Context) -> None:
        """Advance the profiler by a step. Stop it after the last profiled step of a cycle, and start it before the first one."""
        if self._profiler is not None:
            self._profiler.step()
            if ctx.step >= self._last:
                self._end(ctx)
        if self._profiler is None:
            self._begin(ctx)

    def on_train_end(self, ctx: Context) -> None:
        """Write a trace of the steps that were profiled so far."""
        self._end(ctx)

    def on_exception(self, ctx: Context) -> None:
        """Write a trace of the steps that were profiled so far. It may show the cause of the exception."""
        self._end(ctx)

    def _begin(self, ctx: Context) -> None:
        """Start the profiler if the next step is the first profiled step of a cycle."""
        length = self._wait + self._warmup + self._active
        # `done` counts the steps after the first `wait`. At each multiple of `length`, the profiled steps of a cycle begin.
        done = ctx.step - self._skip - self._wait
        if done < 0 or done % length or (self._repeat and done // length >= self._repeat):
            return
        if _ACTIVE_PROFILERS or torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
            logger.warning(
                "%s: the steps from %d on are not profiled, because another profiler is running", label_of(self), ctx.step + 1
            )
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ctx.run.device.startswith("cuda") else [])]
        stretch = schedule(wait=0, warmup=self._warmup, active=self._active, repeat=1)
        self._last = ctx.step + self._warmup + self._active
        self._profiler = profile(
            activities=activities, schedule=stretch, on_trace_ready=lambda made: self._write(ctx, made), **self._options
        )
        _ACTIVE_PROFILERS.add(self)
        self._profiler.start()

    def _end(self, ctx: Context) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            _ACTIVE_PROFILERS.discard(self)
            profiler.stop()  # `stop` also writes the trace, unless `step` has already done so

    def _write(self, ctx: Context, made: Any) -> None:
        folder = self._folder or Path(ctx.run.folder or "", "traces")
        if not ctx.run.may_write(folder):
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{label_of(self).replace('/', '-')}-step{ctx.step}-rank{ctx.run.rank}.json"
        made.export_chrome_trace(str(path))
        if ctx.run.is_world_process_zero:
            ctx.log_file(f"traces/{path.name}", path)
