"""Arguments and state that must be the same on all ranks are compared, and differences are rejected on all ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.errors import CheckpointError, ConfigError
from callsheet.testing import run_ranks


def trainer_of(folder: str, **changes: Any) -> Trainer:
    width = changes.pop("width", 4)
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "run_name": "same",
        "runs_folder": folder,
        "timeout_seconds": 6.0,
    }
    data = [(torch.ones(2, 3), torch.ones(2, 1))] * 12
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    return Trainer(model, nn.functional.mse_loss, data, **(arguments | changes))


DIFFERING: dict[str, tuple[Any, Any]] = {
    "run_name": ("one", "another"),
    "log_interval": ("5ba", "10ba"),
    "gradient_accumulation_steps": (1, 2),
    "precision": ("fp32", "bf16"),
    "seed": (1, None),
    "max_duration": ("1ep", "2ep"),
}


def rejected(folder: str) -> list[tuple[str, bool]]:
    rank, recorded = int(os.environ["RANK"]), []
    for name, values in DIFFERING.items():
        try:
            trainer_of(folder, **{name: values[rank]})
        except ConfigError as error:
            recorded.append((str(error), distributed.is_initialized()))
    try:
        trainer_of(folder, callbacks=[CheckpointSaver()] if rank == 0 else [])
    except ConfigError as error:
        recorded.append((str(error), distributed.is_initialized()))
    return recorded


def test_arguments_that_differ_are_rejected_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(rejected, 2, str(tmp_path))
    assert first == second
    assert [message.partition(" is ")[0] for message, _ in first] == [*DIFFERING, "callbacks that need all ranks"]
    assert "log_interval is '10ba' on rank 1, and '5ba' on rank 0; give the same on every rank" in first[1][0]
    assert not any(is_left for _, is_left in first)  # the process groups are gone


def misfit(folder: str) -> list[str]:
    with trainer_of(folder, callbacks=[CheckpointSaver()]) as trainer:
        trainer.fit()
    found = []
    for resume in ("auto", f"{folder}/same/checkpoints/ep1-ba6"):
        try:
            trainer_of(folder, resume=resume, width=5)
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_another_model_is_rejected_on_all_ranks_and_nothing_is_lost(tmp_path: Path) -> None:
    first, second = run_ranks(misfit, 2, str(tmp_path))
    assert len(first) == len(second) == 2
    for recorded in (*first, *second):
        assert "weight '0.weight' has the size [4, 3], and this model's has the size [5, 3]" in recorded
    assert (tmp_path / "same" / "checkpoints" / "ep1-ba6" / "manifest.json").exists()


class StopsSlowly(Callback):
    """Takes longer for a step than the ranks need to agree; one rank requests a stop at step 3."""

    def on_train_step_end(self, ctx: Context) -> None:
        time.sleep(0.25)
        if ctx.step == 3 and ctx.run.rank == 1:
            ctx.control.stop("enough")


def stopped_slowly(folder: str) -> int:
    with trainer_of(folder, callbacks=[StopsSlowly()]) as trainer:
        trainer.fit()
        return trainer.state.timestamp.batch


def test_a_request_in_a_slow_step_acts_at_its_end(tmp_path: Path) -> None:
    """If steps are slow, the ranks agree at the same step: this costs less than another step."""
    assert run_ranks(stopped_slowly, 2, str(tmp_path)) == [3, 3]


class StopsAlone(Callback):
    """Requests a stop as `replicated` (made by all ranks) on one rank only."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 3 and ctx.run.rank == 0:
            ctx.control.stop("by mistake", replicated=True)


def stopped_alone(folder: str) -> str:
    with pytest.raises(RuntimeError) as caught:
        trainer_of(folder, callbacks=[StopsAlone()]).fit()
    return " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.test_all
def test_ranks_that_wait_in_different_places_say_where(tmp_path: Path) -> None:
    for recorded in run_ranks(stopped_alone, 2, str(tmp_path)):
        assert "replicated=True" in recorded or "not at the same step" in recorded, recorded
