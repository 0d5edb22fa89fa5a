from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.callbacks.threshold_stopper import ThresholdStopper
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 4


class LogsNumbers(Callback):
    """Logs the given numbers, one per step and one per evaluation; rank 1 logs `rank_one` more in each step."""

    def __init__(self, steps: Sequence[float], evaluations: Sequence[float] = (), rank_one: float = 0.0) -> None:
        self.steps = list(steps)
        self.evaluations = list(evaluations)
        self.rank_one = rank_one

    def on_train_step_end(self, ctx: Context) -> None:
        ctx.log({"some/number": self.steps[ctx.step - 1] + (self.rank_one if ctx.run.rank else 0)}, over="last")

    def on_eval_end(self, ctx: Context) -> None:
        if self.evaluations:
            ctx.log({"validation/score": 100.0 if ctx.standalone else self.evaluations[ctx.step // 4 - 1]}, across="same")


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=CallbackManager(callbacks, checking=True),
        runs_folder=folder,
        device="cpu",
        **({"max_duration": "3ep", "run_name": "run", "log_interval": "1ba"} | options),
    )


def steps(folder: Path, stopper: ThresholdStopper, logs: LogsNumbers, *callbacks: Callback, **options: Any) -> tuple[int, str]:
    """Return the number of steps after which training ended, and the outcome."""
    with trainer(folder, logs, stopper, *callbacks, **options) as trained:
        trained.fit()
    return trained.state.timestamp.batch, str(trained.run.outcome)


def stopper(**options: Any) -> ThresholdStopper:
    return ThresholdStopper(**{"monitor": "some/number", "threshold": 5.0, **options})


RISES = [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("options", "numbers", "expected"),
    [
        ({}, RISES, 5),
        ({"mode": "max"}, RISES, 5),
        ({"mode": "min"}, RISES, 1),
        ({"mode": "min"}, [9.0, math.nan, math.inf, 8, 7, 6, -math.inf, *RISES], 7),
        ({}, [math.nan, -math.inf, 1, math.inf, *RISES], 4),
        ({"records": "epoch"}, RISES, 8),
        ({"records": "epoch"}, [6.0, 6, 6, 1, 2, 3, 4, 4, 4, 4, 4, 4], 12),
        ({"records": "none"}, RISES, 12),
        ({"threshold": 100.0}, RISES, 12),
    ],
)
def test_stops_at_the_record_that_reaches_the_threshold(
    tmp_path: Path, options: dict[str, Any], numbers: list[float], expected: int
) -> None:
    assert steps(tmp_path, stopper(**options), LogsNumbers(numbers)) == (expected, "stopped" if expected < 12 else "finished")


def test_a_record_is_checked_at_its_boundary(tmp_path: Path) -> None:
    assert steps(tmp_path, stopper(), LogsNumbers(RISES), log_interval="3ba") == (6, "stopped")


@pytest.mark.parametrize(("monitor", "expected"), [("train/loss", 1), ("validation/loss", 4)])
def test_a_loss_reaches_the_threshold_from_above_by_default(tmp_path: Path, monitor: str, expected: int) -> None:
    assert steps(tmp_path, stopper(monitor=monitor, threshold=1e6), LogsNumbers(RISES))[0] == expected


@pytest.mark.parametrize("records", ["all", "none"])
def test_stops_at_the_evaluation_that_reaches_the_threshold(tmp_path: Path, records: str) -> None:
    reached = stopper(monitor="validation/score", records=records)
    assert steps(tmp_path, reached, LogsNumbers(RISES, [1, 6, 1])) == (8, "stopped")


def test_a_manual_evaluation_does_not_count(tmp_path: Path) -> None:
    with trainer(tmp_path, LogsNumbers(RISES, [1, 2, 3]), stopper(monitor="validation/score")) as trained:
        trained.evaluate()
        trained.fit("1ep")
        trained.evaluate()
        trained.fit("3ep")
    assert trained.run.outcome == "finished"


def test_an_unknown_metric_of_a_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'validation/score'"):
        steps(tmp_path, stopper(monitor="validation/scores"), LogsNumbers(RISES, [1, 2, 3]))


def test_a_metric_that_is_never_logged_is_named_after_an_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        steps(tmp_path, stopper(monitor="some/numbers"), LogsNumbers(RISES))
    (warning,) = caplog.messages
    assert "did you mean 'some/number'" in warning
    assert "validation/loss" not in warning  # it is evaluated after the epoch


def test_a_metric_that_is_logged_is_not_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        steps(tmp_path, stopper(threshold=100.0), LogsNumbers(RISES), eval_interval="1ba")
    assert not caplog.messages


@pytest.mark.parametrize("records", ["all", "epoch"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, records: str) -> None:
    numbers = [6.0, 1, 1, 4, 4, 6, 6, 6, 6, 6, 6, 6] if records == "epoch" else [1.0] * 5 + [6.0] * 7
    saver = CheckpointSaver(keep=None, save_interval="1ba")
    # with a record every third step, the last record of the epoch is that of step 6
    options = {"log_interval": "3ba", "eval_interval": None} if records == "epoch" else {}
    expected = (8 if records == "epoch" else 6, "stopped")
    assert steps(tmp_path, stopper(records=records), LogsNumbers(numbers), saver, **options) == expected
    for found in find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints:
        again = stopper(records=records)
        assert (
            steps(tmp_path, again, LogsNumbers(numbers), run_name=f"from{found.step}", resume=found.path, **options) == expected
        )


def test_a_stopped_run_continues_only_with_another_threshold(tmp_path: Path) -> None:
    assert steps(tmp_path, stopper(), LogsNumbers(RISES), CheckpointSaver()) == (5, "stopped")
    assert steps(tmp_path, stopper(), LogsNumbers(RISES), resume="auto") == (5, "stopped")
    assert steps(tmp_path, stopper(threshold=7.0), LogsNumbers(RISES), resume="auto") == (7, "stopped")


def test_a_new_run_starts_from_scratch(tmp_path: Path) -> None:
    again = stopper()
    assert steps(tmp_path, again, LogsNumbers(RISES))[0] == 5
    assert steps(tmp_path, again, LogsNumbers([1.0] * 12), run_name="other") == (12, "finished")


def test_two_instances_work_in_one_run(tmp_path: Path) -> None:
    other = stopper(monitor="validation/score")
    other.name = "score"
    assert steps(tmp_path, stopper(), LogsNumbers([1.0] * 12, [1, 6, 1]), other, CheckpointSaver())[0] == 8


@pytest.mark.parametrize("options", [{"threshold": math.nan}, {"mode": "above"}, {"records": "some"}, {"monitor": ""}])
def test_rejects_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        stopper(**options)


def on_a_rank(folder: str, rank_one: float) -> tuple[int, str]:
    assert os.environ["WORLD_SIZE"] == "2"
    with trainer(Path(folder), LogsNumbers(RISES, rank_one=rank_one), stopper(), max_duration="6ep") as trained:
        trained.fit()
    return trained.state.timestamp.batch, str(trained.run.outcome)


@pytest.mark.parametrize(("rank_one", "expected"), [(0.0, 5), (4.0, 3), (math.inf, 1)])
def test_two_ranks_stop_together_on_the_reduced_value(tmp_path: Path, rank_one: float, expected: int) -> None:
    assert run_ranks(on_a_rank, 2, str(tmp_path), rank_one) == [(expected, "stopped")] * 2
