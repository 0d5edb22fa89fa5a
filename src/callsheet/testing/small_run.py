"""A small run that uses many features, to test callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callsheet.core.context import Context
from callsheet.core.manager import CallbackManager
from callsheet.trainer import Trainer

STEPS = 10
"""The number of training steps of the small run."""

SAVED_AT_STEP = 3
"""The step of the small run after which a checkpoint is requested.

This step is inside an epoch, between two metrics records, and between two evaluations.
"""

LOGGED_AT_STEPS = (2, 7)
"""The steps at which a table, images, a file and hyperparameters are logged: one before the checkpoint and one after it."""


class SmallModel(nn.Module):
    """A model from four inputs to one output, with the modules `body`, `norm`, `dropout` and `head`.

    Its dropout draws random numbers, and training changes the buffers of its norm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, of shape (batch, 1).

        Args:
            inputs: a tensor of shape (batch, 4).
        """
        outputs: Tensor = self.head(self.dropout(torch.relu(self.norm(self.body(inputs)))))
        return outputs


def small_trainer(folder: Path, callbacks: CallbackManager, resume: str | None = None) -> Trainer:
    """Return a trainer for a `SmallModel` on the CPU, with microbatches, a scheduler, clipping, metrics records and evaluation.

    Each call returns an equal trainer.

    The trainer trains for 10 steps in epochs of 6 steps, makes a metrics record every 2 steps, and evaluates `validation` every
    4 steps. If several ranks share the data, an epoch has fewer steps.

    Args:
        folder: the trainer's `runs_folder`; the run is in its subfolder `small`.
        callbacks: the manager with the run's callbacks.
        resume: see `Trainer`; None: a new run.
    """
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(24, 4, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = SmallModel()
    return Trainer(
        model,
        nn.functional.mse_loss,
        lambda: DataLoader(data, batch_size=4, shuffle=True),
        lambda: small_batches(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 5)),
        max_duration=f"{STEPS}ba",
        microbatch_size=2,
        clip_grad_norm=1.0,
        eval_interval="4ba",
        log_interval="2ba",
        seed=3,
        device="cpu",
        run_name="small",
        runs_folder=folder,
        resume=resume,
        timeout_seconds=30,
        callbacks=callbacks,
        progress=False,
    )


def small_batches() -> DataLoader[tuple[Tensor, ...]]:
    """Return the evaluation data of the small run: three batches of inputs and targets."""
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(8))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


class Moments:
    """Requests a checkpoint, logs values and calls `act` at fixed events of a small run, before all other callbacks are called.

    Its method `record` is called at every event.

    Args:
        folder: the folder for the file that is logged.
        event: the event at which `act` is called.
        step: the step at which `act` is called.
        act: a function to call once.
    """

    def __init__(self, folder: Path, event: str = "", step: int = 0, act: Callable[[Context], Any] | None = None) -> None:
        self._path = folder / "a file.txt"
        self._event, self._step, self._act = event, step, act
        self.has_come = False
        """Whether `act` was called."""

    def record(self, ctx: Context) -> None:
        """Request a checkpoint, log values or call `act`, depending on the event and the step."""
        if ctx.event == "on_train_step_end" and ctx.step == SAVED_AT_STEP:
            ctx.control.save("for the test", replicated=True)
        if ctx.event == "on_train_step_end" and ctx.step in LOGGED_AT_STEPS:
            self._log(ctx)
        if self._act is not None and not self.has_come and ctx.event == self._event and ctx.step == self._step:
            self.has_come = True
            self._act(ctx)

    def _log(self, ctx: Context) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("something\n", encoding="utf-8")
        ctx.log({"small/step": float(ctx.step), "small/nothing": float("nan")}, across="same")
        ctx.log_hyperparameters({"small": {"depth": 2, "name": "small", "list": [1, 2]}})
        ctx.log_table("small/table", ["step", "word"], [[ctx.step, "one"], [ctx.step, None]])
        ctx.log_images("small/images", [numpy.full((4, 6, 3), 128, dtype=numpy.uint8)])
        ctx.log_file("small/file", self._path)


class Watch:
    """Records the results of a run exactly, for comparison bit for bit.

    The results are the run's events, each step's loss, all metrics records and evaluation results, and the checkpoints' paths. The
    method `record` is called at every event.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.losses: list[str] = []
        self.records: list[tuple[int, dict[str, str]]] = []
        self.checkpoints: dict[int, str] = {}
        self.outcome = ""

    def record(self, ctx: Context) -> None:
        """Record the event, with the values that are compared between runs."""
        event = str(ctx.event)
        self.events.append(event)
        if event == "on_train_step_end":
            self.losses.append(float(ctx.loss).hex())
        elif event == "on_log":
            self.records.append((ctx.step, {name: float(value).hex() for name, value in ctx.record.values.items()}))
        elif event == "on_eval_all_end":
            results = {f"{name}/{metric}": value for name, found in ctx.eval_results.items() for metric, value in found.items()}
            self.records.append((ctx.step, {name: float(value).hex() for name, value in results.items()}))
        elif event == "on_checkpoint_published" and ctx.checkpoint is not None:
            self.checkpoints[ctx.checkpoint.step] = ctx.checkpoint.path
        elif event == "on_run_end":
            self.outcome = str(ctx.run.outcome)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return a copy of the model's weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two sets of weights are the same bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def steps_of(records: Sequence[tuple[int, dict[str, str]]], *, after: int) -> list[tuple[int, dict[str, str]]]:
    """Return the metrics records that were made after step `after`."""
    return [record for record in records if record[0] > after]
