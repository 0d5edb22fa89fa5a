"""The training jobs of all loops: small models and their data, the same in each framework's loop."""

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
"""Passed instead of callbacks: train with one empty callback of the framework that has the hooks of the host."""

Given = Sequence[Callback] | str | None
"""The callbacks to host, or `EMPTY`, or None for the framework without callbacks."""


@dataclass(frozen=True)
class Job:
    """A model and its data: 24 training rows in 6 batches of 4, not shuffled, and 12 validation rows.

    A loop trains with `torch.optim.AdamW(lr=0.02)`, makes a record every `log_every` steps, and evaluates after each epoch if its
    framework does so, under the framework's name for the validation set. It calls `torch.manual_seed(3)` just before training begins,
    so that runs with and without callbacks are identical to the last bit.
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
        """Return one epoch of batches (inputs, targets)."""
        repeated = -(-steps_an_epoch // 6)
        data = torch.utils.data.ConcatDataset([self.train] * repeated) if repeated > 1 else self.train
        return DataLoader(data, batch_size=4)

    def validation_batches(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return three batches (inputs, targets)."""
        return DataLoader(self.validation, batch_size=4)


class TrainFunction(Protocol):
    """The type of a loop's function `train`, which trains and returns the model. It writes its files to `folder`.

    It trains `epochs` of `steps_an_epoch` steps: 6, or a multiple of 6, as in the benchmark. If `evaluate` is False, it does not evaluate.
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
"""Regression of one number from four."""


class Convolution(nn.Module):
    """A model that maps images to masks of two classes."""

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
"""Segmentation of images."""


class Language(nn.Module):
    """A language model that predicts the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(257, 8)
        self.head = nn.Linear(8, 257)

    def forward(self, ids: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(ids))
        return outputs

    def generate(self, ids: Tensor, *, max_new_tokens: int, do_sample: bool, temperature: float = 1.0) -> Tensor:
        """Return the most likely continuation, or a sampled one."""
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
    """Return the loss of logits of shape (batch, tokens, 257) for targets of shape (batch, tokens)."""
    return nn.functional.cross_entropy(outputs.transpose(1, 2), targets)


TOKENS = Job(Language, next_token_loss, *_tokens())
"""Language modelling."""
