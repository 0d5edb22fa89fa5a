"""A file that says that the run is alive."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.distributed import RankGate
from callsheet.errors import ConfigError


class Heartbeat(Callback):
    """Write a small file every few seconds, for probes that restart what does not move.

    The file is JSON: `time` (seconds since 1970), `state` (`starting`, `training`, `evaluating`, `testing`, `predicting`,
    `saving`, `waiting` between those, then the run's outcome), `step`, `epoch`, `batch` (completed), `run`, `rank`, `host`,
    `pid`. It is replaced as a whole, so that no reader sees half of it. It is written when the state changes, and at steps of
    training, evaluation, test and prediction when the last writing is `seconds` ago: a step that takes longer than a probe's
    patience looks dead to it, as does a save.

    What it cannot write is reported and does not end the run. A run that fails in its set-up writes nothing.

    Args:
        file: where; `heartbeat.json` in the run's folder where it is None. `{rank}` in it becomes the rank.
        seconds: how often.
        ranks: which ranks write: `zero`, `local_zero`, `all` or a set. Where several do, `file` needs its `{rank}`; the file in
            the run's folder is then called `heartbeat-rank{rank}.json`.

    Raises:
        ConfigError: an argument that cannot work.
    """

    phase = "report"
    on_error = "isolate"

    def __init__(self, *, file: str | os.PathLike[str] | None = None, seconds: float = 10.0, ranks: RankGate = "zero") -> None:
        if not seconds > 0:
            raise ConfigError(f"seconds={seconds}: give more than 0")
        if file is not None and ranks != "zero" and "{rank}" not in os.fspath(file):
            raise ConfigError(f"file={os.fspath(file)!r} would be written by several ranks; put {{rank}} into its name")
        self._pattern = os.fspath(file) if file is not None else None
        self._seconds = seconds
        self.ranks = ranks
        self._path: Path | None = None  # until the run may write
        self._state = self._before_save = "starting"
        self._next = 0.0

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """From here on the run may write to its folder."""
        pattern = self._pattern
        if pattern is None:
            if ctx.run.folder is None:
                raise ConfigError("the run has no folder for the heartbeat; give it a file=")
            pattern = str(ctx.run.folder / ("heartbeat.json" if self.ranks == "zero" else "heartbeat-rank{rank}.json"))
        self._path = Path(pattern.replace("{rank}", str(ctx.run.rank)))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._tell(ctx, "starting")

    def on_train_step_end(self, ctx: Context) -> None:
        """Write, if it is time."""
        if time.monotonic() >= self._next:
            self._write(ctx)

    on_eval_step_end = on_test_step_end = on_predict_step_end = on_train_step_end

    def on_train_start(self, ctx: Context) -> None:
        """Training begins, or goes on."""
        self._tell(ctx, "training")

    def on_eval_all_start(self, ctx: Context) -> None:
        """An evaluation begins."""
        self._tell(ctx, "evaluating")

    def on_eval_all_end(self, ctx: Context) -> None:
        """It is over."""
        self._tell(ctx, "waiting" if ctx.standalone else "training")

    def on_test_start(self, ctx: Context) -> None:
        """A test begins."""
        self._tell(ctx, "testing")

    def on_predict_start(self, ctx: Context) -> None:
        """A prediction begins."""
        self._tell(ctx, "predicting")

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        """A checkpoint is written."""
        self._before_save = self._state
        self._tell(ctx, "saving")

    def on_checkpoint_save_end(self, ctx: Context) -> None:
        """Training goes on."""
        self._tell(ctx, self._before_save)

    def on_train_end(self, ctx: Context) -> None:
        """Nothing is being done."""
        self._tell(ctx, "waiting")

    on_test_end = on_predict_end = on_train_end

    def on_run_end(self, ctx: Context) -> None:
        """How it ended."""
        self._tell(ctx, str(ctx.run.outcome))
        self._path = None

    def _tell(self, ctx: Context, state: str) -> None:
        self._state = state
        self._write(ctx)

    def _write(self, ctx: Context) -> None:
        if self._path is None:
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
