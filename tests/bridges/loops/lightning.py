"""Lightning's Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from callsheet.bridges.lightning import host

from .job import Given, Job

NAME, VERSION = "Lightning", lightning.__version__


class Module(LightningModule):  # type: ignore[misc]  # Lightning's types are not read
    """The job's model as a LightningModule, which has the same children and methods as the model."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        model = job.made_model()
        self._job, self._kind = job, type(model)
        for name, child in model.named_children():
            self.add_module(name, child)

    def __getattr__(self, name: str) -> Any:
        kind = vars(self).get("_kind")
        if kind is not None and callable(method := vars(kind).get(name)):
            return method.__get__(self)
        return super().__getattr__(name)

    def forward(self, *inputs: Any) -> Any:
        """Call the forward of the job's model."""
        return self._kind.forward(self, *inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the job's loss, and log it as Lightning's users do."""
        inputs, targets = batch
        loss = self._job.loss(self(inputs), targets)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the job's loss."""
        inputs, targets = batch
        self.log("val_loss", self._job.loss(self(inputs), targets), prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        """Return the optimizer that every loop uses."""
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Empty(Callback):  # type: ignore[misc]  # Lightning's types are not read
    """A callback with the hooks of the host, which do nothing."""

    def on_train_batch_start(self, *_: Any) -> None: ...
    def on_before_optimizer_step(self, *_: Any) -> None: ...
    def on_train_batch_end(self, *_: Any) -> None: ...


def quiet_trainer(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    """Return a Trainer on the CPU that prints and writes nothing."""
    given = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 2,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
    }
    return Trainer(default_root_dir=folder / "small", callbacks=callbacks, **(given | options))


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
    """See `job.TrainFunction`."""
    theirs = [] if callbacks is None else [Empty()] if isinstance(callbacks, str) else [host(callbacks, strict=strict)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        trainer = quiet_trainer(folder, theirs, max_epochs=epochs, log_every_n_steps=job.log_every)
        torch.manual_seed(3)
        module, batches = Module(job), job.batches(steps_an_epoch=steps_an_epoch)
        trainer.fit(module, batches, job.validation_batches() if evaluate else None)
    return module
