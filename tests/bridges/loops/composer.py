"""MosaicML Composer, which runs in a separate venv: see `tools/composer_venv.py`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Torchvision has no build for this torch. Declare the operators that it looks for.
if torch.version.cuda is None and find_spec("composer") is not None and not hasattr(torch.ops.torchvision, "nms"):
    _OPERATORS = torch.library.Library("torchvision", "DEF")
    _OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings about names that newer torch and torchmetrics have changed
    import composer
    from composer import Callback as ComposerCallback
    from composer.models import ComposerModel
    from torchmetrics import Metric

from callsheet.bridges.composer import host

from .job import EMPTY, Given, Job

__all__ = ["NAME", "VERSION", "composer", "made", "train", "trained"]

NAME, VERSION = "Composer", composer.__version__


class MeanLoss(Metric):  # type: ignore[misc,unused-ignore]  # where torchmetrics has no types
    """The loss as a metric, because Composer evaluates only metrics."""

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, loss: Tensor, count: int) -> None:
        self.total += loss * count
        self.count += count

    def compute(self) -> Tensor:
        mean: Tensor = self.total / self.count
        return mean


class JobComposerModel(ComposerModel):  # type: ignore[misc]  # Composer's types are not read
    """A mixin with the methods that Composer requires of a model; see `trained`."""

    made_of: type[nn.Module]
    of_outputs: Callable[[Tensor, Tensor], Tensor]
    logger: Any = None  # Composer's Trainer sets it

    def forward(self, batch: Any) -> Any:
        return self.made_of.forward(self, batch if isinstance(batch, Tensor) else batch[0])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return self.of_outputs(outputs, batch[1])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        return {} if is_train else {"loss": MeanLoss()}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Metric) -> None:
        metric.update(self.loss(outputs, batch), len(batch[0]))


def trained(job: Job) -> Any:
    """Return the job's model as a ComposerModel. Its modules and parameters keep their names."""
    model = job.made_model()
    own = type(model)
    model.__class__ = type(
        f"Composer{own.__name__}", (JobComposerModel, own), {"made_of": own, "of_outputs": staticmethod(job.loss)}
    )
    return model


class Empty(ComposerCallback):  # type: ignore[misc]
    """A callback with the hooks of the base class, which do nothing."""


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
    given: dict[str, Any] = {"save_folder": str(folder / "saved"), "save_interval": "0ba"}  # save only on request
    if evaluate:  # the label must be the dataset's name that the built-in callbacks of the matrix monitor
        validation = composer.Evaluator(label="validation", dataloader=job.validation_batches(), metric_names=["loss"])
        given["eval_dataloader"] = validation
    trainer = made(
        job, folder, callbacks, strict=strict, epochs=epochs, steps_an_epoch=steps_an_epoch, evaluate=evaluate, **given
    )
    trainer.fit()
    trainer.close()
    model: nn.Module = trainer.state.model
    return model


def made(
    job: Job, folder: Path, callbacks: Given, *, strict: bool = True, epochs: int = 2, steps_an_epoch: int = 6,
    evaluate: bool = True, **options: Any,
) -> Any:  # fmt: skip
    """Return Composer's Trainer. `options` are its arguments."""
    torch.manual_seed(3)
    model = trained(job)
    if isinstance(callbacks, str):
        assert callbacks == EMPTY
        own = [Empty()]
    else:
        own = (
            [host(callbacks, strict=strict, log_interval=f"{job.log_every}ba", runs_folder=folder)]
            if callbacks is not None
            else []
        )
    given: dict[str, Any] = {
        "model": model,
        "train_dataloader": job.batches(steps_an_epoch=steps_an_epoch),
        "eval_dataloader": job.validation_batches() if evaluate else None,
        "optimizers": torch.optim.AdamW(model.parameters(), lr=0.02),
        "max_duration": f"{epochs}ep",
        "callbacks": [*options.pop("before", []), *own, *options.pop("after", [])],
        "progress_bar": False,
        "device": "cpu",
        "seed": 3,
        "run_name": "small",
        "save_folder": None,
    } | options
    return composer.Trainer(**given)
