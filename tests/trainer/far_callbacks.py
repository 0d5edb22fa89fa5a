"""Callbacks that another process can import."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callsheet import Callback, Context


class Far(Callback):
    """Counts and logs steps. At the given steps it crashes, exits, hangs or requests a stop."""

    snapshot_fields = ("loss",)

    def __init__(self, *, bias: int = 0, crash_at: int = 0, exit_at: int = 0, stop_at: int = 0, hang_at: int = 0) -> None:
        self.bias, self.crash_at, self.exit_at, self.stop_at, self.hang_at = bias, crash_at, exit_at, stop_at, hang_at
        self.steps = 0
        self.pid = 0

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps += 1
        self.pid = os.getpid()
        ctx.log({"far/steps": self.steps + self.bias, "far/loss": ctx.loss})
        if ctx.step == self.crash_at:
            os._exit(7)
        if ctx.step == self.exit_at:
            raise SystemExit("enough")
        if ctx.step == self.hang_at:
            time.sleep(60)
        if ctx.step == self.stop_at:
            ctx.control.stop("far enough")

    async def on_run_end(self, ctx: Context) -> None:
        assert ctx.run.folder is not None
        ctx.run.folder.mkdir(parents=True, exist_ok=True)
        (ctx.run.folder / "far.txt").write_text(f"{ctx.run.outcome} {self.steps} {os.getpid()}")

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps, "pid": self.pid}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class LogsFromThreads(Callback):
    """Logs large messages from two threads at once."""

    def on_train_step_end(self, ctx: Context) -> None:
        def log(word: str) -> None:
            ctx.log({f"{word}/{number}": float(number) for number in range(3000)})

        threads = [threading.Thread(target=log, args=(word,)) for word in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class LogsInState(Callback):
    """Logs and requests a stop while its state is read."""

    ctx: Context | None = None

    def on_train_step_end(self, ctx: Context) -> None:
        self.ctx = ctx

    def state_dict(self) -> Mapping[str, Any]:
        if self.ctx is not None:
            self.ctx.log({"far/state": 1.0})
            self.ctx.control.stop("from the state")
        return {}


class Forks(Callback):
    """Forks a process, which exits as Python programs do, and writes its exit code to a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_step_end(self, ctx: Context) -> None:
        child = os.fork()
        if child == 0:
            raise SystemExit(3)
        _, status = os.waitpid(child, 0)
        with open(self.file, "a") as codes:
            codes.write(f"{os.waitstatus_to_exitcode(status)}\n")


class SleepsLong(Callback):
    """Writes the number of its process to a file, and sleeps."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_step_end(self, ctx: Context) -> None:
        Path(self.file).write_text(str(os.getpid()))
        time.sleep(100)


class FarByClass(Far):
    """Declares in the class that it runs in a process of its own."""

    name = "FarByClass"
    lane = "process"
