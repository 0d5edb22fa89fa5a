"""A callback that is muted until a step is told from that step on, wherever records and other boundaries lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer, attach

STEPS, WANTED = 130, 50


class Pauses(Callback):
    """Looks at every fiftieth step."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def on_forward_end(self, ctx: Context) -> None:
        self.told.append(ctx.step)
        if ahead := -ctx.step % WANTED:
            ctx.mute(self, "on_forward_end", until=ctx.step + ahead)


class Counts(Callback):
    """Hears every step, so that steps are told in any case."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps += 1


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(STEPS)]


def in_the_trainer(manager: CallbackManager, folder: Path, log_interval: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"max_duration": f"{STEPS}ba", "device": "cpu", "runs_folder": folder}
    with Trainer(
        model, nn.functional.mse_loss, batches(), optimizer=optimizer, callbacks=manager, log_interval=log_interval, **options
    ) as trainer:
        trainer.fit()


def in_a_loop_by_hand(manager: CallbackManager, folder: Path, log_interval: str) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(model=model, optimizer=optimizer, callbacks=manager, log_interval=log_interval, runs_folder=folder) as run:
        for inputs, targets in run.steps(batches()):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("costs", ["sampled", "off"])
@pytest.mark.parametrize("log_interval", ["7ba", "1000ba"])
@pytest.mark.parametrize("train", [in_the_trainer, in_a_loop_by_hand])
def test_a_pause_ends_at_its_step(train: Any, log_interval: str, costs: str, tmp_path: Path) -> None:
    pauses, counts = Pauses(), Counts()
    train(CallbackManager([pauses, counts], costs=costs), tmp_path, log_interval)
    assert pauses.told == [1, 50, 51, 100, 101]
    assert counts.steps == STEPS
