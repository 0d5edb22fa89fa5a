"""Ignite: a supervised trainer, an evaluator that runs after each epoch, and a Checkpoint for requested saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Loss
from torch import nn

from callsheet.bridges.ignite import FIRED_AT, FIRED_AT_EVALUATION, host

from .job import EMPTY, Given, Job

NAME, VERSION = "Ignite", ignite.__version__


def does_nothing(engine: Engine, *_: Any) -> None: ...


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
    model = job.made_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = create_supervised_trainer(model, optimizer, job.loss)
    evaluator = create_supervised_evaluator(model, {"loss": Loss(job.loss)})

    def validate() -> None:
        evaluator.run(job.validation_batches())

    if isinstance(callbacks, str):
        assert callbacks == EMPTY
        for event in FIRED_AT:
            trainer.add_event_handler(Events(event), does_nothing)
        for event in FIRED_AT_EVALUATION:
            evaluator.add_event_handler(Events(event), does_nothing)
    elif callbacks is not None:
        hosted = host(
            callbacks,
            model=model,
            optimizer=optimizer,
            evaluators={"validation": evaluator} if evaluate else None,
            evaluate=validate if evaluate else None,
            log_interval=f"{job.log_every}ba",
            run_name="small",
            runs_folder=folder,
            strict=strict,
        )
        parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "callsheet": hosted}
        checkpoint = Checkpoint(parts, DiskSaver(folder / "saved", require_empty=False), n_saved=None)
        hosted.attach(trainer, checkpoint=checkpoint)
    if evaluate:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, validate)
    trainer.run(job.batches(steps_an_epoch=steps_an_epoch), max_epochs=epochs)
    return model
