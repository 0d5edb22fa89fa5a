"""What every loop trains: the same small models, on the same data, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback
from callsheet.testing.small_run import SmallModel

EMPTY = "empty"
"""Given instead of callbacks: one empty callback of the framework, with the hooks of the host."""

Given = Sequence[Callback] | str | None
"""The callbacks that are hosted; `EMPTY`; or None, for the framework alone."""


@dataclass(frozen=True)
class Job:
    """A model and its data: 24 rows for training, in batches of 4, not shuffled, so 6 steps an epoch, and 12 for validation.

    A loop trains with `torch.optim.AdamW(lr=0.02)`, makes a record every `log_every` steps, and evaluates after each epoch if its
    framework does that, under its own name for the validation set. It sets `torch.manual_seed(3)` when model and data are made and
    training begins, so that a run with callbacks and one without are the same to the last bit.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    train: TensorDataset
    validation: TensorDataset
    log_every: int = 2
    """Steps between two records."""

    def made_model(self) -> nn.Module:
        """Return the model, with the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return self.model()

    def batches(self, *, steps_an_epoch: int = 6) -> DataLoader[tuple[Tensor, ...]]:
        """One epoch of (inputs, targets)."""
        repeated = -(-steps_an_epoch // 6)
        data = torch.utils.data.ConcatDataset([self.train] * repeated) if repeated > 1 else self.train
        return DataLoader(data, batch_size=4)

    def validation_batches(self) -> DataLoader[tuple[Tensor, ...]]:
        """Three batches of (inputs, targets)."""
        return DataLoader(self.validation, batch_size=4)


class TrainFunction(Protocol):
    """`train` of a loop. It trains and returns the model; files are written to `folder`.

    `epochs` of `steps_an_epoch` (6, or a multiple of it: the benchmark makes long ones). With `evaluate` False nothing is evaluated.
    """

    def __call__(
        self,
        job: Job,
        folder: Path,
        callbacks: Given,
        *,
        strict: bool = True,
        epochs: int = 2,
        steps_an_epoch: int = 6,
        evaluate: bool = True,
    ) -> nn.Module: ...


def _points() -> tuple[TensorDataset, TensorDataset]:
    inputs = torch.randn(36, 4, generator=torch.Generator().manual_seed(7))
    whole = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return TensorDataset(*whole[:24]), TensorDataset(*whole[24:])


POINTS = Job(SmallModel, nn.functional.mse_loss, *_points())
"""Four numbers to one."""


class Convolution(nn.Module):
    """Images to a mask of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.relu(self.body(images)))
        return outputs


def _pixels() -> tuple[TensorDataset, TensorDataset]:
    inputs = torch.rand(36, 3, 6, 8, generator=torch.Generator().manual_seed(7))
    whole = TensorDataset(inputs, (inputs[:, 0] > 0.5).long())
    return TensorDataset(*whole[:24]), TensorDataset(*whole[24:])


IMAGES = Job(Convolution, nn.functional.cross_entropy, *_pixels())
"""Images to masks."""


class Language(nn.Module):
    """Tokens to the next ones, from the last alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(257, 8)
        self.head = nn.Linear(8, 257)

    def forward(self, ids: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(ids))
        return outputs

    def generate(self, ids: Tensor, *, max_new_tokens: int, do_sample: bool, temperature: float = 1.0) -> Tensor:
        """The likeliest continuation, or one that is drawn."""
        for _ in range(max_new_tokens):
            logits = self(ids)[:, -1] / temperature
            drawn = torch.multinomial(logits.softmax(-1), 1) if do_sample else logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, drawn], 1)
        return ids


def _tokens() -> tuple[TensorDataset, TensorDataset]:
    ids = torch.randint(0, 256, (36, 6), generator=torch.Generator().manual_seed(7))
    whole = TensorDataset(ids[:, :-1], ids[:, 1:])
    return TensorDataset(*whole[:24]), TensorDataset(*whole[24:])


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Logits of shape (batch, tokens, 257), targets of shape (batch, tokens)."""
    return nn.functional.cross_entropy(outputs.transpose(1, 2), targets)


TOKENS = Job(Language, next_token_loss, *_tokens())
"""Tokens to the next ones."""
