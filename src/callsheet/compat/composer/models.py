"""`composer.models`: model classes for Composer's Trainer, and the adapters that let callsheet's Trainer run them.

`ComposerClassifier` and `HuggingFaceModel` are imported at their first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from callsheet.compat.composer.submodules import offer
from callsheet.compat.not_offered import not_offered
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.optional import needed_by
from callsheet.trainer import Task

if TYPE_CHECKING:
    from callsheet.bridges.composer.run import ComposerRun
    from callsheet.compat.composer.classifier import ComposerClassifier
    from callsheet.compat.composer.huggingface import HuggingFaceModel

__all__ = [
    "ComposerClassifier",
    "ComposerModel",
    "EpochScheduler",
    "HuggingFaceModel",
    "ModelTask",
    "StepsSchedulers",
    "TrainMetrics",
]

_LAZY_MODULES = {"ComposerClassifier": "classifier", "HuggingFaceModel": "huggingface"}
"""The names that are imported only when they are used, because they need torchmetrics and transformers."""


class ComposerModel(nn.Module):
    """A model that takes a whole batch and defines its own loss and metrics. Override `forward`, `loss` and other methods."""

    logger: Any = None
    """The Logger of the Trainer, with which the model may log metrics; None before there is a Trainer."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return one loss, or a sequence or dict of losses. Of several losses, training uses the one named `total`, else the sum.

        Args:
            outputs: what `forward` returned.
            batch: the batch for which `forward` was called.

        Raises:
            NotImplementedError: the model does not override this method.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss(outputs, batch)")

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        """Return the outputs from which metrics are updated.

        Args:
            batch: the batch.
            outputs: what `forward` returned for the batch in a training step; None in an evaluation.
        """
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        """Return a dict of torchmetrics by name.

        Args:
            is_train: whether the metrics for training are returned; otherwise those for evaluation.
        """
        return {}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Update a metric with the outputs and targets of a batch. By default, the targets are the batch's second item.

        Args:
            batch: the batch.
            outputs: what `eval_forward` returned for the batch.
            metric: one of the metrics that `get_metrics` returned.
        """
        metric.update(outputs, batch[1])


class ModelTask(Task):
    """The task with which callsheet's Trainer runs a `ComposerModel`. Evaluation computes metrics but no loss, as in Composer."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.is_predicting = False
        """Whether `Trainer.predict` calls the model."""
        metrics = model.get_metrics(is_train=False) if hasattr(model, "get_metrics") else {}
        wrapped: dict[str, Any] = {name: ModelMetric(model, metric) for name, metric in metrics.items()}
        self.metrics = wrapped

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return `model(batch)`, or in evaluation the result of `eval_forward`."""
        if self._model.training or self.is_predicting or not hasattr(self._model, "eval_forward"):
            return model(batch)
        return self._model.eval_forward(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        """Return the model's loss or losses. In evaluation, return an empty dict, because Composer's evaluation computes no loss."""
        if not self._model.training:
            return {}
        loss = self._model.loss(outputs, batch)
        if isinstance(loss, Tensor):
            return loss if loss.dim() == 0 else loss.mean()
        if isinstance(loss, Mapping):
            named = {name: value.mean() for name, value in loss.items()}
            total = named.pop("total", None)
            return {**named, "loss": sum(named.values()) if total is None else total}
        return sum(each.mean() for each in loss)

    def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        """Return the outputs and the whole batch, because `ModelMetric.update` takes these instead of predictions and targets."""
        return outputs, batch


class ModelMetric:
    """Wraps a torchmetric, so that `update` calls the model's `update_metric` with the torchmetric."""

    def __init__(self, model: Any, metric: Any) -> None:
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_metric", metric)

    def update(self, outputs: Any, batch: Any) -> None:
        """Update the metric by calling the model's `update_metric`."""
        self._model.update_metric(batch, outputs, self._metric)

    def to(self, device: Any) -> ModelMetric:
        """Move the wrapped metric to a device."""
        self._metric.to(device)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_metric"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._metric, name, value)


