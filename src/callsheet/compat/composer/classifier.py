"""`composer.models.ComposerClassifier`: a model class that adds a loss and metrics to a module that returns logits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from callsheet.compat.composer.models import ComposerModel
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")


class CrossEntropy(Metric):
    """A metric: the cross entropy, as a mean over batches. The targets are class indices or class probabilities."""

    full_state_update = False
    sum_loss: Tensor
    total_batches: Tensor

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.ignore_index = ignore_index
        self.add_state("sum_loss", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total_batches", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, targets: Tensor) -> None:
        """Add the cross entropy of a batch to the mean."""
        self.sum_loss += nn.functional.cross_entropy(preds, targets, ignore_index=self.ignore_index)
        self.total_batches += 1

    def compute(self) -> Any:
        """Return the mean cross entropy over the batches."""
        return self.sum_loss / self.total_batches


class ComposerClassifier(ComposerModel):
    """A classifier whose batches are `(inputs, targets)`.

    `num_classes` is needed unless the module has it as an attribute or both metrics are given. The loss is torch's cross entropy unless
    `loss_fn(outputs, targets)` is given.
    """

    def __init__(
        self,
        module: nn.Module,
        num_classes: int | None = None,
        train_metrics: Metric | MetricCollection | None = None,
        val_metrics: Metric | MetricCollection | None = None,
        loss_fn: Callable[..., Tensor] = nn.functional.cross_entropy,
    ) -> None:
        super().__init__()
        self.module = module
        self._loss_fn = loss_fn
        of_module: Any = getattr(module, "num_classes", None)
        if of_module is not None and num_classes not in (None, of_module):
            logger.warning(
                "Specified num_classes=%s does not match model num_classes=%s. Using model num_classes.", num_classes, of_module
            )
        self.num_classes: int | None = num_classes if of_module is None else of_module
        if self.num_classes is None and (train_metrics is None or val_metrics is None):
            raise ConfigError(
                "Please specify the number of output classes: give ComposerClassifier(num_classes=...), or both train_metrics and val_metrics, "
                "or a module with the attribute num_classes"
            )
        self.train_metrics = train_metrics if train_metrics is not None else self._accuracy()
        self.val_metrics = val_metrics if val_metrics is not None else MetricCollection([CrossEntropy(), self._accuracy()])

    def forward(self, batch: Any) -> Any:
        """Return the module's outputs for the batch's inputs."""
        inputs, _ = batch
        return self.module(inputs)

    def loss(self, outputs: Any, batch: Any) -> Any:
        _, targets = batch
        return self._loss_fn(outputs, targets)

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        metrics = self.train_metrics if is_train else self.val_metrics
        return {type(metrics).__name__: metrics} if isinstance(metrics, Metric) else dict(metrics.items())

    def _accuracy(self) -> MulticlassAccuracy:
        assert self.num_classes is not None
        return MulticlassAccuracy(num_classes=self.num_classes, average="micro")
