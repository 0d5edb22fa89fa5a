"""Traces of a few steps by torch's profiler."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from callsheet.callback import Callback, label_of
from callsheet.context import Context
from callsheet.distributed import RankGate
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

_BUSY: WeakSet[TorchProfiler] = WeakSet()
"""Those in the midst of a stretch: torch's own flags do not tell of a profiler that warms up, and two at once crash the process."""


class TorchProfiler(Callback):
    """Profile some steps, and write a Chrome trace of them, which Perfetto and `chrome://tracing` show.

    After `skip_first` steps, `repeat` times: `wait` steps of nothing, `warmup` steps that are profiled and thrown away, `active`
    steps that are written, to `traces/<name>-step<last step>-rank<rank>.json` in the run's folder, a file a rank. The loggers are
    given rank 0's. The steps are those of the run: a resumed one does not profile again what it has passed. What an exception or
    the end cuts short is written as far as it got. Between those stretches it costs a comparison a step.

    One process has one profiler: a stretch that would begin while another profiles is left out, with a warning.

    Args:
        wait: see above, like all up to `repeat`.
        warmup: at least 1 lets the tracer's own start-up pass.
        active: how many steps a trace holds.
        repeat: 0 for as long as training lasts.
        skip_first: see above.
        record_shapes: of the operators' inputs.
        profile_memory: allocations.
        with_stack: the Python source of each operation, which costs much.
        ranks: which ranks profile: `all`, `zero`, `local_zero` or a set of ranks.
        folder: where the traces go, if not to the run's folder.

    Raises:
        ConfigError: an argument that cannot work, or a run without a folder where none was given.
    """

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
        self._last = 0  # step of the stretch that is being profiled

    def on_run_start(self, ctx: Context) -> None:
        """There must be somewhere to write to."""
        if self._folder is None and ctx.run.folder is None:
            raise ConfigError("the run has no folder for traces; give TorchProfiler a folder=")

    def on_train_start(self, ctx: Context) -> None:
        """A stretch may begin with the first step."""
        self._begin(ctx)

    def on_train_step_end(self, ctx: Context) -> None:
        """Go on to the next step, and on to the next stretch."""
        if self._profiler is not None:
            self._profiler.step()
            if ctx.step >= self._last:
                self._end(ctx)
        if self._profiler is None:
            self._begin(ctx)

    def on_train_end(self, ctx: Context) -> None:
        """Write what there is."""
        self._end(ctx)

    def on_exception(self, ctx: Context) -> None:
        """Write what there is: it may show what led here."""
        self._end(ctx)

    def _begin(self, ctx: Context) -> None:
        """Begin a stretch, if its first step is the next."""
        length = self._wait + self._warmup + self._active
        done = ctx.step - self._skip - self._wait  # a stretch begins where it is a multiple of the length
        if done < 0 or done % length or (self._repeat and done // length >= self._repeat):
            return
        if _BUSY or torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
            logger.warning("%s: steps %d and on are not profiled: somebody else profiles", label_of(self), ctx.step + 1)
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ctx.run.device.startswith("cuda") else [])]
        stretch = schedule(wait=0, warmup=self._warmup, active=self._active, repeat=1)
        self._last = ctx.step + self._warmup + self._active
        self._profiler = profile(
            activities=activities, schedule=stretch, on_trace_ready=lambda made: self._write(ctx, made), **self._options
        )
        _BUSY.add(self)
        self._profiler.start()

    def _end(self, ctx: Context) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            _BUSY.discard(self)
            profiler.stop()  # which writes, where `step` has not

    def _write(self, ctx: Context, made: Any) -> None:
        folder = self._folder or Path(ctx.run.folder or "", "traces")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{label_of(self).replace('/', '-')}-step{ctx.step}-rank{ctx.run.rank}.json"
        made.export_chrome_trace(str(path))
        if ctx.run.is_world_process_zero:
            ctx.log_file(f"traces/{path.name}", path)
