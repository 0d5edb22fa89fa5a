from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.memory_monitor import MemoryMonitor
from callsheet.testing import run_ranks

BALLAST = 200_000_000


class AllocatesMemory(Callback):
    """Holds memory on one rank from step 3 to step 5."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.held: bytearray | None = None

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.run.rank == self.rank and ctx.step == 3:
            self.held = bytearray(os.urandom(1) * BALLAST)
        if ctx.step == 5:
            self.held = None


class Records(Callback):
    phase = "report"

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []
        self.own: list[int] = []

    def on_log(self, ctx: Context) -> None:
        self.records.append({name: value for name, value in ctx.record.values.items() if "memory" in name})
        self.own.append(psutil.Process().memory_info().rss)


def fit(folder: Path | str, *callbacks: Callback) -> Records:
    records = Records()
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        [(torch.ones(2, 2), torch.ones(2, 1))] * 12,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=[*callbacks, records],
        runs_folder=folder,
        log_interval="2ba",
        device="cpu",
    ) as trainer:
        trainer.fit()
    return records


def test_logs_the_memory_at_the_record_and_the_peak_since(tmp_path: Path) -> None:
    records = fit(tmp_path, MemoryMonitor(), AllocatesMemory(0)).records
    now = [record["memory/resident"] for record in records]
    peak = [record["memory/peak_resident"] for record in records]
    assert now[1] - now[0] > 0.9 * BALLAST
    assert now[1] - now[2] > 0.9 * BALLAST
    assert all(one >= now[1] for one in peak[1:])
    assert set(records[0]) == {"memory/resident", "memory/peak_resident"}  # no metrics of a device that does not exist


def test_two_instances_work_in_one_run(tmp_path: Path) -> None:
    other = MemoryMonitor()
    other.name = "memory/again"
    assert len(fit(tmp_path, MemoryMonitor(), other).records[0]) == 4


def on_ranks(folder: str) -> tuple[list[dict[str, float]], list[int]]:
    records = fit(folder, MemoryMonitor(), AllocatesMemory(1))
    return records.records, records.own


def test_all_ranks_log_the_maximum(tmp_path: Path) -> None:
    (first, own), (second, own_of_second) = run_ranks(on_ranks, 2, str(tmp_path))
    assert first == second
    assert own_of_second[1] - own[1] > 0.5 * BALLAST
    assert first[1]["memory/resident"] == pytest.approx(own_of_second[1], rel=0.05)
