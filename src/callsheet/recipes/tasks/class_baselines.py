"""Baselines for a classifier: the most frequent class, and naive Bayes over the bytes of a text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class ByteCounts:
    """Counts of rows and of bytes for each class, from which the baselines (the most frequent class, and naive Bayes) are computed.

    Args:
        classes: the number of classes.
    """

    def __init__(self, classes: int) -> None:
        self.rows = np.zeros(classes, dtype=np.int64)
        self.bytes = np.zeros((classes, 256), dtype=np.int64)

    def add(self, text: str, label: int) -> None:
        """Count the class and the bytes of one row's text."""
        self.rows[label] += 1
        self.bytes[label] += _histogram(text)

    def majority(self) -> int:
        """Return the index of the most frequent class."""
        return int(self.rows.argmax())

    def naive_bayes(self, texts: Iterable[str]) -> Tensor:
        """Return the most likely class of each text by naive Bayes, as int64 of shape (texts,).

        Naive Bayes assumes that the bytes of a text are independent draws from the frequencies of its class.

        Counts start from one (Laplace's rule), so that no byte has probability 0.
        """
        smoothed = self.bytes + 1.0
        each = np.log(smoothed / smoothed.sum(axis=1, keepdims=True))
        prior = np.log((self.rows + 1.0) / (self.rows.sum() + len(self.rows)))
        return torch.tensor([int((prior + each @ _histogram(text)).argmax()) for text in texts])


def _histogram(text: str) -> NDArray[np.int64]:
    return np.bincount(np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8), minlength=256).astype(np.int64)
