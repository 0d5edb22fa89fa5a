"""A hand-written loop."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import callsheet

from .job import Given, Job

NAME, VERSION = "a hand-written loop", f"(torch {torch.__version__.partition('+')[0]})"


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
    """See `job.TrainFunction`. A hand-written loop has no callbacks, so `EMPTY` trains without any."""
    torch.manual_seed(3)
    model, batches = job.made_model(), job.batches(steps_an_epoch=steps_an_epoch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    @torch.no_grad()
    def validate() -> dict[str, dict[str, float]]:
        model.eval()
        losses = [float(job.loss(model(inputs), targets)) for inputs, targets in job.validation_batches()]
        model.train()
        return {"validation": {"loss": sum(losses) / len(losses)}}

    attached: Any = nullcontext()
    if callbacks is not None and not isinstance(callbacks, str):
        attached = callsheet.attach(
            model=model,
            optimizer=optimizer,
            callbacks=callbacks,
            log_interval=f"{job.log_every}ba",
            max_duration=f"{epochs}ep",
            run_name="small",
            runs_folder=folder,
            evaluate=validate if evaluate else None,
            strict=strict,
        )
    with attached as run:
        for _ in range(epochs) if run is None else run.epochs(epochs):
            for inputs, targets in batches if run is None else run.steps(batches):
                optimizer.zero_grad()
                job.loss(model(inputs), targets).backward()
                optimizer.step()
            if evaluate:
                found = validate()
                if run is not None:
                    run.evaluated(found)
    return model
