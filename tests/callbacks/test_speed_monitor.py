from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, ConfigError, Context, Trainer
from callsheet.callbacks import SpeedMonitor
from callsheet.trainer import Task


class Records(Callback):
    """Keeps every record, with the timestamp that it was told at."""

    phase = "report"

    def __init__(self) -> None:
        self.records: list[tuple[int, float, dict[str, float]]] = []

    def on_log(self, ctx: Context) -> None:
        speeds = {name: value for name, value in ctx.record.values.items() if name.startswith("throughput")}
        self.records.append((ctx.step, ctx.state.timestamp.seconds, speeds))


class SaveAndStop(Callback):
    """Saves and stops at a step."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 5:
            ctx.control.save("to resume")
            ctx.control.stop("to resume")


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Records:
    records = Records()
    data = [(torch.ones(4, 2), torch.ones(4, 1))] * 12
    with Trainer(
        nn.Linear(2, 1),
        lambda outputs, targets: (outputs.sum() - targets.sum()) ** 2,
        data,
        data[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=[records, *callbacks],
        runs_folder=folder,
        run_name="run",
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return records


def test_the_rates_are_over_the_window_and_in_the_record_that_ends_it(tmp_path: Path) -> None:
    records = fit(tmp_path, SpeedMonitor(window_size=4), log_interval="2ba", eval_interval=None).records
    at = {0: 0.0, **{step: seconds for step, seconds, _ in records}}
    assert [step for step, _, _ in records] == [2, 4, 6, 8, 10, 12]
    for step, seconds, speeds in records:
        window = min(step, 4)
        rate = window / (seconds - at[step - window])
        assert speeds["throughput/batches_per_second"] == pytest.approx(rate)
        assert speeds["throughput/samples_per_second"] == pytest.approx(4 * rate)
        assert speeds["throughput/device/samples_per_second"] == pytest.approx(4 * rate)
        assert "throughput/tokens_per_second" not in speeds  # nothing here is a token


def test_tokens_are_told_where_they_are_counted(tmp_path: Path) -> None:
    class Tokens(Task):
        def forward(self, model: nn.Module, batch: Any) -> Any:
            return model(batch["input_ids"].float())

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs.sum()

    records = Records()
    with Trainer(
        nn.Linear(5, 1),
        Tokens(),
        [{"input_ids": torch.ones(2, 5, dtype=torch.long)}] * 4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=[SpeedMonitor(), records],
        runs_folder=tmp_path,
        log_interval="4ba",
        device="cpu",
    ) as trainer:
        trainer.fit()
    ((_, seconds, speeds),) = records.records
    assert speeds["throughput/tokens_per_second"] == pytest.approx(40 / seconds)
    assert speeds["throughput/samples_per_second"] == pytest.approx(8 / seconds)


def test_a_window_shorter_than_the_log_interval_is_that_interval(tmp_path: Path) -> None:
    records = fit(tmp_path, SpeedMonitor(window_size=1), log_interval="6ba", eval_interval=None).records
    (_, first, _), (_, second, speeds) = records
    assert speeds["throughput/batches_per_second"] == pytest.approx(6 / (second - first))


def test_an_evaluations_record_has_no_speed_and_moves_nothing(tmp_path: Path) -> None:
    records = fit(tmp_path, SpeedMonitor(window_size=100), log_interval="4ba", eval_interval="4ba", max_duration="8ba").records
    assert [bool(speeds) for _, _, speeds in records] == [True, False, True, False]
    _, seconds, speeds = records[2]
    assert speeds["throughput/batches_per_second"] == pytest.approx(8 / seconds)


def test_the_window_goes_on_across_a_resume(tmp_path: Path) -> None:
    fit(tmp_path, SpeedMonitor(window_size=100), SaveAndStop(), log_interval="2ba", eval_interval=None)
    resumed = fit(tmp_path, SpeedMonitor(window_size=100), log_interval="2ba", eval_interval=None, resume="auto").records
    step, seconds, speeds = resumed[0]
    assert step == 6
    assert speeds["throughput/batches_per_second"] == pytest.approx(6 / seconds)  # from the first process's start


def test_a_new_run_has_a_new_window(tmp_path: Path) -> None:
    monitor = SpeedMonitor(window_size=100)
    fit(tmp_path / "first", monitor, log_interval="4ba", eval_interval=None)
    step, seconds, speeds = fit(tmp_path / "second", monitor, log_interval="4ba", eval_interval=None).records[0]
    assert speeds["throughput/batches_per_second"] == pytest.approx(step / seconds)


def test_two_monitors_stand_side_by_side(tmp_path: Path) -> None:
    short, long = SpeedMonitor(window_size=2), SpeedMonitor(window_size=100)
    long.name = "throughput/long"
    records = fit(tmp_path, short, long, log_interval="2ba", eval_interval=None).records
    (_, before, _), (_, seconds, speeds) = records[-2:]
    assert speeds["throughput/batches_per_second"] == pytest.approx(2 / (seconds - before))
    assert speeds["throughput/long/batches_per_second"] == pytest.approx(12 / seconds)


def test_refuses_an_empty_window() -> None:
    with pytest.raises(ConfigError, match="window_size=0"):
        SpeedMonitor(window_size=0)
