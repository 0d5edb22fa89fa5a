"""Sequence classification as a task: weighted cross entropy, accuracy and F1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from callsheet.core.optional import load
from callsheet.trainer.tasks import Losses, Task


class ClassificationTask(Task):
    """Sequence classification with weighted cross entropy.

    Batches are dictionaries of the model's arguments and `labels`, one number per sample. The model returns `logits`
    of shape (samples, classes). The loss is the mean over samples, weighted by class. Metrics are `accuracy` over all samples, and
    `f1`, the mean over the classes.

    Args:
        classes: the number of classes.
        weights: the weight of a sample of each class; None is the same for all.
    """

    def __init__(self, classes: int, weights: Sequence[float] | None = None) -> None:
        metrics = load("torchmetrics.classification", extra="train", wanted_by="the recipe classify")
        self.metrics = {
            "accuracy": metrics.MulticlassAccuracy(classes, average="micro"),
            "f1": metrics.MulticlassF1Score(classes, average="macro"),
        }
        self._weights = torch.tensor(weights) if weights is not None else None

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return `model(**batch)` without the labels, so that the model does not compute its own loss."""
        return model(**{name: value for name, value in batch.items() if name != "labels"})

    def loss(self, outputs: Any, batch: Any) -> Losses:
        """Return the weighted cross entropy of a batch, computed in float32. It is 0 if the classes of all samples have weight 0."""
        labels, logits = batch["labels"], outputs.logits.float()
        weights = self._weights_on_device_of(labels)
        if weights is None:
            return cross_entropy(logits, labels)
        whole = weights[labels].sum().clamp(min=torch.finfo(weights.dtype).tiny)
        return cross_entropy(logits, labels, weight=weights, reduction="sum") / whole

    def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        return outputs.logits, batch["labels"]

    def weight(self, batch: Any) -> Any:
        """Return the sum of the class weights of the batch's samples: the batch's weight in the mean of several batches.

        Without class weights, it is the number of samples.
        """
        labels = batch["labels"]
        weights = self._weights_on_device_of(labels)
        return len(labels) if weights is None else weights[labels].sum()

    @property
    def weighs_samples(self) -> bool:
        """Whether the weight of a batch is its number of samples, which is the case if there are no class weights."""
        return self._weights is None

    def _weights_on_device_of(self, labels: Tensor) -> Tensor | None:
        if self._weights is not None and self._weights.device != labels.device:
            self._weights = self._weights.to(labels.device)
        return self._weights
