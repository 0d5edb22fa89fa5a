"""Packs several examples into one row, to avoid padding. Each example keeps its own positions and attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from callsheet.errors import ConfigError
from callsheet.recipes.data.examples import Examples, ExampleStream, Sample
from callsheet.recipes.data.padding import pad_rows
from callsheet.trainer.tasks import IGNORED_LABEL

_LOGIT_TOLERANCES = {True: (1e-4, 1e-4), False: (1e-3, 2e-2)}
"""The allowed differences of logits in `check_kept_apart`, relative to the largest logit: for fp32 weights (True), and for other weights (False).

The first number of a pair is the limit between rows of the same shape, the second between rows of different shapes.
"""


def plan(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Assign the examples to rows of `room` tokens (best-fit-decreasing). Return, for each row, the indices of the row's examples.

    The longest examples come first. Each is put into the row where it leaves the least room.
    """
    rows: list[list[int]] = []
    with_left: dict[int, list[int]] = defaultdict(list)  # number of free tokens -> the indices of the rows that have so many
    lefts = 0  # a bit mask: bit k is set if `with_left[k]` has rows
    for example in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[example]
        enough = lefts >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1
            row = with_left[left].pop()
            if not with_left[left]:
                lefts &= ~(1 << left)
            rows[row].append(example)
        else:
            left, row = room, len(rows)
            rows.append([example])
        with_left[left - length].append(row)
        lefts |= 1 << (left - length)
    return rows


def pack_samples(samples: Iterable[Sample]) -> Sample:
    """Concatenate samples into one row. The `position_ids` of each sample start from 0."""
    given = list(samples)
    return {
        "input_ids": torch.cat([one["input_ids"] for one in given]),
        "labels": torch.cat([one["labels"] for one in given]),
        "position_ids": torch.cat([torch.arange(len(one["labels"])) for one in given]),
    }


class Packed(Dataset[Sample]):
    """A dataset of rows of up to `room` tokens, into which a table's examples are packed. The rows are the same in every epoch."""

    def __init__(self, examples: Examples, room: int) -> None:
        self.rows = plan(examples.lengths, room)
        self._examples = examples

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return pack_samples(self._examples[i] for i in self.rows[index])


class PackedStream(IterableDataset[Sample]):
    """A dataset of rows of up to `room` tokens, into which a stream's examples are packed in their order."""

    def __init__(self, examples: ExampleStream, room: int) -> None:
        self._examples, self._room = examples, room

    def __iter__(self) -> Iterator[Sample]:
        row: list[Sample] = []
        left = self._room
        for one in self._examples:
            if len(one["labels"]) > left:
                yield pack_samples(row)
                row, left = [], self._room
            row.append(one)
            left -= len(one["labels"])
        if row:
            yield pack_samples(row)


class Pack:
    """A `collate_fn` that makes a batch of packed rows: `input_ids`, `labels` and `position_ids`, int64, (rows, length).

    There is no attention mask. Without one, models of transformers separate examples where positions start again from 0. The
    padding of a shorter row is one more such example, which does not count in the loss.

    Args:
        token: the padding token.
        flat: whether to concatenate all rows into one row, which flash attention requires.
    """

    def __init__(self, token: int, *, flat: bool = False) -> None:
        self._token, self._flat = token, flat

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        if self._flat:
            return {name: torch.cat([one[name] for one in samples])[None] for name in samples[0]}
        longest = max(len(one["labels"]) for one in samples)
        positions = [torch.cat([one["position_ids"], torch.arange(longest - len(one["position_ids"]))]) for one in samples]
        return {
            "input_ids": pad_rows([one["input_ids"] for one in samples], self._token),
            "labels": pad_rows([one["labels"] for one in samples], IGNORED_LABEL),
            "position_ids": torch.stack(positions),
        }


@torch.no_grad()
def check_kept_apart(model: nn.Module) -> None:
    """Check, by running the model, that packed examples give the same logits as each example alone.

    Raises:
        ConfigError: the logits differ, or the model does not take positions.
    """
    modes = [(module, module.training) for module in model.modules()]
    weight = next(model.parameters())
    most = model.get_input_embeddings().num_embeddings - 1  # type: ignore[operator]  # mypy does not know that the model is one of transformers
    ids = torch.arange(1, 8, device=weight.device).clamp(max=most)[None]
    positions = torch.arange(7, device=weight.device).repeat(2)[None]

    def logits(*examples: Tensor, **more: Any) -> Tensor:
        return model(input_ids=torch.cat(examples, dim=1), use_cache=False, **more).logits[:, -7:].float()  # type: ignore[no-any-return]

    try:
        model.eval()
        alone = logits(ids)
        behind, behind_another = (logits(first, ids, position_ids=positions) for first in (ids, ids.flip(1)))
        largest = alone.abs().max().clamp(min=1e-12)
        leak, shift = (float((given - behind).abs().max() / largest) for given in (behind_another, alone))
        of_one, of_several = _LOGIT_TOLERANCES[weight.dtype == torch.float32]
        why = (
            "attends from one example to another"
            if leak > of_one
            else "does not restart its positions"
            if shift > of_several
            else ""
        )
    except TypeError:
        why = "takes no position_ids"
    finally:
        for module, training in modes:
            module.training = training
    if why:
        raise ConfigError(f"packing: true does not work with {type(model).__name__}, which {why}; give packing: false")
