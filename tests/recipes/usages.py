"""The small job that the tests of usages train. Each test is one usage that the documentation of another system shows.

A test expects what the page describes, unless a comment says what callsheet does differently, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from callsheet import Callback, Context, Trainer

DATA = [(torch.full((4, 2), 0.5 + step), torch.ones(4, 1)) for step in range(3)]


def train(callbacks: Any = None, **changes: Any) -> Trainer:
    """Train for two epochs of three steps, with a record per step and an evaluation per epoch."""
    torch.manual_seed(0)
    arguments: dict[str, Any] = {
        "eval_dataloader": DATA[:2],
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        "max_duration": "2ep",
        "log_interval": "1ba",
        "device": "cpu",
    }
    with Trainer(nn.Linear(2, 1), nn.functional.mse_loss, DATA, callbacks=callbacks, **(arguments | changes)) as trainer:
        trainer.fit()
    return trainer


class Threshold(Callback):
    """A callback with arguments and a state that are sent to the ranks."""

    def __init__(self, threshold: float, *, words: list[str]) -> None:
        self.threshold, self.words = threshold, words
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]

    def on_train_step_end(self, ctx: Context) -> None:
        self.seen += 1
