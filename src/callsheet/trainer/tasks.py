"""A task says what forward, loss and metrics are, and what a batch counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.errors import ConfigError

Losses = Tensor | Mapping[str, Tensor]

IGNORED_LABEL = -100
"""The label that losses leave out, as torch's cross entropy has it."""


class Task:
    """The base of all tasks: override `forward` and `loss`, and the rest where the defaults do not fit.

    `metrics` are torchmetrics by name, computed over each evaluated dataset and all ranks, and logged as `<dataset>/<name>`.
    `frozen_models` are those that it calls beside the model, such as a teacher: the Trainer moves them to the device, shards them as it
    shards the model, and leaves them out of training, checkpoints and exports. Call them under `torch.no_grad()`.
    """

    metrics: Mapping[str, Any] = {}
    frozen_models: Sequence[nn.Module] = ()

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """What the model makes of the batch."""
        raise NotImplementedError(f"{type(self).__name__} does not say what forward is")

    def loss(self, outputs: Any, batch: Any) -> Losses:
        """The mean loss, a scalar tensor; or losses by name, of which `loss` is the one that is trained on."""
        raise NotImplementedError(f"{type(self).__name__} does not say what the loss is")

    def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        """What the metrics are updated with: predictions and targets."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its metrics compare; override predictions_and_targets()"
        )

    def counts(self, batch: Any) -> tuple[int, int]:
        """How many samples and tokens the batch holds; by default as `counts_of` says."""
        return counts_of(batch)

    def weight(self, batch: Any) -> Any:
        """What a (micro)batch's mean weighs in the mean over several, and over ranks: a number, or a scalar tensor on the device.

        By default samples, or 1 where the batch does not show how many it has; a task that overrides it has the ranks tell each other
        their weights at every step.
        """
        return _leading_length(batch) or 1

    def label_tokens(self, batch: Any) -> Tensor | None:
        """How many tokens the loss of the batch is a mean over, a scalar tensor on the device, logged as `train/label_tokens`; None where it
        is not over tokens.
        """
        return None

    @property
    def weighs_samples(self) -> bool:
        """Whether the weight of a batch is simply the number of its samples."""
        return type(self).weight is Task.weight


_NO_PAIR = (KeyError, IndexError, TypeError, AttributeError)
"""What `batch[0]` raises where the batch is no pair."""


def _described(batch: Any) -> str:
    return f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__


class SupervisedTask(Task):
    """Batches are `(inputs, targets)`; the loss is `loss_function(model(inputs), targets)`, a mean over samples."""

    def __init__(self, loss_function: Callable[[Any, Any], Tensor], metrics: Mapping[str, Any] | None = None) -> None:
        self.loss_function = loss_function
        self.metrics = checked_metrics(metrics)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """`model(inputs)`."""
        try:
            inputs = batch[0]
        except _NO_PAIR as error:
            raise self._no_pair(batch) from error
        return model(inputs)

    def loss(self, outputs: Any, batch: Any) -> Losses:
        """`loss_function(outputs, targets)`."""
        try:
            targets = batch[1]
        except _NO_PAIR as error:
            raise self._no_pair(batch) from error
        return self.loss_function(outputs, targets)

    def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        """`outputs` and `targets`."""
        return outputs, batch[1]

    def counts(self, batch: Any) -> tuple[int, int]:
        """The length of the inputs."""
        try:
            inputs = batch[0]
        except _NO_PAIR as error:
            raise self._no_pair(batch) from error
        return (inputs.size(0) if isinstance(inputs, Tensor) and inputs.ndim else _leading_length(inputs)), 0

    def _no_pair(self, batch: Any) -> ConfigError:
        has = f"{type(batch).__name__} with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else _described(batch)
        called = getattr(self.loss_function, "__name__", type(self.loss_function).__name__)
        return ConfigError(
            f"the loss function {called} needs batches of (inputs, targets), and this batch is a {has}: have the dataloader give tuples, or "
            "give a task in place of the loss function, such as callsheet.trainer.ForwardStepTask(forward_step), whose forward_step(model, "
            "batch) returns the outputs and a function of them that gives the loss"
        )


class HuggingFaceTask(Task):
    """Batches are dictionaries of the model's arguments, `labels` among them; the loss is the model's own.

    Hugging Face models average over labelled tokens or, where the labels have one dimension, over samples; means over microbatches
    and evaluation batches weigh by the same, so that they are those of the whole batch.

    Args:
        shifts_labels: whether the model compares what it says at one token with the label of the next, as causal language models do;
            not those for masked tokens, for labels of tokens, or with an encoder and a decoder.
    """

    def __init__(self, metrics: Mapping[str, Any] | None = None, *, shifts_labels: bool = True) -> None:
        self.metrics = checked_metrics(metrics)
        self.shifts_labels = shifts_labels

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """`model(**batch)`."""
        return model(**batch)

    def loss(self, outputs: Any, batch: Any) -> Losses:
        """`outputs.loss`; ConfigError where the model gave none."""
        loss = getattr(outputs, "loss", None)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"the model returned no loss; the batch needs `labels` (it has {', '.join(map(str, batch))}), or the task a loss"
            )
        if loss.dim() == 0 and isinstance(weight := self.weight(batch), Tensor):
            return torch.where(weight > 0, loss, 0.0)  # the model's own mean over no label at all is NaN
        return loss

    def predictions_and_targets(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        """`outputs.logits` and the labels; where labels are shifted, without the last and the first, so that like stands beside like."""
        logits, labels = outputs.logits, batch["labels"]
        return (logits[:, :-1], labels[:, 1:]) if self.shifts_labels and labels.dim() > 1 else (logits, labels)

    def label_tokens(self, batch: Any) -> Tensor | None:
        """The labels that count; where they are shifted not the first of each sequence, which nothing predicts."""
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() < 2:
            return None
        return ((labels[:, 1:] if self.shifts_labels else labels) != IGNORED_LABEL).sum()

    def weight(self, batch: Any) -> Any:
        """The labels that count, or samples where a label is a sample's."""
        labels = self.label_tokens(batch)
        return labels if labels is not None else super().weight(batch)


