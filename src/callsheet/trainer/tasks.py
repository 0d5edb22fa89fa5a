"""Tasks: a task defines the forward pass, the loss and the metrics, and how to count a batch's samples and tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from callsheet.errors import ConfigError

if TYPE_CHECKING:
    from torchmetrics import Metric

Losses = Tensor | Mapping[str, Tensor]

IGNORED_LABEL = -100
"""The label that losses ignore, as in torch's cross entropy."""


class Task:
    """The base class of all tasks. Override `forward` and `loss`, and other methods if their defaults do not fit.

    `metrics` are torchmetrics by name. They are computed over each evaluated dataset and all ranks, and logged as
    `<dataset>/<name>`. `frozen_models` are additional models that the task calls, such as a teacher. The Trainer moves them to
    the device and shards them like the model, but does not train, save or export them. Call them under `torch.no_grad()`.
    """

    metrics: Mapping[str, Metric] = {}
    frozen_models: Sequence[nn.Module] = ()

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return the model's outputs for a batch.

        Args:
            model: the model, which may be wrapped (in DDP) or compiled. Call the model itself, and none of its methods.
            batch: a batch or microbatch of the dataloader, on the device.

        Raises:
            NotImplementedError: the task does not override this method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define forward; override forward()")

    def loss(self, outputs: Any, batch: Any) -> Losses:
        """Return the mean loss as a scalar tensor, or several losses by name, of which the one called `loss` is trained on.

        Args:
            outputs: what `forward` returned.
            batch: the batch or microbatch for which `forward` was called, on the device.

        Raises:
            NotImplementedError: the task does not override this method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define a loss; override loss()")

    def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        """Return the predictions and targets with which the metrics are updated. A task without metrics need not override this method.

        Args:
            outputs: what `forward` returned.
            batch: the batch for which `forward` was called, on the device.

        Raises:
            NotImplementedError: the task has metrics, and does not override this method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define what its metrics compare; override predictions_and_targets()"
        )

    def counts(self, batch: Any) -> tuple[int, int]:
        """Return how many samples and how many tokens a batch holds. By default, this method calls `counts_of`.

        Args:
            batch: a batch of the dataloader. Only this rank's samples and tokens are counted.
        """
        return counts_of(batch)

    def weight(self, batch: Any) -> float | Tensor:
        """Return the weight of a batch in a mean over all ranks: a number, or a scalar tensor on the device.

        By default, the weight is the number of samples, or 1 if this number cannot be read from the batch. If a task overrides this method, the
        ranks exchange their weights at every step.

        Args:
            batch: a batch or microbatch, on the device.
        """
        return _leading_length(batch) or 1

    def label_tokens(self, batch: Any) -> Tensor | None:
        """Return the number of tokens over which the loss of a batch is a mean, as a scalar tensor on the device.

        The number is logged as `train/label_tokens`.

        Args:
            batch: a batch or microbatch, on the device.

        Returns:
            The number of tokens, or None if the loss is not a mean over tokens.
        """
        return None

    @property
    def weighs_samples(self) -> bool:
        """Whether the weight of a batch is its number of samples."""
        return type(self).weight is Task.weight


_NO_PAIR_ERRORS = (KeyError, IndexError, TypeError, AttributeError)
"""The errors that `batch[0]` or `batch[1]` may raise if the batch is not a pair of inputs and targets."""


def _describe(batch: Any) -> str:
    return f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__


