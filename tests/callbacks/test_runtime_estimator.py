from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.runtime_estimator import RuntimeEstimator
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks

STEP, EVALUATION = 0.02, 0.2

clock: Any = time
"""What sleeps; the machine's own on ranks in processes of their own."""


class Clock:
    """A clock that advances only when code sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def exact_time(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Clock()
    monkeypatch.setitem(globals(), "clock", exact)
    monkeypatch.setattr("callsheet.callbacks.runtime_estimator.time", exact)


class TakesTime(Callback):
    """Makes the first step, other steps and evaluations take a given time, and records the estimates."""

    def __init__(self, first: float = 0.0, evaluation: float = 0.0, *, stop_at: int = 0) -> None:
        self.first, self.evaluation, self.stop_at = first, evaluation, stop_at
        self.is_first = True
        self.recorded: list[tuple[int, float, dict[str, float]]] = []
        self.ended = 0.0

    def on_train_step_start(self, ctx: Context) -> None:
        clock.sleep(self.first if self.is_first and self.first else STEP)
        self.is_first = False

    def on_eval_step_start(self, ctx: Context) -> None:
        clock.sleep(self.evaluation)

    def on_checkpoint_due(self, ctx: Context) -> None:
        if ctx.step == self.stop_at:
            ctx.control.save("to resume", replicated=True)
            ctx.control.stop("to resume", replicated=True)

    def on_train_end(self, ctx: Context) -> None:
        self.ended = clock.monotonic()


class Keep(Callback):
    phase = "report"

    def __init__(self, into: TakesTime) -> None:
        self.into = into

    def on_log(self, ctx: Context) -> None:
        values = {name: value for name, value in ctx.record.values.items() if "remaining" in name}
        self.into.recorded.append((ctx.step, clock.monotonic(), values))


def fit(folder: Path | str, sleepy: TakesTime, *estimators: Callback, **options: Any) -> TakesTime:
    data = [(torch.ones(4, 2), torch.ones(4, 1))] * 10
    arguments: dict[str, Any] = {"log_interval": "2ba", "eval_interval": None, "max_duration": "20ba"}
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        data,
        data[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=[sleepy, *(estimators or [RuntimeEstimator()]), Keep(sleepy)],
        runs_folder=folder,
        run_name="run",
        device="cpu",
        **(arguments | options),
    ) as trainer:
        trainer.fit()
    return sleepy


def test_the_warm_up_is_left_out_and_the_estimate_is_exact(tmp_path: Path) -> None:
    recorded = fit(tmp_path, TakesTime(first=1.0)).recorded
    for step, _, values in recorded:
        assert values["time/remaining_estimate"] == pytest.approx(
            (20 - step) * STEP, rel=1e-6, abs=1e-9
        )  # would be 9 s if the first step counted
    assert recorded[-1][2] == {"time/remaining_estimate": 0.0}


def test_estimates_include_the_progress_within_an_epoch(tmp_path: Path) -> None:
    step, _, values = fit(tmp_path, TakesTime(), max_duration="2ep").recorded[1]
    assert step == 4
    assert values["time/remaining_estimate"] == pytest.approx(16 * STEP, rel=1e-6)


def test_future_evaluations_are_counted(tmp_path: Path) -> None:
    sleepy = fit(tmp_path, TakesTime(evaluation=EVALUATION), max_duration="40ba", eval_interval="10ba", log_interval="5ba")
    by_step = {step: values["time/remaining_estimate"] for step, _, values in sleepy.recorded if values}
    assert by_step[15] == pytest.approx(25 * STEP + 3 * EVALUATION, rel=1e-6)
    assert by_step[35] == pytest.approx(5 * STEP + EVALUATION, rel=1e-6)


def test_a_resumed_run_has_an_estimate_at_its_first_record(tmp_path: Path) -> None:
    fit(tmp_path, TakesTime(evaluation=EVALUATION, stop_at=10), eval_interval="5ba", max_duration="20ba")
    sleepy = TakesTime(first=0.5, evaluation=EVALUATION)
    estimator = RuntimeEstimator(skip_batches=5)
    fit(tmp_path, sleepy, estimator, eval_interval="5ba", max_duration="40ba", resume="auto")
    step, _, values = sleepy.recorded[0]
    assert step == 12  # still in the warm-up; the run is twice as long as before
    assert values["time/remaining_estimate"] == pytest.approx(28 * STEP + 6 * EVALUATION, rel=1e-6)


def test_the_unit_is_in_the_metric_s_name_and_two_instances_work_in_one_run(tmp_path: Path) -> None:
    hours = RuntimeEstimator(time_unit="hours")
    hours.name = "time/coarse"
    values = fit(tmp_path, TakesTime(), RuntimeEstimator(), hours).recorded[2][2]
    assert set(values) == {"time/remaining_estimate", "time/coarse/remaining_estimate_hours"}
    assert values["time/coarse/remaining_estimate_hours"] * 3600 == pytest.approx(values["time/remaining_estimate"], rel=1e-6)


def on_ranks(folder: str) -> list[dict[str, float]]:
    return [values for _, _, values in fit(folder, TakesTime()).recorded]


def test_all_ranks_report_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path))
    assert first == second
    assert first[-1]["time/remaining_estimate"] == 0.0
    assert first[1]["time/remaining_estimate"] > 0


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="skip_batches=-1"):
        RuntimeEstimator(skip_batches=-1)
    with pytest.raises(ConfigError, match="did you mean 'hours'"):
        RuntimeEstimator(time_unit="hour")  # type: ignore[arg-type]  # the mistake that is tested
