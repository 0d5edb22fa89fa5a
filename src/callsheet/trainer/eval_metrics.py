"""Computes the task's torchmetrics over one evaluation dataset and all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from callsheet.errors import ConfigError
from callsheet.trainer.tasks import Task

if TYPE_CHECKING:
    from torchmetrics import Metric


class EvalMetrics:
    """Updates torchmetrics batch by batch, and computes their results over all ranks at the end.

    With several ranks, `result` is a collective, so all ranks must call it.

    A filler (a batch that only keeps the ranks in step) is not counted. If a rank has seen only fillers, each filler updates the
    metrics and its values are then removed, so that the metrics' states have the same dtypes as on the other ranks.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = task
        self._metrics: dict[str, Metric] = {name: metric.to(device) for name, metric in task.metrics.items()}
        self._is_empty = True
        for metric in self._metrics.values():
            metric.reset()

    def add(self, outputs: Any, batch: Any, is_filler: bool) -> None:
        """Update the metrics with the outputs for one batch."""
        if not self._metrics or (is_filler and not self._is_empty):
            return
        pair = self._task.predictions_and_targets(outputs, batch)
        for metric in self._metrics.values():
            metric.update(*pair)
            if is_filler:
                _forget(metric)
        self._is_empty = self._is_empty and is_filler

    def result(self) -> dict[str, float]:
        """Compute the metrics, and return each as a float.

        Raises:
            ConfigError: a metric is not a scalar.
        """
        found: dict[str, float] = {}
        for name, metric in self._metrics.items():
            value = metric.compute()
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ConfigError(
                    f"the metric {name!r} has the shape {tuple(value.shape)}; choose an average, or one metric for each class"
                )
            found[name] = float(value)
        return found


def _forget(metric: Metric) -> None:
    """Reset a metric. Its list states keep their tensors without the elements, so that the dtype of the tensors is not lost."""
    for state, default in metric._defaults.items():
        if isinstance(default, list):
            setattr(metric, state, [tensor[:0] for tensor in getattr(metric, state)])
        else:
            setattr(metric, state, default.detach().clone().to(metric.device))
