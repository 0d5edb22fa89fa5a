from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import slow_rank_detector
from callsheet.callbacks.slow_rank_detector import SlowRankDetector
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks

Result = tuple[list[dict[str, float]], list[str]]


class Clock:
    """A clock that advances only when code sleeps."""

    now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class Slow(Callback):
    """Sleeps in one stage of the step on one rank, up to a given step."""

    def __init__(self, rank: int, stage: str, until: int = 10_000) -> None:
        self.rank, self.stage, self.until = rank, stage, until

    def on_fetch_start(self, ctx: Context) -> None:
        self._sleep(ctx, "fetch")

    def on_forward_start(self, ctx: Context) -> None:
        self._sleep(ctx, "forward")

    def on_backward_start(self, ctx: Context) -> None:
        self._sleep(ctx, "backward")

    def _sleep(self, ctx: Context, stage: str) -> None:
        (time if self.stage == "backward" else CLOCK).sleep(
            0.05 if self.stage == stage and ctx.run.rank == self.rank and ctx.step <= self.until else 0.001
        )


class Records(Callback):
    phase = "report"

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def on_log(self, ctx: Context) -> None:
        self.records.append({name: value for name, value in ctx.record.values.items() if name.startswith("slow")})


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fit(folder: str | Path, slow: Slow, *detectors: Callback, **options: Any) -> Result:
    records, lines = Records(), Lines()
    now = time.perf_counter if slow.stage == "backward" else CLOCK  # the backward really waits for the other rank
    logging.getLogger("callsheet").addHandler(lines)
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 40
    try:
        with (
            patch.object(slow_rank_detector, "perf_counter", now),
            Trainer(
                nn.Linear(2, 1),
                nn.functional.mse_loss,
                data,
                data[:2],
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
                callbacks=[*detectors, slow, records],
                runs_folder=folder,
                run_name="run",
                device="cpu",
                **({"log_interval": "4ba", "eval_interval": None, "max_duration": "20ba"} | options),
            ) as trainer,
        ):
            trainer.fit()
    finally:
        logging.getLogger("callsheet").removeHandler(lines)
    return records.records, [line for line in lines.lines if "is slow" in line]


def on_ranks(folder: str, stage: str, until: int, resumes: bool) -> Result:
    if not resumes:
        return fit(folder, Slow(1, stage, until), SlowRankDetector(patience=3))
    fit(folder, Slow(1, stage, until), SlowRankDetector(patience=3), Stops())
    return fit(folder, Slow(1, stage, until), SlowRankDetector(patience=3), resume="auto")


class Stops(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 8:
            ctx.control.save("to resume", replicated=True)
            ctx.control.stop("to resume", replicated=True)


@pytest.mark.parametrize("stage", ["fetch", "forward"])
def test_names_the_slow_rank_and_where_it_is_slow(stage: str, tmp_path: Path) -> None:
    (first, recorded), (second, recorded_by_second) = run_ranks(on_ranks, 2, str(tmp_path), stage, 10_000, False)
    assert first == second
    for record in first:
        assert record[f"slow_rank/{stage}/slowest"] == 1
        assert record[f"slow_rank/{stage}/ratio"] == pytest.approx(50)
    assert len(recorded) == 1  # at the third record, and only once
    assert f"rank 1 is slow in its {stage}: 0.05" in recorded[0]
    assert "(step 12)" in recorded[0]
    assert recorded_by_second == []


@pytest.mark.test_all
def test_ranks_that_wait_for_each_other_in_the_backward_are_not_slow(tmp_path: Path) -> None:
    (_, recorded), _ = run_ranks(on_ranks, 2, str(tmp_path), "backward", 10_000, False)
    assert recorded == []


def test_a_short_slowdown_is_not_reported(tmp_path: Path) -> None:
    (first, recorded), _ = run_ranks(on_ranks, 2, str(tmp_path), "forward", 8, False)
    assert recorded == []
    assert first[0]["slow_rank/forward/ratio"] == pytest.approx(50)


def test_the_count_continues_across_a_resume(tmp_path: Path) -> None:
    (_, recorded), _ = run_ranks(on_ranks, 2, str(tmp_path), "forward", 10_000, True)
    assert len(recorded) == 1
    assert "(step 12)" in recorded[0]  # two records before the resume, one after


def evaluating_on_ranks(folder: str) -> Result:
    other = SlowRankDetector()
    other.name = "slow_rank/again"
    return fit(folder, Slow(1, "forward"), SlowRankDetector(), other, eval_interval="4ba")


def test_evaluations_do_not_count(tmp_path: Path) -> None:
    (records, _), _ = run_ranks(evaluating_on_ranks, 2, str(tmp_path))
    assert [len(record) for record in records[:4]] == [12, 0, 12, 0]


def test_a_single_rank_is_not_compared(tmp_path: Path) -> None:
    records, recorded = fit(tmp_path, Slow(0, "forward"), SlowRankDetector(patience=1))
    assert recorded == []
    assert records == [{}] * 5


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="factor=1"):
        SlowRankDetector(factor=1)
    with pytest.raises(ConfigError, match="patience=0"):
        SlowRankDetector(patience=0)
