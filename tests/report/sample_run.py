"""A small run with data for every part of a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver, LRMonitor, MemoryMonitor, OptimizerMonitor, SpeedMonitor
from callsheet.loggers import JSONLLogger, Logger
from callsheet.loggers.support.json_text import json_text

HOSTILE = '<img src=x onerror="window.hostile=1"><script>window.hostile=1</script>'


class Logs(Callback):
    """Logs images, tables, settings, and metrics with hostile names."""

    def on_train_start(self, ctx: Context) -> None:
        ctx.log_hyperparameters({"lr": 0.02, "model": {"depth": 2, "width": 16}, HOSTILE: HOSTILE})

    def on_train_step_end(self, ctx: Context) -> None:
        ctx.log({f"hostile/{HOSTILE}": float(ctx.step), "odd/sometimes": float("nan") if ctx.step == 25 else 1.0 / ctx.step})

    def on_eval_all_end(self, ctx: Context) -> None:
        rows = [[f"once upon a time, at step {ctx.step}", "there was\na model", ctx.step / 7], [HOSTILE, "it ended", 0.5]]
        ctx.log_table("generations", ["prompt", "continuation", "score"], rows)
        grid = numpy.add.outer(numpy.arange(16), numpy.arange(16)) * ctx.step % 256
        ctx.log_images("samples", [grid.astype(numpy.uint8), grid.T.astype(numpy.uint8)[::-1]])


class Slow(Callback):
    """Takes a large share of the step's time."""

    def on_train_step_end(self, ctx: Context) -> None:
        time.sleep(0.01)  # much longer than the pauses of a busy machine, which would make this call narrow in the timeline


class Broken(Logger):
    """A logger whose server cannot be reached."""

    def on_log(self, ctx: Context) -> None:
        raise ConnectionError("the server at 10.0.0.1 does not answer")


class FailsAt(Callback):
    """Raises an error at a step, and requests a checkpoint some steps before."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step - 10:
            ctx.control.save("before it fails")
        if ctx.step == self.step:
            raise ValueError("a bad step")


def fit(folder: Path, *callbacks: Callback, steps: int = 120, loggers: Sequence[Callback] = (), **options: object) -> Path:
    """Train for some steps in `folder`/sample, and return the run's folder."""
    torch.manual_seed(1)
    inputs = torch.randn(20, 8, 12)
    batches = [(each, each.sum(1, keepdim=True).sin()) for each in inputs]
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    with Trainer(
        model,
        nn.functional.mse_loss,
        batches,
        batches[:5],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        callbacks=[*callbacks],
        loggers=[JSONLLogger(), *loggers],
        runs_folder=folder,
        run_name="sample",
        log_interval="1ba",
        max_duration=f"{steps}ba",
        device="cpu",
        seed=1,
        config={"batch_size": 8, "model": "two layers"},
        **options,  # type: ignore[arg-type]  # whatever the Trainer takes
    ) as trainer:
        trainer.fit()
        folder = Path(str(trainer.run.folder))
        (folder / "call_sheet.txt").write_text(f"{trainer.callbacks.call_sheet()}\n")
        results = {"validation/loss": 0.25, f"{HOSTILE}, bigram": float("inf")}
        content = {"step": steps, "unit": "nats", "results": results, "samples": ["it wrote this", HOSTILE]}
        (folder / "results.json").write_text(json_text(content))
        (folder / "config.yaml").write_text("batch_size: 8\nmodel: two layers\n")
    return folder


def monitors() -> list[Callback]:
    return [
        SpeedMonitor(window_size=10),
        LRMonitor(),
        MemoryMonitor(),
        OptimizerMonitor(batch_log_interval=1),
        CheckpointSaver(monitor="validation/loss"),
        Logs(),
        Slow(),
    ]


def eventful(folder: Path) -> Path:
    """Train a run that fails and is resumed, with monitors, images, tables, a slow callback and a disabled one."""
    with suppress(ValueError):
        fit(folder, *monitors(), FailsAt(52))
    return fit(folder, *monitors(), loggers=[Broken()], resume="auto")
