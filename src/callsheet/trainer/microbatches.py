"""Splits a batch into microbatches, and weights them so that their mean loss equals the mean loss of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from callsheet.errors import ConfigError
from callsheet.run.metrics import lasting
from callsheet.run.process_groups import ProcessGroups
from callsheet.trainer.batches import like
from callsheet.trainer.tasks import Losses, Task


def split(batch: Any, size: int) -> list[Any]:
    """Split the batch into microbatches of at most `size` samples, along the first dimension of its tensors.

    Raises:
        ConfigError: the batch contains nothing that can be split, has no samples, or has parts of different lengths.
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
                "the batch cannot be split: it holds a tensor without dimensions; give one value per sample, or microbatch_size=None"
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
    """Return whether the batch is a list or tuple whose items must each be split. Other lists have one item per sample."""
    return isinstance(batch, (list, tuple)) and any(isinstance(value, (Tensor, Mapping, list, tuple)) for value in batch)


@dataclass(slots=True)
class Fetched:
    """One batch that was fetched for a step, with its sample counts.

    A rank that has run out of data gets a filler instead, which has no weight.

    The sample counts on this rank and on all ranks are those of the original data. If a callback changes the batch, its weight
    stays the same, because a new weight would have to be sent to the other ranks.
    """

    batch: Any
    is_filler: bool = False
    samples_here: int | None = None
    samples_in_all: int | None = None


class MicrobatchPlan:
    """The microbatches of one step, each with its weight in the step's mean loss.

    The mean is over the samples or labels of all ranks, as the task defines.

    `parts` are triples of the fetched batch, the microbatch, and its fraction of this rank's mean; the fraction is None if there
    is only one microbatch. `fillers` says of each microbatch whether it is a filler. `scale` is the weight of this rank's mean
    relative to the means of the other ranks, or None if all have the same weight. If an all-reduce is needed to compute `scale`, the
    constructor starts the all-reduce, and the first read of `scale`, after the first forward pass, waits for the result.

    Args:
        same_number: whether every rank must run the same number of microbatches, because the ranks synchronize in each forward
            pass. This takes a collective if batches are split.
    """

    __slots__ = ("_fetched", "_scale", "_work", "fillers", "parts")

    def __init__(
        self,
        fetched: Sequence[Fetched],
        size: int | None,
        task: Task,
        groups: ProcessGroups,
        device: torch.device,
        *,
        same_number: bool,
    ) -> None:
        pieces = [(given, part) for given in fetched for part in ((given.batch,) if size is None else split(given.batch, size))]
        self._fetched = fetched
        self._work: Any = None
        self._scale: Any = None
        is_shared = groups.size > 1
        lacking = 0
        if same_number and size is not None:
            lacking = int(groups.max([len(pieces)])[0]) - len(pieces)
            pieces += pieces[-1:] * lacking  # if another rank has more microbatches, repeat the last microbatch as a filler
        if len(pieces) == 1 and not is_shared:
            self.parts: list[tuple[Any, Any, Any]] = [(given.batch, part, None) for given, part in pieces]
            self.fillers = [False]
            return
        self.fillers = [given.is_filler for given, _ in pieces[: len(pieces) - lacking]] + [True] * lacking
        weights = [0 if filler else task.weight(part) for filler, (_, part) in zip(self.fillers, pieces, strict=True)]
        mine = sum(weights)
        shares = [None] if len(pieces) == 1 else [_share(weight, mine, len(pieces)) for weight in weights]
        self.parts = [(given.batch, part, share) for (given, part), share in zip(pieces, shares, strict=True)]
        if not is_shared:
            return
        counts = [(given.samples_here, given.samples_in_all) for given in fetched]
        if task.weighs_samples and all(here is not None and in_all is not None for here, in_all in counts):
            here, in_all = (sum(numbers) for numbers in zip(*counts, strict=True))
            self._scale = None if here * groups.size == in_all else here * groups.size / in_all
        else:
            wide = torch.float64 if device.type != "mps" else torch.float32
            # `torch.as_tensor` would wait for the device here, so use `torch.full`.
            summed = mine.to(wide, copy=True) if isinstance(mine, Tensor) else torch.full((), mine, dtype=wide, device=device)
            self._scale = mine * groups.size, summed
            self._work = distributed.all_reduce(summed, async_op=True)

    @property
    def scale(self) -> Any:
        """The factor by which this rank's loss is multiplied; None means 1.

        With this factor, the average of the ranks' gradients is the gradient of the mean loss over all ranks.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
            mine, total = self._scale
            self._scale = (mine / total.clamp(min=1e-12)).float()
        return self._scale

    def counts(self, task: Task) -> tuple[int, int, int | None, tuple[int, int]]:
        """Return how many samples and tokens this rank has in the step, how many samples all ranks have, and the size of the fillers.

        The number of samples of all ranks is None if it is not known, or if the task counts other samples than the dataloader. The
        size of the fillers is their number of samples and of tokens.
        """
        fillers = _sums(task.counts(given.batch) for given in self._fetched if given.is_filler)
        samples, tokens = _sums(task.counts(given.batch) for given in self._fetched if not given.is_filler)
        here = [given.samples_here for given in self._fetched if given.samples_here is not None]
        in_all = [given.samples_in_all for given in self._fetched if given.samples_in_all is not None]
        is_known = len(here) == len(in_all) == len(self._fetched) and sum(here) == samples
        return samples, tokens, sum(in_all) if is_known else None, fillers

    def label_tokens(self, task: Task) -> Any:
        """Return the number of label tokens over which this rank's losses are means; None if the task does not count label tokens."""
        counted = [task.label_tokens(given.batch) for given in self._fetched if not given.is_filler]
        return None if any(count is None for count in counted) else sum(counted)

    def weigh_loss(self, loss: Tensor, share: Any) -> Tensor:
        """Return the loss of a microbatch multiplied by its weight in the step's mean loss, for `backward`.

        The sum of the gradients over all microbatches, averaged over the ranks, is then the gradient of the step's mean loss.
        """
        if share is not None:
            loss = loss * share
        return loss if self.scale is None else loss * self.scale


