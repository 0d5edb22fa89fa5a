"""Writes a small file every few seconds, which shows that the run makes progress."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.ranks import RankGate
from callsheet.errors import ConfigError


class Heartbeat(Callback):
    """Write a small file every few seconds, from which a probe can see that the job makes progress.

    The file is JSON: `time` (seconds since 1970), `state` (`starting`, `training`, `evaluating`, `testing`, `predicting`,
    `saving`, or `waiting` between these; at the end, the run's outcome), `step`, `epoch`, `batch` (the number of completed
    batches), `run`, `rank`, `host` and `pid`. The file is replaced atomically, so that a reader never sees half of it. It is
    written when the state changes, and at steps of training, evaluation, test and prediction once `seconds` have passed since the
    last write. A step or a save that takes longer than the probe's timeout looks like a dead job.

    Errors in writing are reported and do not end the run. A run that fails during set-up writes nothing.

    Args:
        file: the file's path; None means `heartbeat.json` in the run's folder. `{rank}` in the path is replaced by the rank.
        seconds: how often to write.
        ranks: which ranks write: `zero`, `local_zero`, `all` or a set. If several do, `file` needs a `{rank}`; the file in the run's
            folder is then called `heartbeat-rank{rank}.json`.

    Raises:
        ConfigError: an argument is invalid, or the run has no folder and no file was given.
    """

    phase = "report"
    on_error = "isolate"
    writes_to_run_folder = True

    def __init__(self, *, file: str | os.PathLike[str] | None = None, seconds: float = 10.0, ranks: RankGate = "zero") -> None:
        if not seconds > 0:
            raise ConfigError(f"seconds={seconds}: give more than 0")
        if file is not None and ranks != "zero" and "{rank}" not in os.fspath(file):
            raise ConfigError(f"file={os.fspath(file)!r} would be written by several ranks; put {{rank}} into its name")
        self._pattern = os.fspath(file) if file is not None else None
        self._seconds = seconds
        self.ranks = ranks
        self._path: Path | None = None  # path of the heartbeat file; None until the run may write to its folder
        self._state = self._before_save = "starting"
        self._next = 0.0

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Write the heartbeat file for the first time. Before this event, the run may not write to its folder yet."""
        pattern = self._pattern
        if pattern is None:
            if ctx.run.folder is None:
                raise ConfigError("the run has no folder for the heartbeat; give it a file=")
            pattern = str(ctx.run.folder / ("heartbeat.json" if self.ranks == "zero" else "heartbeat-rank{rank}.json"))
        self._path = Path(pattern.replace("{rank}", str(ctx.run.rank)))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._enter(ctx, "starting")

    def on_train_step_end(self, ctx: Context) -> None:
        if time.monotonic() >= self._next:
            self._write(ctx)

    on_eval_step_end = on_test_step_end = on_predict_step_end = on_train_step_end

    def on_train_start(self, ctx: Context) -> None:
        self._enter(ctx, "training")

    def on_eval_all_start(self, ctx: Context) -> None:
        self._enter(ctx, "evaluating")

    def on_eval_all_end(self, ctx: Context) -> None:
        self._enter(ctx, "waiting" if ctx.standalone else "training")

    def on_test_start(self, ctx: Context) -> None:
        self._enter(ctx, "testing")

    def on_predict_start(self, ctx: Context) -> None:
        self._enter(ctx, "predicting")

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        self._before_save = self._state
        self._enter(ctx, "saving")

    def on_checkpoint_save_end(self, ctx: Context) -> None:
        self._enter(ctx, self._before_save)

    def on_train_end(self, ctx: Context) -> None:
        self._enter(ctx, "waiting")

    on_test_end = on_predict_end = on_train_end

    def on_run_end(self, ctx: Context) -> None:
        self._enter(ctx, str(ctx.run.outcome))
        self._path = None

    def _enter(self, ctx: Context, state: str) -> None:
        self._state = state
        self._write(ctx)

    def _write(self, ctx: Context) -> None:
        if self._path is None or not ctx.run.may_write(self._path):
            return
        self._next = time.monotonic() + self._seconds
        beat = {
            "time": time.time(),
            "state": self._state,
            "step": ctx.step,
            "epoch": ctx.epoch,
            "batch": ctx.state.timestamp.batch,
            "run": ctx.run.name,
            "rank": ctx.run.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        draft.write_text(json.dumps(beat) + "\n", encoding="utf-8")
        os.replace(draft, self._path)