class ForwardStepTask(Task):
    """One function for the whole step, in the manner of Megatron: `forward_step(model, batch)` gives `(outputs, loss_function)`, and
    `loss_function(outputs)` the mean loss, or `(loss, others by name)`.

    Its means weigh by samples; where they are over tokens, override `weight`.

    Example:
        >>> def forward_step(model, batch):
        ...     outputs = model(batch["inputs"])
        ...     return outputs, lambda outputs: (outputs - batch["targets"]).square().mean()
        >>> task = ForwardStepTask(forward_step)
    """

    def __init__(self, forward_step: Callable[[nn.Module, Any], Any], metrics: Mapping[str, Any] | None = None) -> None:
        self.forward_step = forward_step
        self.metrics = checked_metrics(metrics)
        if self.metrics and type(self).predictions_and_targets is Task.predictions_and_targets:
            raise ConfigError(
                "a ForwardStepTask does not know what its metrics compare; override predictions_and_targets(outputs, batch) in a class of your own, "
                "which gives predictions and targets"
            )
        self._loss_function: Callable[[Any], Any] | None = None

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """The outputs that `forward_step` gives; its loss function is kept for `loss`."""
        given = self.forward_step(model, batch)
        if not (isinstance(given, tuple) and len(given) == 2 and callable(given[1])):
            raise ConfigError(
                f"forward_step gave {type(given).__name__}; let it return (outputs, a function of the outputs that gives the loss)"
            )
        outputs, self._loss_function = given
        return outputs

    def loss(self, outputs: Any, batch: Any) -> Losses:
        """`loss_function(outputs)`."""
        loss_function, self._loss_function = self._loss_function, None  # it may hold the batch, and half the graph
        assert loss_function is not None  # forward came before
        given = loss_function(outputs)
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
            return {**given[1], "loss": given[0]}
        losses: Losses = given
        return losses


def resolve_task(
    task: Task | Callable[[Any, Any], Tensor] | None, model: nn.Module, metrics: Mapping[str, Any] | None = None
) -> Task:
    """`task` as a Task: a loss function makes a `SupervisedTask`; None is right for Hugging Face models.

    Raises:
        ConfigError: None, and the model does not look like one that computes its own loss; metrics that are none, or given twice.
    """
    if isinstance(task, Task):
        if metrics is not None:
            raise ConfigError(
                "metrics= goes with a loss function, or with a model that has its own loss; a Task has its metrics itself"
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
    """See HuggingFaceTask: as `transformers` chooses the loss by the model's class; models it has no loss for are causal to it."""
    kind = getattr(model, "loss_type", None)
    return kind in (None, "ForCausalLM", "ForConditionalGeneration") and not getattr(model.config, "is_encoder_decoder", False)


def checked_metrics(metrics: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The metrics; ConfigError for one that is no torchmetrics `Metric`."""
    for name, metric in (metrics or {}).items():
        if not all(hasattr(metric, method) for method in ("update", "compute", "reset", "to")):
            raise ConfigError(f"metrics[{name!r}] is {type(metric).__name__}, not a torchmetrics Metric")
    return metrics or {}


def counts_of(batch: Any) -> tuple[int, int]:
    """How many samples and tokens the batch holds: the length of its first tensor, and the size of its `input_ids`, padding included."""
    if type(batch) is dict:
        if (ids := batch.get("input_ids")) is not None:
            return ids.size(0), ids.numel()
        batch = tuple(batch.values())
    if type(batch) in (list, tuple) and batch:  # by a short way: every step asks
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
