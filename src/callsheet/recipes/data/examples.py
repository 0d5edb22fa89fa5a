"""Datasets of tokenized examples, made from the rows of a table or of a stream.

The rows of a table are tokenized at the start; the rows of a stream are tokenized when they are read. No example exceeds the length limit.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from callsheet.core.callback import one_of
from callsheet.errors import ConfigError
from callsheet.recipes.data.conversations import Encode, Example
from callsheet.recipes.data.tables import Stream, Table, reject
from callsheet.trainer.tasks import IGNORED_LABEL

logger = logging.getLogger("callsheet")

TooLong = Literal["reject", "truncate", "drop"]
TOO_LONG: tuple[TooLong, ...] = get_args(TooLong)

Sample = dict[str, Tensor]


class Fit:
    """Cuts, drops or rejects examples that have more than `longest` tokens. Rejects examples without a target token.

    A target token is a token that counts in the loss.

    Attributes:
        truncated: how many examples were cut.
        dropped: how many examples were left out.
    """

    def __init__(self, longest: int, too_long: TooLong) -> None:
        one_of("too_long", too_long, TOO_LONG)
        self.longest = longest
        self.truncated = self.dropped = 0
        self._too_long = too_long

    def __call__(self, example: Example, place: str) -> Example | None:
        """Return the example, or the example cut to `longest` tokens; None if the example is left out.

        Raises:
            ConfigError: the example is too long and `too_long` is `reject`, or it has no target token; the message names the place.
        """
        if len(example.ids) > self.longest:
            if self._too_long == "reject":
                reject(
                    place,
                    f"it has {len(example.ids)} tokens, more than the sequence_length of {self.longest}; give more (as many as the "
                    "model takes), or too_long: truncate or drop",
                )
            example = Example(example.ids[: self.longest], example.is_target[: self.longest])
            if self._too_long == "drop" or not any(example.is_target[1:]):
                self.dropped += 1
                return None
            self.truncated += 1
        if not any(example.is_target[1:]):  # the first token does not count, since no logits predict it
            reject(place, "it has no token of an answer, so there is nothing to learn; leave it out")
        return example

    def __str__(self) -> str:
        counts = {"truncated": self.truncated, "left out": self.dropped}
        return "".join(f", {count} longer than {self.longest} tokens {what}" for what, count in counts.items() if count)


class Examples(Dataset[Sample]):
    """A dataset of a table's rows, which are checked and tokenized at the start, and kept in memory (five bytes per token)."""

    def __init__(self, rows: Table, encode: Encode, fit: Fit) -> None:
        ids, is_target, ends = array("i"), array("b"), array("q", [0])
        began, has_logged = time.monotonic(), False
        for index in range(len(rows)):
            place = rows.place(index)
            if (example := fit(encode(rows[index], place), place)) is not None:
                ids.extend(example.ids)
                is_target.extend(example.is_target)
                ends.append(len(ids))
            if not has_logged and time.monotonic() - began > 10:
                has_logged = True
                logger.info(
                    "tokenized %d of %d rows; streaming: true tokenizes them during training instead", index + 1, len(rows)
                )
        if len(ends) == 1:
            raise ConfigError(f"{rows.place(0)} and all further rows are too long{fit}; give a longer sequence_length")
        self.ids = np.frombuffer(ids, dtype=np.int32)
        self.is_target = np.frombuffer(is_target, dtype=np.bool_)
        self._ends = np.frombuffer(ends, dtype=np.int64)

    @property
    def lengths(self) -> Sequence[int]:
        """The number of tokens of each example."""
        lengths: list[int] = np.diff(self._ends).tolist()
        return lengths

    @property
    def starts(self) -> Any:
        """The index in `ids` at which each example begins."""
        return self._ends[:-1]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Sample:
        here = slice(self._ends[index], self._ends[index + 1])
        return sample(self.ids[here], self.is_target[here])


class ExampleStream(IterableDataset[Sample]):
    """A dataset of a stream's rows, which are tokenized as they are read. Reading a row that cannot be used raises an error."""

    def __init__(self, rows: Stream, encode: Encode, fit: Fit) -> None:
        self._rows, self._encode, self._fit = rows, encode, fit

    def __iter__(self) -> Iterator[Sample]:
        for place, row in self._rows.places():
            if (example := self._fit(self._encode(row, place), place)) is not None:
                yield sample(np.array(example.ids), np.array(example.is_target))


def sample(ids: Any, is_target: Any) -> Sample:
    """Make a sample from an example: the tensors `input_ids` and `labels`, int64 of shape (length,).

    The labels of the first token, and of tokens that are not targets, are ignored by the loss.
    """
    tokens = torch.from_numpy(ids.astype(np.int64))
    targets = torch.from_numpy(is_target.copy())
    targets[0] = False
    return {"input_ids": tokens, "labels": torch.where(targets, tokens, IGNORED_LABEL)}
