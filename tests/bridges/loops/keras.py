"""Keras 3 on torch: `fit` with the job's model wrapped as a layer."""

from __future__ import annotations

import os
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"  # set before Keras is imported

import keras
import torch
from torch import Tensor, nn

from callsheet.bridges.keras import host

from .job import EMPTY, Given, Job

NAME, VERSION = "Keras", f"{version('keras')} on torch"

if keras.backend.backend() != "torch":
    raise RuntimeError(f"keras was imported before with the backend {keras.backend.backend()}")


class Model(keras.Model):  # type: ignore[misc]  # Keras's types are not read
    """Trains the job's model on its loss, as the other loops do."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job_loss = job.loss
        self.inner = keras.layers.TorchModuleWrapper(job.made_model())

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.inner(inputs, training=training)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Tensor:
        return self.job_loss(y_pred, y)


def compiled(job: Job, **options: Any) -> Model:
    """Return a compiled model. Clearing the session keeps the weight names the same each time, because Keras numbers them."""
    keras.utils.clear_session(free_memory=False)
    model = Model(job)
    model.compile(optimizer=keras.optimizers.AdamW(learning_rate=0.02), **options)
    return model


class Empty(keras.callbacks.Callback):  # type: ignore[misc]  # Keras's types are not read
    """A callback with the training hooks, which do nothing."""

    def on_train_begin(self, logs: Any = None) -> None: ...

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None: ...

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None: ...

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...

    def on_train_end(self, logs: Any = None) -> None: ...


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
    model = compiled(job)
    given: list[Any] = []
    if isinstance(callbacks, str):
        assert callbacks == EMPTY
        given = [Empty()]
    elif callbacks is not None:
        given = [host(
                callbacks,
                strict=strict, model=model.inner.module, run_name="small", runs_folder=folder, log_interval=f"{job.log_every}ba",
            )]  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*shuffle=True.*")  # Keras ignores it for a DataLoader
        model.fit(
            job.batches(steps_an_epoch=steps_an_epoch),
            validation_data=job.validation_batches() if evaluate else None,
            epochs=epochs,
            callbacks=given,
            verbose=0,
        )
    module: nn.Module = model.inner.module
    return module
