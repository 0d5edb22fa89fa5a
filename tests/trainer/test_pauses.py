"""A callback that is muted until a step is called from that step on, wherever log boundaries and other boundaries are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer, attach

STEPS, WANTED = 130, 50


class Pauses(Callback):
    """Records every 50th step and mutes itself between."""

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def on_forward_end(self, ctx: Context) -> None:
        self.recorded.append(ctx.step)
        if ahead := -ctx.step % WANTED:
            ctx.mute(self, "on_forward_end", until=ctx.step + ahead)


class Counts(Callback):
    """Listens to every step, so that the events of steps are always fired."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps += 1


class PausesBetweenEpochs(Callback):
    """Mutes itself at each epoch's end for the next 30 steps."""

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.recorded.append(ctx.step)

    def on_epoch_end(self, ctx: Context) -> None:
        ctx.mute(self, "on_train_step_end", until=ctx.step + 31)


class PausesBetweenSaves(Callback):
    """Requests a checkpoint every 60 steps, and mutes itself between."""

    def __init__(self) -> None:
        self.recorded: list[int] = []

    def on_checkpoint_due(self, ctx: Context) -> None:
        if ctx.boundary == "step":
            self.recorded.append(ctx.step)
            ctx.control.save("it is time", replicated=True)
            ctx.mute(self, "on_checkpoint_due", until=ctx.step + 60)


def batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(count)]


def in_the_trainer(manager: CallbackManager, folder: Path, log_interval: str, *, epochs: int = 1, steps: int = STEPS) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"max_duration": f"{epochs}ep", "device": "cpu", "runs_folder": folder}
    with Trainer(
        model,
        nn.functional.mse_loss,
        batches(steps),
        optimizer=optimizer,
        callbacks=manager,
        log_interval=log_interval,
        **options,
    ) as trainer:
        trainer.fit()


def in_a_loop_by_hand(manager: CallbackManager, folder: Path, log_interval: str, *, epochs: int = 1, steps: int = STEPS) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(model=model, optimizer=optimizer, callbacks=manager, log_interval=log_interval, runs_folder=folder) as run:
        for _ in run.epochs(epochs):
            for inputs, targets in run.steps(batches(steps)):
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("costs", ["sampled", "off"])
@pytest.mark.parametrize("log_interval", ["7ba", "1000ba"])
@pytest.mark.parametrize("train", [in_the_trainer, in_a_loop_by_hand])
def test_a_pause_ends_at_its_step(train: Any, log_interval: str, costs: Any, tmp_path: Path) -> None:
    pauses, counts = Pauses(), Counts()
    train(CallbackManager([pauses, counts], costs=costs), tmp_path, log_interval)
    assert pauses.recorded == [1, 50, 51, 100, 101]
    assert counts.steps == STEPS


@pytest.mark.parametrize("train", [in_the_trainer, in_a_loop_by_hand])
def test_a_pause_that_begins_between_epochs_ends(train: Any, tmp_path: Path) -> None:
    pauses = PausesBetweenEpochs()
    train(CallbackManager([pauses], costs="off"), tmp_path, "1000ba", epochs=3, steps=60)
    assert pauses.recorded == [*range(1, 61), *range(91, 121), *range(151, 181)]


@pytest.mark.parametrize("train", [in_the_trainer, in_a_loop_by_hand])
def test_a_pause_that_begins_with_a_request_ends(train: Any, tmp_path: Path) -> None:
    pauses = PausesBetweenSaves()
    train(CallbackManager([pauses], costs="off"), tmp_path, "1000ba", steps=150)
    assert pauses.recorded == [1, 61, 121]  # after the first step whose start it receives


class MutesAfterOneEvaluation(Callback):
    def __init__(self) -> None:
        self.recorded = 0

    def on_eval_end(self, ctx: Context) -> None:
        self.recorded += 1
        ctx.mute(self, "on_eval_end")


def test_a_callback_can_mute_itself_in_an_evaluation_of_a_loop_by_hand(tmp_path: Path) -> None:
    model, once = nn.Linear(3, 1), MutesAfterOneEvaluation()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(model=model, optimizer=optimizer, callbacks=[once], runs_folder=tmp_path) as run:
        for inputs, targets in run.steps(batches(4)):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(2):
            run.evaluated({"validation": {"loss": 1.0}})
    assert once.recorded == 1
