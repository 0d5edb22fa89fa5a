from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from callsheet import Trainer
from callsheet.callbacks.memory_snapshot import MemorySnapshot
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks


def fit(folder: Path | str, *callbacks: MemorySnapshot) -> list[list[float]]:
    torch.manual_seed(0)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        [(torch.ones(2, 2), torch.ones(2, 1))] * 6,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        callbacks=callbacks,
        runs_folder=folder,
        run_name="run",
        device="cpu",
    ) as trainer:
        trainer.fit()
    return [parameter.flatten().tolist() for parameter in trainer.model.parameters()]


def test_without_a_device_it_warns_once_and_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = fit(tmp_path / "plain")
    other = MemorySnapshot(skip_batches=3)
    other.name = "later"
    with caplog.at_level(logging.WARNING, "callsheet"):
        assert fit(tmp_path, MemorySnapshot(), other) == plain
    assert [record.getMessage() for record in caplog.records if "no CUDA device" in record.getMessage()] == [
        "MemorySnapshot: there is no CUDA device, so nothing is recorded",
        "later: there is no CUDA device, so nothing is recorded",
    ]
    assert not (tmp_path / "run").exists()


def on_ranks(folder: str) -> list[list[float]]:
    return fit(folder, MemorySnapshot(ranks={1}))


def test_a_snapshot_on_one_of_two_ranks_keeps_their_weights_equal(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path))
    assert first == second


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="interval=0"):
        MemorySnapshot(interval=0)
    with pytest.raises(ConfigError, match="stacks='c'"):
        MemorySnapshot(stacks="c")  # type: ignore[arg-type]  # the mistake that is tested
