"""Data for pretraining a language model: the texts of rows, concatenated to one token sequence, which is cut into windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from callsheet.errors import ConfigError
from callsheet.recipes.data.byte_files import Windows
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.data.tables import Stream, Table, reject


@dataclass
class TextRows:
    """Sources of text rows for training, validation and the test.

    Args:
        train: rows to train on; may be streamed.
        validation: rows to evaluate on, by the dataset's name.
        test: rows to test on once, after training.
        column: the name of the column with the texts.
        sequence_length: the number of tokens in a window; each window is one training sample. Texts are concatenated, each
            followed by the end token, and cut into windows.

    Raises:
        ConfigError: `sequence_length` is less than 2.
    """

    train: Rows
    validation: dict[str, Rows] = field(default_factory=dict)
    test: Rows | None = None
    column: str = "text"
    sequence_length: int = 1024

    def __post_init__(self) -> None:
        if self.sequence_length < 2:
            raise ConfigError(f"rows.sequence_length={self.sequence_length}: give 2 or more tokens")

    def sets(self, tokenizer: Any) -> TextSets:
        """Return the rows as datasets of token windows.

        Args:
            tokenizer: a tokenizer of transformers.

        Returns:
            The datasets by name, as windows of `sequence_length` tokens.

        Raises:
            ConfigError: a row has no text (the message names its place), or there are not enough tokens for one window.
        """
        given = {"train": self.train, **self.validation} | ({"test": self.test} if self.test is not None else {})
        return TextSets(
            {name: rows.read([self.column]) for name, rows in given.items()}, self.column, tokenizer, self.sequence_length
        )


class TextSets:
    """Datasets of token windows, by name. Rows are tokenized at the start and kept in memory, unless they are streamed.

    In memory, a token takes four bytes.
    """

    def __init__(self, rows: Mapping[str, Table | Stream], column: str, tokenizer: Any, length: int) -> None:
        self._tokenizer = tokenizer
        self._column = column
        self.datasets: dict[str, Dataset[Any]] = {}
        self._tokens: dict[str, NDArray[np.uint32]] = {}
        for name, some in rows.items():
            if isinstance(some, Stream):
                self.datasets[name] = _StreamedWindows(some, self._ids, length)
                continue
            lines = [np.asarray(self._ids(place, row), dtype=np.uint32) for place, row in some.places()]
            self._tokens[name] = tokens = np.concatenate(lines)
            if len(tokens) < length:
                raise ConfigError(
                    f"{name} has {len(tokens)} tokens, and a window has {length}: give more rows, or a shorter sequence_length"
                )
            self.datasets[name] = Windows(tokens, length)

    def __str__(self) -> str:
        """Return a text with the size of each dataset."""
        counts = (f"{len(self._tokens[name]):,} tokens" if name in self._tokens else "a stream" for name in self.datasets)
        return "; ".join(f"{name}: {count}" for name, count in zip(self.datasets, counts, strict=True))

    def unigram(self, name: str) -> float | None:
        """Return a baseline: the cross-entropy of a dataset's tokens under the frequencies of single tokens in the training data.

        One is added to each count (Laplace's rule). Return None if this dataset or the training data is a stream.
        """
        if not {"train", name} <= self._tokens.keys():
            return None
        counts = np.bincount(self._tokens["train"], minlength=len(self._tokenizer)) + 1.0
        return float(-np.log(counts / counts.sum())[self._tokens[name]].mean())

    def _ids(self, place: str, row: Mapping[str, Any]) -> list[int]:
        text = row[self._column]
        if not isinstance(text, str):
            reject(
                place, f"the column {self._column!r} holds {type(text).__name__}, not a text; give a text, or leave the row out"
            )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        return [*ids, end] if end is not None else list(ids)


class _StreamedWindows(IterableDataset[dict[str, Tensor]]):
    """A dataset of token windows, which are cut from a stream while it is read.

    If there are several workers, each reads its own shards of the stream.
    """

    def __init__(self, rows: Stream, ids: Any, length: int) -> None:
        self._rows = rows
        self._ids = ids
        self._length = length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        waiting: list[int] = []
        for place, row in self._rows.places():
            waiting += self._ids(place, row)
            whole = len(waiting) - len(waiting) % self._length
            for start in range(0, whole, self._length):
                window = torch.tensor(waiting[start : start + self._length])
                yield {"input_ids": window, "labels": window}
            del waiting[:whole]
