from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import system_metrics_monitor
from callsheet.callbacks.system_metrics_monitor import SystemMetricsMonitor
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks


class Busy(Callback):
    """Is idle until step 4, then computes and sends data, on one rank."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def on_train_step_start(self, ctx: Context) -> None:
        until = time.monotonic() + 0.05
        if ctx.step <= 4 or ctx.run.rank != self.rank:
            time.sleep(0.05)
            return
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            while time.monotonic() < until:
                sender.sendto(b"x" * 10_000, ("127.0.0.1", 9))


class Records(Callback):
    phase = "report"

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def on_log(self, ctx: Context) -> None:
        self.records.append({name: value for name, value in ctx.record.values.items() if name.startswith("system")})


def fit(folder: Path | str, *callbacks: Callback) -> list[dict[str, float]]:
    records = Records()
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        [(torch.ones(2, 2), torch.ones(2, 1))] * 16,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=[*callbacks, records],
        runs_folder=folder,
        log_interval="4ba",
        device="cpu",
    ) as trainer:
        trainer.fit()
    return records.records


def test_logs_the_activity_of_process_and_machine_since_the_last_record(tmp_path: Path) -> None:
    idle, busy, *_ = fit(tmp_path, Busy(), SystemMetricsMonitor(seconds=0))
    assert 2 * idle["system/process_cpu_percent"] < busy["system/process_cpu_percent"]
    assert busy["system/network_sent_per_second"] > 1e6 + idle["system/network_sent_per_second"]
    assert 0 < busy["system/memory_percent"] < 100
    assert 0 < busy["system/disk_used_percent"] < 100
    assert busy["system/memory_used"] > 1e8
    assert not [name for name in idle if "gpu" in name]


class Clock(Callback):
    """A clock for the monitor that advances by 0.05 s per step, independently of the machine's load."""

    seconds = 1.0

    def on_train_step_start(self, ctx: Context) -> None:
        self.seconds += 0.05

    def monotonic(self) -> float:
        return self.seconds


def test_measures_at_the_first_record_and_then_at_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(system_metrics_monitor, "time", clock)
    first, *rest = fit(tmp_path, clock, Busy(), SystemMetricsMonitor(seconds=0.35))  # records are 0.2 s apart
    assert rest[0] == first
    assert rest[1] != first
    assert rest[2] == rest[1]


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="seconds=-1"):
        SystemMetricsMonitor(seconds=-1)


def test_two_instances_work_in_one_run(tmp_path: Path) -> None:
    other = SystemMetricsMonitor()
    other.name = "system/again"
    names = set(fit(tmp_path, SystemMetricsMonitor(), other)[0])
    assert {"system/cpu_percent", "system/again/cpu_percent"} <= names


def on_ranks(folder: str) -> list[dict[str, float]]:
    return fit(folder, Busy(rank=1), SystemMetricsMonitor(seconds=0))


def test_all_ranks_log_the_maximum(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path))
    assert first == second
    assert first[1]["system/process_cpu_percent"] > 5  # the exact value depends on the machine's load


def test_an_evaluation_without_training_logs_nothing(tmp_path: Path) -> None:
    records = Records()
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        None,
        [(torch.ones(2, 2), torch.ones(2, 1))],
        callbacks=[SystemMetricsMonitor(), records],
        runs_folder=tmp_path,
        device="cpu",
    ) as trainer:
        trainer.evaluate()
    assert records.records == [{}]


pytestmark = pytest.mark.filterwarnings("error")
