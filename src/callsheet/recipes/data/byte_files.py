"""Text files as data for a language model. Each byte is a token.

This module splits the files into datasets of fixed-length windows for training and validation. As baselines, it computes the
validation losses of a unigram and a bigram model.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from callsheet.errors import ConfigError

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages"})


@dataclass
class ByteFiles:
    """Text files in a folder as datasets of windows (sequences of bytes of a fixed length).

    Args:
        folder: the folder of the files; None is the standard library of the running Python, without its tests.
        pattern: which files in the folder and below it, such as `*.py`.
        sequence_length: the number of bytes in a window; each window is one training sample.
        validation_percent: the percentage of files for validation. The name of a file decides whether the file is one of them, so
            the split is always the same.
        test_percent: the percentage of files for the test after training.
        validation_windows: the maximum number of windows for validation, and also for the test. The windows are spread evenly
            over the files.

    Raises:
        ConfigError: an argument is invalid.
    """

    folder: str | None = None
    pattern: str = "*.py"
    sequence_length: int = 128
    validation_percent: int = 5
    test_percent: int = 5
    validation_windows: int = 640

    def __post_init__(self) -> None:
        held_out = self.validation_percent + self.test_percent
        if not (self.validation_percent > 0 and self.test_percent > 0 and held_out < 100):
            raise ConfigError(
                f"data.validation_percent={self.validation_percent}, data.test_percent={self.test_percent}: give each more than 0, "
                "and together less than 100"
            )
        if self.sequence_length < 2 or self.validation_windows < 1:
            raise ConfigError("data.sequence_length must be 2 or more, and data.validation_windows 1 or more")

    @cached_property
    def root(self) -> Path:
        """The folder with the text files."""
        return Path(self.folder if self.folder is not None else sysconfig.get_path("stdlib"))

    @cached_property
    def files(self) -> tuple[list[Path], list[Path], list[Path]]:
        """The files, as three lists: for training, for validation and for the test.

        Raises:
            ConfigError: the folder does not exist, or one of the lists would be empty.
        """
        if not self.root.is_dir():
            raise ConfigError(f"data.folder: there is no folder {self.root}")
        found = [
            path for path in sorted(self.root.rglob(self.pattern)) if not _TEST_FOLDERS & set(path.relative_to(self.root).parts)
        ]
        parts: tuple[list[Path], list[Path], list[Path]] = ([], [], [])
        for path in found:
            name = path.relative_to(self.root).as_posix().encode()
            draw = int.from_bytes(sha256(name).digest()[:4]) % 100
            is_test = draw < self.validation_percent + self.test_percent
            parts[1 if draw < self.validation_percent else 2 if is_test else 0].append(path)
        if not all(parts):
            raise ConfigError(
                f"data: {self.root} has {len(found)} files {self.pattern}, too few for training, validation and test"
            )
        return parts

    @cached_property
    def train_bytes(self) -> NDArray[np.uint8]:
        """The bytes of all training files, concatenated."""
        return _read(self.files[0])

    @cached_property
    def validation_bytes(self) -> NDArray[np.uint8]:
        """The bytes of all validation files, concatenated."""
        return _read(self.files[1])

    def train(self) -> Windows:
        """Return windows of the training bytes, with `input_ids` and `labels` as int64 of shape (sequence_length,)."""
        return Windows(self.train_bytes, self.sequence_length)

    def validation(self) -> Windows:
        """Return up to `validation_windows` evenly spaced windows of the validation bytes."""
        return self._evenly_spaced(self.validation_bytes)

    def test(self) -> Windows:
        """Return up to `validation_windows` evenly spaced windows of the test bytes."""
        return self._evenly_spaced(_read(self.files[2]))

    def about(self) -> str:
        """Return a short description of the data."""
        held_out = f"{len(self.validation_bytes) / 1e6:.1f} MB held out"
        return f"{len(self.train_bytes) / 1e6:.1f} MB of {self.pattern} in {self.root}, {held_out}"

    def _evenly_spaced(self, data: NDArray[np.uint8]) -> Windows:
        step = max(1, len(data) // self.sequence_length // self.validation_windows)
        return Windows(data, self.sequence_length, step=step, most=self.validation_windows)

    def baselines(self) -> tuple[float, float]:
        """Return the validation losses of a unigram model and a bigram model, counted on the training bytes, in nats per byte.

        The models count bytes and pairs of bytes. Counts start from one (Laplace's rule), so that no byte has probability 0.
        """
        train, validation = self.train_bytes.astype(np.int64), self.validation_bytes.astype(np.int64)
        single = np.bincount(train, minlength=256) + 1.0
        pairs = np.bincount(train[:-1] * 256 + train[1:], minlength=65536).reshape(256, 256) + 1.0
        unigram = -np.log(single / single.sum())[validation].mean()
        bigram = -np.log(pairs / pairs.sum(axis=1, keepdims=True))[validation[:-1], validation[1:]].mean()
        return float(unigram), float(bigram)


class Windows(Dataset[dict[str, Tensor]]):
    """A dataset that cuts a token sequence into windows of `length` tokens. It has every `step`-th window, up to `most` windows."""

    def __init__(self, data: NDArray[Any], length: int, *, step: int = 1, most: int | None = None) -> None:
        self._starts = range(0, len(data) - length + 1, length * step)[:most]
        self._data = data
        self._length = length

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = self._starts[index]
        window = torch.from_numpy(self._data[start : start + self._length].astype(np.int64))
        return {"input_ids": window, "labels": window}


def _read(files: list[Path]) -> NDArray[np.uint8]:
    return np.concatenate([np.frombuffer(path.read_bytes() + b"\n", dtype=np.uint8) for path in files])