class SupervisedTask(Task):
    """A task whose batches are `(inputs, targets)`; the loss is `loss_function(model(inputs), targets)`, a mean over samples.

    Args:
        loss_function: returns the mean loss as a scalar tensor.
        metrics: torchmetrics by name, which compare outputs and targets; None: no metrics.

    Raises:
        ConfigError: a metric is not a torchmetrics `Metric`, or a batch is not a pair.
    """

    def __init__(self, loss_function: Callable[[Any, Any], Tensor], metrics: Mapping[str, Metric] | None = None) -> None:
        self.loss_function = loss_function
        self.metrics = check_metrics(metrics)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        try:
            inputs = batch[0]
        except _NO_PAIR_ERRORS as error:
            raise self._not_a_pair(batch) from error
        return model(inputs)

    def loss(self, outputs: Any, batch: Any) -> Losses:
        try:
            targets = batch[1]
        except _NO_PAIR_ERRORS as error:
            raise self._not_a_pair(batch) from error
        return self.loss_function(outputs, targets)

    def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        return outputs, batch[1]

    def counts(self, batch: Any) -> tuple[int, int]:
        """Return the number of samples, which is the length of the inputs, and 0 as the number of tokens."""
        try:
            inputs = batch[0]
        except _NO_PAIR_ERRORS as error:
            raise self._not_a_pair(batch) from error
        return (inputs.size(0) if isinstance(inputs, Tensor) and inputs.ndim else _leading_length(inputs)), 0

    def _not_a_pair(self, batch: Any) -> ConfigError:
        has = f"{type(batch).__name__} with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else _describe(batch)
        name = getattr(self.loss_function, "__name__", type(self.loss_function).__name__)
        return ConfigError(
            f"the loss function {name} needs batches of (inputs, targets), but this batch is a {has}: let the dataloader return tuples, or "
            "give a task in place of the loss function, such as callsheet.trainer.ForwardStepTask(forward_step), whose forward_step(model, "
            "batch) returns the outputs and a function that computes the loss from them"
        )


class HuggingFaceTask(Task):
    """A task whose batches are dictionaries of the model's arguments, with `labels`; the model itself computes the loss.

    The loss of a Hugging Face model is a mean over labeled tokens or, if the labels have one dimension, over samples. The means of
    several batches are weighted by these numbers of tokens or samples, so the result equals the mean over all batches together.

    Args:
        metrics: torchmetrics by name, which compare logits and labels; None: no metrics.
        shifts_labels: whether the model compares its output at one token with the label of the next, as causal language models
            do. Masked language models, token classifiers and encoder-decoder models do not.

    Raises:
        ConfigError: a metric is not a torchmetrics `Metric`.
    """

    def __init__(self, metrics: Mapping[str, Metric] | None = None, *, shifts_labels: bool = True) -> None:
        self.metrics = check_metrics(metrics)
        self.shifts_labels = shifts_labels

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(**batch)

    def loss(self, outputs: Any, batch: Any) -> Losses:
        """Return `outputs.loss`. Raise ConfigError if the model returned no loss."""
        loss = getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"the model returned no loss; the batch needs `labels` (it has {', '.join(map(str, batch))}), or give the Trainer a task with a loss"
            )
        if loss.dim() == 0 and isinstance(weight := self.weight(batch), Tensor):
            return torch.where(weight > 0, loss, 0.0)  # if there are no labels, the mean loss that the model computes is NaN
        return loss

    def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        """Return `outputs.logits` and the labels.

        If labels are shifted, drop the last logit and the first label, so that each logit is in the place of its label.
        """
        logits, labels = outputs.logits, batch["labels"]
        return (logits[:, :-1], labels[:, 1:]) if self.shifts_labels and labels.dim() > 1 else (logits, labels)

    def label_tokens(self, batch: Any) -> Tensor | None:
        """Return the number of labels that are not ignored.

        If labels are shifted, the first label of each sequence is not counted, because no output predicts it.
        """
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() < 2:
            return None
        return ((labels[:, 1:] if self.shifts_labels else labels) != IGNORED_LABEL).sum()

    def weight(self, batch: Any) -> float | Tensor:
        """Return the number of labels that are not ignored, or the number of samples if each sample has one label."""
        labels = self.label_tokens(batch)
        return labels if labels is not None else super().weight(batch)


