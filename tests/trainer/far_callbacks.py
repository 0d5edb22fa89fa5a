"""Callbacks that another process can import."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
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


class FarByClass(Far):
    """Declares in the class that it runs in a process of its own."""

    name = "FarByClass"
    lane = "process"