def _share(weight: Any, total: Any, parts: int) -> Any:
    if isinstance(total, Tensor):
        # In a step without labels, `total` is 0. Return 0 instead of NaN then, so that all gradients become zero.
        return torch.where(total > 0, weight / total, 0.0)
    return weight / total if total else 1 / parts


def _sums(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the sum of the first numbers, and the sum of the second numbers."""
    first, second = 0, 0
    for one, other in counts:
        first, second = first + one, second + other
    return first, second


def select_loss(losses: Losses) -> Tensor:
    """Return the loss on which to call `backward`: the task's only loss or, if there are several, the one that is named `loss`.

    Raises:
        ConfigError: no loss is called `loss`, or the loss is not a scalar tensor.
    """
    loss = losses.get("loss") if isinstance(losses, Mapping) else losses
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    shape = f"has the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is {loss!r}"
    names = f" (losses: {', '.join(losses)})" if isinstance(losses, Mapping) else ""
    raise ConfigError(f"the task's loss {shape}, but must be a scalar tensor; take its mean{names}")


def add_losses(means: dict[str, Tensor], loss: Tensor, losses: Losses, share: Any) -> dict[str, Tensor]:
    """Return the step's mean losses so far, with the detached losses of one more microbatch added.

    `loss` is the loss on which `backward` was called; `losses` are all losses of the task.
    """
    if share is None and type(losses) is Tensor:
        return {"loss": lasting(loss)}
    named = {**(losses if isinstance(losses, Mapping) else {}), "loss": loss}
    parts = {name: lasting(value) if share is None else value.detach() * share for name, value in named.items()}
    return {name: means[name] + part for name, part in parts.items()} if means else parts
