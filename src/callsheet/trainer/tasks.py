"""A task says what forward and loss are, and what a batch counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from callsheet.errors import ConfigError

Losses = Tensor | Mapping[str, Tensor]

IGNORED_LABEL = -100
"""The label that losses leave out, as torch's cross entropy has it."""


class Task:
    """The base of all tasks: override `forward` and `loss`, and the counts where the defaults do not fit."""

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """What the model makes of the batch."""
        raise NotImplementedError(f"{type(self).__name__} does not say what forward is")

    def loss(self, outputs: Any, batch: Any) -> Losses:
        """The mean loss, a scalar tensor; or losses by name, of which `loss` is the one that is trained on."""
        raise NotImplementedError(f"{type(self).__name__} does not say what the loss is")

    def counts(self, batch: Any) -> tuple[int, int]:
        """How many samples and tokens the batch holds: the length of its first tensor, and the size of its `input_ids`, padding included."""
        if type(batch) is dict and (ids := batch.get("input_ids")) is not None:
            return ids.size(0), ids.numel()
        return _leading_length(batch), 0

    def weight(self, batch: Any) -> Any:
        """What a (micro)batch's mean weighs in the mean over several: a number, or a scalar tensor on the device."""
        return _leading_length(batch)


class SupervisedTask(Task):
    """Batches are `(inputs, targets)`; the loss is `loss_function(model(inputs), targets)`, a mean over samples."""

    def __init__(self, loss_function: Callable[[Any, Any], Tensor]) -> None:
        self.loss_function = loss_function

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """`model(inputs)`."""
        return model(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Losses:
        """`loss_function(outputs, targets)`."""
        return self.loss_function(outputs, batch[1])

    def counts(self, batch: Any) -> tuple[int, int]:
        """The length of the inputs."""
        inputs = batch[0]
        return (inputs.size(0) if isinstance(inputs, Tensor) and inputs.ndim else _leading_length(inputs)), 0


class HuggingFaceTask(Task):
    """Batches are dictionaries of the model's arguments, `labels` among them; the loss is the model's own.

    Hugging Face models average over labelled tokens or, where the labels have one dimension, over samples; means over microbatches
    and evaluation batches weigh by the same, so that they are those of the whole batch.
    """

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
        return loss

    def weight(self, batch: Any) -> Any:
        """The labels that count: for language models all but the first of each sequence, which nothing predicts."""
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() < 2:
            return _leading_length(batch)
        return (labels[:, 1:] != IGNORED_LABEL).sum()


def resolve_task(task: Task | Callable[[Any, Any], Tensor] | None, model: nn.Module) -> Task:
    """`task` as a Task: a loss function makes a `SupervisedTask`; None is right for Hugging Face models.

    Raises:
        ConfigError: None, and the model does not look like one that computes its own loss.
    """
    if isinstance(task, Task):
        return task
    if callable(task) and not isinstance(task, type):
        return SupervisedTask(task)
    if task is None and hasattr(model, "config") and hasattr(model, "get_input_embeddings"):
        return HuggingFaceTask()
    raise ConfigError(
        f"task={task!r}: give a loss function of (outputs, targets), such as torch.nn.functional.cross_entropy, or a callsheet.trainer.Task"
    )


def _leading_length(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.ndim else 1
    if isinstance(batch, (list, tuple)):
        for value in batch:
            if length := _leading_length(value):
                return length
        return 0
    return _leading_length(list(batch.values())) if isinstance(batch, Mapping) else 0