class TrainMetrics(Callback):
    """A callback that computes and logs the model's training metrics for each batch.

    They are logged as `train/<name>`, and are available as `state.train_metrics`.
    """

    phase = "change"  # callbacks of this phase are called first, so that later ones can read the metrics

    def __init__(self, model: Any, metrics: Mapping[str, Any]) -> None:
        self.metrics = dict(metrics)
        self._model = model

    def on_train_step_start(self, ctx: Context) -> None:
        """Reset the model's training metrics at the start of a batch."""
        for metric in self.metrics.values():
            metric.reset()
            metric.to(ctx.run.device)

    def on_loss_end(self, ctx: Context) -> None:
        """Update the metrics with the outputs of the microbatch that is being trained on."""
        model = self._model
        model.eval()
        try:
            with torch.no_grad():
                outputs = model.eval_forward(ctx.microbatch, ctx.outputs)
                for metric in self.metrics.values():
                    model.update_metric(ctx.microbatch, outputs, metric)
        finally:
            model.train()

    def on_train_step_end(self, ctx: Context) -> None:
        ctx.log({f"train/{name}": metric.compute() for name, metric in self.metrics.items()})


class StateScheduler(LambdaLR):
    """A learning-rate scheduler whose factor is a function of the trainer's state.

    The state is not available when the scheduler is made. So `start` must be called when training begins.
    """

    def start(self) -> None:
        """Set the learning rates of the first step."""
        for group, rate, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = rate * factor(0)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


class EpochScheduler(LRScheduler):
    """A learning-rate scheduler that combines several schedulers, and steps all of them after each batch or after each epoch.

    `step` is called after every batch. It does nothing if the schedulers are stepped once an epoch.
    """

    def __init__(self, optimizer: Optimizer, schedulers: Sequence[Any], *, every_batch: bool) -> None:
        self.optimizer = optimizer  # do not call the base class's constructor, which would also step the scheduler
        self.schedulers = list(schedulers)
        self.every_batch = every_batch

    def start(self) -> None:
        """Let the schedulers that depend on the trainer's state set the learning rates of the first step."""
        for scheduler in self.schedulers:
            if isinstance(scheduler, StateScheduler):
                scheduler.start()

    def step(self, epoch: int | None = None) -> None:
        """Step the schedulers after a batch, unless they are stepped once an epoch."""
        if self.every_batch:
            self.step_all()

    def step_all(self) -> None:
        """Step all schedulers."""
        for scheduler in self.schedulers:
            scheduler.step()

    def get_last_lr(self) -> list[Any]:
        """Return the current learning rates, by parameter group."""
        rates: list[Any] = self.schedulers[-1].get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all schedulers."""
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler, its in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(its)


class StepsSchedulers(Callback):
    """A callback that starts the learning-rate schedulers and, if these step once an epoch, steps them after complete epochs.

    Its handlers are called before those of other callbacks.
    """

    phase = "change"

    def __init__(self, scheduler: EpochScheduler, run: ComposerRun) -> None:
        self._scheduler, self._run = scheduler, run

    def on_train_start(self, ctx: Context) -> None:
        """In a new run, set the learning rates of the first step."""
        if not ctx.state.timestamp.batch:
            self._scheduler.start()

    def on_epoch_end(self, ctx: Context) -> None:
        """If the schedulers step once an epoch, and the epoch is complete, step them."""
        if not self._scheduler.every_batch and ctx.state.timestamp.epoch >= ctx.epoch:
            with self._run.before_last_change():  # Composer steps the schedulers before it counts the epoch
                self._scheduler.step_all()


offer(
    __name__,
    {
        "base": "ComposerModel",
        "huggingface": "HuggingFaceModel",
        "initializers": "Initializer",
        "tasks": "ComposerClassifier",
        "tasks.classification": "ComposerClassifier",
    },
)


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        with needed_by(name):
            return getattr(importlib.import_module(f"callsheet.compat.composer.{_LAZY_MODULES[name]}"), name)
    if name == "Initializer":
        return not_offered(name, "Composer", "initialize the weights with torch.nn.init", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
