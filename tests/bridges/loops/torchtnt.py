"""torchtnt: an AutoUnit in `fit`, or in `train` without evaluation."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.callback import Callback as TorchTNTCallback
from torchtnt.framework.fit import fit
from torchtnt.framework.train import train as train_alone

from callsheet.bridges.torchtnt import host

from .job import EMPTY, Given, Job

NAME, VERSION = "torchtnt", version("torchtnt")


class Unit(AutoUnit[Any]):  # type: ignore[misc]  # torchtnt's types are not read
    """Trains the job's model. `loss` is the loss of the last batch."""

    def __init__(self, job: Job, **options: Any) -> None:
        super().__init__(module=job.made_model(), device=torch.device("cpu"), **options)
        self.job = job
        self.loss = torch.tensor(float("inf"))
        self.losses: list[float] = []
        self.eval_losses: list[float] = []

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        return torch.optim.AdamW(module.parameters(), lr=0.02), None

    def compute_loss(self, state: Any, data: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = data
        outputs = self.module(inputs)
        return self.job.loss(outputs, targets), outputs

    def on_train_step_end(self, state: Any, data: Any, step: int, results: Any) -> None:
        self.loss = results.loss.detach()
        self.losses.append(self.loss.item())

    def on_eval_step_end(self, state: Any, data: Any, step: int, loss: Tensor, outputs: Any) -> None:
        self.eval_losses.append(loss.item())


class Empty(TorchTNTCallback):  # type: ignore[misc]  # torchtnt's types are not read
    """A callback with the hooks of the host, which do nothing."""

    def on_train_start(self, state: Any, unit: Any) -> None: ...

    def on_train_epoch_start(self, state: Any, unit: Any) -> None: ...

    def on_train_step_start(self, state: Any, unit: Any) -> None: ...

    def on_train_step_end(self, state: Any, unit: Any) -> None: ...

    def on_train_epoch_end(self, state: Any, unit: Any) -> None: ...

    def on_train_end(self, state: Any, unit: Any) -> None: ...

    def on_eval_start(self, state: Any, unit: Any) -> None: ...

    def on_eval_step_start(self, state: Any, unit: Any) -> None: ...

    def on_eval_step_end(self, state: Any, unit: Any) -> None: ...

    def on_eval_end(self, state: Any, unit: Any) -> None: ...


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
    unit = Unit(job)
    given: list[Any] = []
    if isinstance(callbacks, str):
        assert callbacks == EMPTY
        given = [Empty()]
    elif callbacks is not None:
        given = [host(callbacks, strict=strict, run_name="small", runs_folder=folder, log_interval=f"{job.log_every}ba")]
    batches = job.batches(steps_an_epoch=steps_an_epoch)
    if evaluate:
        fit(unit, batches, job.validation_batches(), max_epochs=epochs, callbacks=given)
    else:
        train_alone(unit, batches, max_epochs=epochs, callbacks=given)
    module: nn.Module = unit.module
    return module
