"""Pads sequences of different lengths, to make one batch from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from callsheet.trainer.tasks import IGNORED_LABEL


class Padding:
    """A DataLoader's `collate_fn` that pads the samples of a batch to the length of the longest.

    A sample has `input_ids`, a list or tensor of whole numbers, and optionally `labels`: either one number, or one number for each
    id. Labels for each id are padded with the label that losses ignore. The batch has `input_ids`, `attention_mask` and `labels` as
    int64, of shape (samples, longest) or (samples,).

    Args:
        pad_id: the padding token, added on the right.
    """

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the samples as one batch, padded to the length of the longest."""
        ids = [sample["input_ids"] for sample in samples]
        batch = {
            "input_ids": pad_rows(ids, self.pad_id),
            "attention_mask": pad_rows([torch.ones(len(one), dtype=torch.int64) for one in ids], 0),
        }
        if "labels" in samples[0]:
            labels = [sample["labels"] for sample in samples]
            batch["labels"] = torch.tensor(labels) if isinstance(labels[0], int) else pad_rows(labels, IGNORED_LABEL)
        return batch


def pad_rows(rows: Iterable[Sequence[int] | Tensor], value: int) -> Tensor:
    """Stack rows of different lengths into an int64 tensor, and pad shorter rows at the end."""
    tensors = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
