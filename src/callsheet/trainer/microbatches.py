"""Microbatches: a batch in parts, and the means over them, which are those of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from callsheet.errors import ConfigError
from callsheet.trainer.batches import like
from callsheet.trainer.tasks import Losses, Task


def split(batch: Any, size: int | None) -> list[Any]:
    """The batch in microbatches of at most `size` samples, along the first dimension of its tensors.

    Raises:
        ConfigError: the batch holds nothing that can be split, or things of different lengths.
    """
    if size is None:
        return [batch]
    if isinstance(batch, Tensor):
        return list(torch.split(batch, size))
    if isinstance(batch, Mapping):
        parts = _in_step(list(batch.values()), size)
        return [dict(zip(batch, part, strict=True)) for part in parts]
    if isinstance(batch, (list, tuple)) and batch and not isinstance(batch[0], (Tensor, Mapping, list, tuple)):
        return [batch[start : start + size] for start in range(0, len(batch), size)]
    if isinstance(batch, (list, tuple)) and batch:
        return [like(batch, list(part)) for part in _in_step(list(batch), size)]
    raise ConfigError(
        f"a batch of type {type(batch).__name__} cannot be split; give microbatch_size=None, or tensors in tuples or dicts"
    )


def _in_step(values: list[Any], size: int) -> list[tuple[Any, ...]]:
    columns = [split(value, size) for value in values]
    if len({len(column) for column in columns}) > 1:
        raise ConfigError(f"the batch's parts make different numbers of microbatches: {[len(column) for column in columns]}")
    return list(zip(*columns, strict=True))


def microbatches(batch: Any, size: int | None, task: Task) -> Iterable[tuple[Any, Any]]:
    """Each microbatch with its share of the batch's mean, by the task's weights; the batch itself, and None, where it is not split."""
    parts = [batch] if size is None else split(batch, size)
    if len(parts) == 1:
        return ((parts[0], None),)
    weights = [task.weight(part) for part in parts]
    total = sum(weights)
    return [(part, weight / total) for part, weight in zip(parts, weights, strict=True)]


def trained_on(losses: Losses) -> Tensor:
    """The loss that is trained on, of what a task's `loss` gave, where that is not simply a tensor.

    Raises:
        ConfigError: none is called `loss`, or that one is no scalar tensor.
    """
    loss = losses.get("loss") if isinstance(losses, Mapping) else losses
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    shape = f"has the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is {loss!r}"
    names = f" (losses: {', '.join(losses)})" if isinstance(losses, Mapping) else ""
    raise ConfigError(f"the task's loss {shape}, and should be a scalar tensor; take its mean{names}")


def added(means: dict[str, Tensor], loss: Tensor, losses: Losses, share: Any) -> dict[str, Tensor]:
    """The step's means with one more microbatch's losses in them, detached: `loss` is what was trained on, `losses` the task's."""
    if share is None and type(losses) is Tensor:
        return {"loss": loss.detach()}
    named = {**(losses if isinstance(losses, Mapping) else {}), "loss": loss}
    parts = {name: value.detach() if share is None else value.detach() * share for name, value in named.items()}
    return {name: means[name] + part for name, part in parts.items()} if means else parts
