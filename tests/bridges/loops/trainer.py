"""callsheet's own Trainer. A built-in should have the same effects in every other loop."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from callsheet import Trainer, __version__

from .job import Given, Job

NAME, VERSION = "the callsheet Trainer", __version__


def train(
    job: Job,
    folder: Path,
    callbacks: Given,
    *,
    strict: bool = True,
    epochs: int = 2,
    steps_an_epoch: int = 6,
    evaluate: bool = True,
) -> nn.Module:
    torch.manual_seed(3)
    trainer = Trainer(
        job.made_model(),
        job.loss,
        job.batches(steps_an_epoch=steps_an_epoch),
        job.validation_batches() if evaluate else None,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        max_duration=f"{epochs}ep",
        eval_interval="1ep",
        log_interval=f"{job.log_every}ba",
        seed=3,
        device="cpu",
        run_name="small",
        runs_folder=folder,
        callbacks=() if callbacks is None or isinstance(callbacks, str) else callbacks,
    )
    with trainer:
        trainer.fit()
    return trainer.model
