"""Microbatches: a batch in parts, and the means over them, which are those of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from callsheet.errors import ConfigError
from callsheet.trainer.batches import like
from callsheet.trainer.tasks import Losses, Task


def split(batch: Any, size: int) -> list[Any]:
    """The batch in microbatches of at most `size` samples, along the first dimension of its tensors.

    Raises:
        ConfigError: the batch holds nothing that can be split, or no sample, or things of different lengths.
    """
    lengths = set(_lengths(batch))
    if len(lengths) != 1 or 0 in lengths:
        several = f"has parts of different lengths: {sorted(lengths)}"
        found = several if len(lengths) > 1 else "is empty" if lengths else f"is {type(batch).__name__}, which has no length"
        raise ConfigError(
            f"the batch cannot be split: it {found}; give tensors and lists of one length in tuples or dicts, or microbatch_size=None"
        )
    return [_part(batch, slice(start, start + size)) for start in range(0, lengths.pop(), size)]


def _lengths(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor):
        if not batch.ndim:
            raise ConfigError(
                "the batch cannot be split: it holds a tensor without dimensions; give one value a sample, or microbatch_size=None"
            )
        yield batch.size(0)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _lengths(value)
    elif _is_structure(batch):
        for value in batch:
            yield from _lengths(value)
    elif isinstance(batch, (list, tuple)):
        yield len(batch)


def _part(batch: Any, where: slice) -> Any:
    if isinstance(batch, Mapping):
        return {key: _part(value, where) for key, value in batch.items()}
    if _is_structure(batch):
        return like(batch, [_part(value, where) for value in batch])
    return batch[where] if isinstance(batch, (Tensor, list, tuple)) else batch


def _is_structure(batch: Any) -> bool:
    """A list or tuple of things to be split, not of one value a sample."""
    return isinstance(batch, (list, tuple)) and any(isinstance(value, (Tensor, Mapping, list, tuple)) for value in batch)


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