class ForwardStepTask(Task):
    """A task that is given as one function for the forward pass and the loss, as in Megatron.

    Means are weighted by samples. If the loss is a mean over tokens, override `weight`.

    Args:
        forward_step: called with the model and the batch. It returns `(outputs, loss_function)`. `loss_function(outputs)` returns
            the mean loss, or `(loss, other losses by name)`.
        metrics: torchmetrics by name; None: no metrics. A class with metrics must override `predictions_and_targets`.

    Raises:
        ConfigError: `metrics` are given but `predictions_and_targets` is not overridden, a metric is not a torchmetrics `Metric`,
            or `forward_step` does not return such a pair.

    Examples:
        >>> def forward_step(model, batch):
        ...     outputs = model(batch["inputs"])
        ...     return outputs, lambda outputs: (outputs - batch["targets"]).square().mean()
        >>> task = ForwardStepTask(forward_step)
    """

    def __init__(self, forward_step: Callable[[nn.Module, Any], Any], metrics: Mapping[str, Metric] | None = None) -> None:
        self.forward_step = forward_step
        self.metrics = check_metrics(metrics)
        if self.metrics and type(self).predictions_and_targets is Task.predictions_and_targets:
            raise ConfigError(
                "a ForwardStepTask does not know what its metrics compare; override predictions_and_targets(outputs, batch) in a subclass, "
                "which returns predictions and targets"
            )
        self._loss_function: Callable[[Any], Any] | None = None

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Call `forward_step`, which returns outputs and a loss function. Return the outputs; `loss` calls the function later."""
        given = self.forward_step(model, batch)
        if not (isinstance(given, tuple) and len(given) == 2 and callable(given[1])):
            raise ConfigError(
                f"forward_step returned {type(given).__name__}; let it return (outputs, a function that computes the loss from them)"
            )
        outputs, self._loss_function = given
        return outputs

    def loss(self, outputs: Any, batch: Any) -> Losses:
        # The loss function may hold the batch and the autograd graph, so do not keep the function.
        loss_function, self._loss_function = self._loss_function, None
        assert loss_function is not None  # `forward` runs before this method and has set the loss function
        given = loss_function(outputs)
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
            return {**given[1], "loss": given[0]}
        losses: Losses = given
        return losses


def resolve_task(
    task: Task | Callable[[Any, Any], Tensor] | None, model: nn.Module, metrics: Mapping[str, Metric] | None = None
) -> Task:
    """Return the Task for the Trainer's argument `task`, which may also be a loss function or None.

    A loss function becomes a `SupervisedTask`. None becomes a `HuggingFaceTask` if the model is a Hugging Face model.

    Raises:
        ConfigError: the task is None and the model does not look like a Hugging Face model, a metric is invalid, or `metrics` is
            given although the task is a `Task`, which has its own metrics.
    """
    if isinstance(task, Task):
        if metrics is not None:
            raise ConfigError(
                "metrics= is for a loss function, or a model with its own loss; set the metrics of a Task on the task"
            )
        return task
    if callable(task) and not isinstance(task, type):
        return SupervisedTask(task, metrics)
    if task is None and hasattr(model, "config") and hasattr(model, "get_input_embeddings"):
        return HuggingFaceTask(metrics, shifts_labels=_shifts_labels(model))
    raise ConfigError(
        f"task={task!r}: give a loss function of (outputs, targets), such as torch.nn.functional.cross_entropy, or a callsheet.trainer.Task"
    )


def _shifts_labels(model: Any) -> bool:
    """Return whether the model's loss compares the output at one token with the label of the next; see `HuggingFaceTask`.

    transformers chooses the loss by the model's class; the default is a causal loss.
    """
    kind = getattr(model, "loss_type", None)
    return kind in (None, "ForCausalLM", "ForConditionalGeneration") and not getattr(model.config, "is_encoder_decoder", False)


def check_metrics(metrics: Mapping[str, Metric] | None) -> Mapping[str, Metric]:
    """Return the metrics. Raise ConfigError if one is not a torchmetrics `Metric`."""
    for name, metric in (metrics or {}).items():
        if not all(hasattr(metric, method) for method in ("update", "compute", "reset", "to")):
            raise ConfigError(f"metrics[{name!r}] is {type(metric).__name__}, not a torchmetrics Metric")
    return metrics or {}


def counts_of(batch: Any) -> tuple[int, int]:
    """Return how many samples and tokens the batch holds.

    The number of samples is the length of the batch's first tensor. The number of tokens is the size of `input_ids`, including
    padding, or 0 if the batch has no `input_ids`.
    """
    if type(batch) is dict:
        if isinstance(ids := batch.get("input_ids"), Tensor) and ids.ndim:
            return ids.size(0), ids.numel()
        batch = tuple(batch.values())
    if type(batch) in (list, tuple) and batch:  # a fast path, because this function is called at every step
        first = batch[0]
        if type(first) is Tensor and first.ndim and (length := first.size(0)):
            return length, 0
    return _leading_length(batch), 0


def _leading_length(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    values: Iterable[Any] = batch if isinstance(batch, (list, tuple)) else batch.values() if isinstance(batch, Mapping) else ()
    for value in values:
        length = value.size(0) if type(value) is Tensor and value.ndim else _leading_length(value)
        if length:
            return length
    return 0
