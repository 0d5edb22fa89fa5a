"""A job that trains until a stop is requested: `python live_job.py RUNS NAME`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import LRMonitor, MemoryMonitor, SaveOnTrigger
from callsheet.loggers import JSONLLogger


class SlowSteps(Callback):
    """Makes each step take a few hundredths of a second, like that of a real model."""

    def on_train_step_start(self, ctx: Context) -> None:
        """Sleep."""
        time.sleep(0.03)


def main(runs: str, name: str) -> None:
    """Train for ten minutes, or until a stop is requested."""
    torch.manual_seed(3)
    inputs = torch.randn(64, 8)
    data = list(zip(inputs.split(8), inputs.sum(1, keepdim=True).split(8), strict=True))
    with Trainer(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
        nn.functional.mse_loss,
        data,
        data[:2],
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        max_duration="10m",
        log_interval="5ba",
        eval_interval=None,
        callbacks=[SaveOnTrigger(seconds=0.1), SlowSteps(), LRMonitor(), MemoryMonitor()],
        loggers=[JSONLLogger(flush_seconds=0.2)],
        runs_folder=runs,
        run_name=name,
        device="cpu",
    ) as trainer:
        Path(runs, name).mkdir(parents=True, exist_ok=True)
        Path(runs, name, "call_sheet.txt").write_text(f"{trainer.callbacks.call_sheet()}\n")
        trainer.fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
