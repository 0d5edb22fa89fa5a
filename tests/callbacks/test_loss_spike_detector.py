from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.callbacks.loss_spike_detector import LossSpikeDetector
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks

CALM = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]


class Losses:
    """A loss function that returns the given values, one per step; a resumed run continues after the first `start` values."""

    def __init__(self, values: Sequence[float], start: int = 0) -> None:
        self.values = list(values)
        self.step = start

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.step += 1
        return outputs.sum() * 0 + self.values[self.step - 1]


class Records(Callback):
    """Records every metrics record in its final form."""

    phase = "report"

    def __init__(self) -> None:
        self.recorded: dict[int, dict[str, float]] = {}

    def on_log(self, ctx: Context) -> None:
        self.recorded[ctx.step] = dict(ctx.record.values)

    def column(self, name: str) -> dict[int, float]:
        return {step: values[name] for step, values in self.recorded.items() if name in values}


def fit(folder: Path, losses: Losses, *callbacks: Callback, **options: Any) -> tuple[Records, Trainer]:
    records = Records()
    data = [(torch.ones(1, 2), torch.ones(1, 1))] * 1000
    arguments: dict[str, Any] = {"max_duration": f"{len(losses.values)}ba", "log_interval": "1ba", "run_name": "run"}
    with Trainer(
        nn.Linear(2, 1),
        losses,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        callbacks=CallbackManager([*callbacks, records], checking=True),
        runs_folder=folder,
        device="cpu",
        **(arguments | options),
    ) as trained:
        trained.fit()
    return records, trained


def spikes(records: Records) -> list[int]:
    counts = records.column("loss_spike/count")
    return [step for step, count in counts.items() if count > counts.get(step - 1, 0)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([*CALM, 5.0, *CALM], [11]),
        ([*CALM, 5.0, 5.0, 1.0], [11, 12]),  # the first spike does not hide the second
        ([*CALM, 0.01, *CALM], []),  # only increases count
        ([*CALM, 1.4, 1.0], []),
        ([1.0, 100.0, *CALM], []),  # too few losses to detect a spike
        ([*CALM, math.nan, 1.0, math.inf, -math.inf, 1.0, 5.0], [11, 13, 14, 16]),
        ([math.nan, *CALM], [1]),
        ([1.0] * 10 + [1.005, 1.02], [12]),
        ([0.0] * 10 + [0.1], [11]),
        ([-1.0] * 10 + [5.0], [11]),
        ([*CALM, *[5.0, 5.1, 4.9] * 5], [11, 12, 13, 14, 15]),  # a new level becomes normal
    ],
)
def test_reports_a_loss_far_above_the_previous_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, losses: list[float], expected: list[int]
) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        records, trained = fit(tmp_path, Losses(losses), LossSpikeDetector(window=10))
    assert spikes(records) == expected
    assert [message for message in caplog.messages if "jumped to" in message] == caplog.messages
    assert [f"at step {step}" in message for step, message in zip(expected, caplog.messages, strict=True)] == [True] * len(
        expected
    )
    assert (trained.run.outcome, trained.state.timestamp.batch) == ("finished", len(losses))


def test_the_score_is_measured_in_robust_standard_deviations(tmp_path: Path) -> None:
    losses = [1.0, 4.0, 2.0, 8.0, 3.0, 5.0]
    records, _ = fit(tmp_path, Losses(losses), LossSpikeDetector(window=4))
    scores = records.column("loss_spike/score")
    assert list(scores) == [3, 4, 5, 6]
    middle = median(losses[1:5])
    spread = 1.4826 * median(abs(loss - middle) for loss in losses[1:5])
    assert scores[6] == pytest.approx((5.0 - middle) / spread)


def test_stops_at_a_spike(tmp_path: Path) -> None:
    _, trained = fit(tmp_path, Losses([*CALM, 5.0, *CALM]), LossSpikeDetector(window=10, action="stop"))
    assert (trained.run.outcome, trained.state.timestamp.batch) == ("stopped", 11)


def test_saves_a_checkpoint_at_a_spike(tmp_path: Path) -> None:
    fit(tmp_path, Losses([*CALM, 5.0, *CALM]), LossSpikeDetector(window=10, action="save"))
    assert [found.step for found in find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints] == [11]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    losses = [*CALM, 5.0, 1.0, 1.2, 4.0, 1.0]
    saver = CheckpointSaver(save_interval="1ba", keep=None)
    whole, _ = fit(tmp_path, Losses(losses), LossSpikeDetector(window=10), saver)
    assert spikes(whole) == [11, 14]
    for step in (3, 10, 11, 13):
        path = tmp_path / "run" / "checkpoints" / f"ep0-ba{step}"
        records, _ = fit(tmp_path, Losses(losses, step), LossSpikeDetector(window=10), resume=path, run_name=f"from{step}")
        for name in ("loss_spike/score", "loss_spike/count"):
            assert records.column(name) == {at: value for at, value in whole.column(name).items() if at > step}


def test_a_new_run_starts_from_scratch(tmp_path: Path) -> None:
    detector = LossSpikeDetector(window=10)
    fit(tmp_path, Losses([*CALM, 5.0]), detector)
    records, _ = fit(tmp_path, Losses([50.0] * 12), detector, run_name="other")
    assert spikes(records) == []


def test_two_instances_work_in_one_run(tmp_path: Path) -> None:
    strict, other = LossSpikeDetector(window=10), LossSpikeDetector(window=4, threshold=1000.0)
    other.name = "loss_spike/never"
    records, _ = fit(tmp_path, Losses([*CALM, 5.0]), strict, other, CheckpointSaver())
    assert records.recorded[11]["loss_spike/count"] == 1
    assert records.recorded[11]["loss_spike/never/count"] == 0


@pytest.mark.parametrize("options", [{"window": 3}, {"threshold": 0.0}, {"threshold": math.nan}, {"action": "panic"}])
def test_rejects_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LossSpikeDetector(**options)


def on_a_rank(folder: str, bad: float) -> tuple[int, str]:
    losses = [*CALM, *CALM]
    if os.environ["RANK"] == "1":
        losses[10] = bad
    detector = LossSpikeDetector(window=10, action="stop")
    _, trained = fit(Path(folder), Losses(losses), detector)
    return trained.state.timestamp.batch, str(trained.run.outcome)


@pytest.mark.test_all
@pytest.mark.parametrize("bad", [20.0, math.nan, math.inf])
def test_two_ranks_detect_the_spike_of_one(tmp_path: Path, bad: float) -> None:
    assert run_ranks(on_a_rank, 2, str(tmp_path), bad) == [(11, "stopped")] * 2
