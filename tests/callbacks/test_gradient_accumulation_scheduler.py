from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, CallbackSpec, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks

BATCHES = [(torch.randn(2, 3, generator=torch.Generator().manual_seed(i)), torch.ones(2, 1)) for i in range(8)]


class Counts(Callback):
    """Counts the batches that each step fetches, and records its gradient."""

    def __init__(self) -> None:
        self.fetched = 0
        self.steps: list[tuple[int, int]] = []
        self.gradients: list[list[float]] = []
        self.foretold: list[tuple[int, int | None]] = []

    def on_fetch_end(self, ctx: Context) -> None:
        self.fetched += ctx.batch is not None

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps.append((ctx.epoch, self.fetched))
        self.gradients.append(ctx.model.weight.grad.flatten().tolist())
        self.foretold.append((ctx.epoch, ctx.state.epoch_batches))
        self.fetched = 0


def fit(folder: Path, *callbacks: Callback, **options: Any) -> tuple[Counts, list[float]]:
    torch.manual_seed(2)
    counts = Counts()
    with Trainer(
        nn.Linear(3, 1),
        nn.functional.mse_loss,
        BATCHES,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks=CallbackManager([*callbacks, counts], checking=True),
        runs_folder=folder,
        device="cpu",
        **({"max_duration": "4ep", "run_name": "run"} | options),
    ) as trained:
        trained.fit()
    return counts, trained.model.weight.flatten().tolist()  # type: ignore[operator]


def by_epoch(counts: Counts) -> dict[int, list[int]]:
    return {epoch: [fetched for at, fetched in counts.steps if at == epoch] for epoch, _ in counts.steps}


def test_steps_take_the_scheduled_number_of_batches_from_each_epoch_on(tmp_path: Path) -> None:
    counts, _ = fit(tmp_path, GradientAccumulationScheduler(schedule={4: 1, 2: 3}), gradient_accumulation_steps=2)
    assert by_epoch(counts) == {1: [2] * 4, 2: [3, 3, 2], 3: [3, 3, 2], 4: [1] * 8}
    assert set(counts.foretold) == {(1, 4), (2, 3), (3, 3), (4, 8)}


def test_the_step_equals_that_of_the_larger_batch(tmp_path: Path) -> None:
    counts, _ = fit(tmp_path, GradientAccumulationScheduler(schedule={1: 8}), max_duration="1ep")
    torch.manual_seed(2)
    model = nn.Linear(3, 1)
    inputs, targets = (torch.cat(parts) for parts in zip(*BATCHES, strict=True))
    nn.functional.mse_loss(model(inputs), targets).backward()
    assert model.weight.grad is not None
    assert counts.gradients == [pytest.approx(model.weight.grad.flatten().tolist())]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def scheduler() -> GradientAccumulationScheduler:
        return GradientAccumulationScheduler(schedule={2: 3, 4: 2})

    whole, weights = fit(tmp_path, scheduler(), CheckpointSaver(save_interval="1ba", keep=None))
    found = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert len(found) == len(whole.steps)
    for checkpoint in found:
        counts, last = fit(tmp_path, scheduler(), resume=checkpoint.path, run_name=f"from{checkpoint.step}")
        assert last == weights
        assert counts.steps == whole.steps[checkpoint.step :]


@pytest.mark.parametrize("schedule", [{}, {0: 1}, {1: 0}, {1: 2.5}, {True: 1}, {"one": 2}, [1, 2]])
def test_rejects_bad_arguments(schedule: Any) -> None:
    with pytest.raises(ConfigError, match="schedule"):
        GradientAccumulationScheduler(schedule=schedule)


def test_it_can_be_built_from_json_whose_keys_are_strings(tmp_path: Path) -> None:
    written = json.loads(json.dumps(CallbackSpec.of(GradientAccumulationScheduler(schedule={1: 1, 2: 3})).to_dict()))
    built = CallbackSpec.from_dict(written).build()
    counts, _ = fit(tmp_path, built, max_duration="2ep")
    assert by_epoch(counts) == {1: [1] * 8, 2: [3, 3, 2]}


def on_a_rank(folder: str) -> dict[int, list[int]]:
    assert os.environ["WORLD_SIZE"] == "2"
    counts, _ = fit(Path(folder), GradientAccumulationScheduler(schedule={2: 3}), max_duration="2ep")
    return by_epoch(counts)


def test_two_ranks_take_the_same_number_of_batches(tmp_path: Path) -> None:
    assert run_ranks(on_a_rank, 2, str(tmp_path)) == [{1: [1] * 4, 2: [3, 1]}] * 2
