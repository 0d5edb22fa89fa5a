"""Accelerate: a hand-written loop with an Accelerator."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from torch import nn

from callsheet.bridges.accelerate import host

from .job import EMPTY, Given, Job

NAME, VERSION = "Accelerate", accelerate.__version__


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
    """See `job.TrainFunction`. Accelerate has no callbacks, so `EMPTY` trains without any."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    plain = job.made_model()
    model, optimizer, batches, validation = accelerator.prepare(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=0.02),
        job.batches(steps_an_epoch=steps_an_epoch),
        job.validation_batches(),
    )

    @torch.no_grad()
    def validate() -> dict[str, dict[str, float]]:
        model.eval()
        losses = [float(job.loss(model(inputs), targets)) for inputs, targets in validation]
        model.train()
        return {"validation": {"loss": sum(losses) / len(losses)}}

    attached: Any = nullcontext()
    if callbacks is not None and not isinstance(callbacks, str):
        attached = host(
            callbacks,
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            log_interval=f"{job.log_every}ba",
            max_duration=f"{epochs}ep",
            run_name="small",
            runs_folder=folder,
            evaluate=validate if evaluate else None,
            strict=strict,
        )
        accelerator.register_for_checkpointing(attached)
    else:
        assert callbacks in (None, EMPTY)
    with attached as run:
        for _ in range(epochs) if run is None else run.epochs(epochs):
            for inputs, targets in batches if run is None else run.steps(batches):
                with accelerator.accumulate(model):
                    accelerator.backward(job.loss(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
            if evaluate:
                found = validate()
                if run is not None:
                    run.evaluated(found)
    return plain
