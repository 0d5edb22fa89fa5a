from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.callbacks.early_stopper import EarlyStopper
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.testing import FakeLoop, run_ranks
from callsheet.trainer import Evaluator

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3


class Scores(Callback):
    """Logs the given scores as `<dataset>/score`, one per evaluation, as a metric would."""

    phase = "change"

    def __init__(self, scores: Mapping[str, Sequence[float]]) -> None:
        self.scores = {name: list(values) for name, values in scores.items()}

    def on_eval_end(self, ctx: Context) -> None:
        done = ctx.step // 3 - 1 if self.scores else 0
        ctx.log({f"{ctx.eval_name}/score": self.scores[ctx.eval_name][done]}, across="same")


def trainer(folder: Path, *callbacks: Callback, scores: Sequence[float], data: Any = None, **options: Any) -> Trainer:
    return Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        data or DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=CallbackManager([Scores({"validation": scores, "rare": scores}), *callbacks], checking=True),
        runs_folder=folder,
        device="cpu",
        **({"max_duration": "8ep", "run_name": "run"} | options),
    )


def epochs(folder: Path, stopper: EarlyStopper, scores: Sequence[float], *callbacks: Callback, **options: Any) -> tuple[int, str]:
    """Return the number of epochs after which training ended, and the outcome."""
    with trainer(folder, stopper, *callbacks, scores=scores, **options) as trained:
        trained.fit()
    return trained.state.timestamp.epoch, str(trained.run.outcome)


def stopper(**options: Any) -> EarlyStopper:
    return EarlyStopper(**{"monitor": "validation/score", "patience": 2, **options})


FALLS = [8.0, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("options", "scores", "expected"),
    [
        ({}, [3, 2, 2, 2, 1, 1, 1, 1], 4),  # an equal score is not better
        ({}, FALLS, 8),
        ({"mode": "max"}, FALLS, 3),
        ({"patience": 1}, [3, 2, 4, 1, 1, 1, 1, 1], 3),
        ({"min_delta": 1.0}, [5, 4, 4.5, 3, 2, 1, 0, 0], 3),
        ({"min_delta": 1.0}, [5, 4.5, 3.9, 3.5, 2.8, 1.7, 0.6, -1], 8),  # compared with the best score, not the last
        ({}, [math.nan, math.nan, 1, 1, 1, 1, 1, 1], 2),
        ({}, [math.nan, 5, math.nan, 4, math.nan, math.nan, 1, 1], 6),
        ({}, [5, -math.inf, math.inf, 1, 1, 1, 1, 1], 3),  # a score that is not finite is never the best
        ({"patience": "3ep"}, [3, 2, 2, 2, 2, 1, 1, 1], 5),
        ({"patience": "7ba"}, [3, 2, 2, 2, 2, 1, 1, 1], 5),
        ({"patience": "6ba"}, [3, 2, 2, 2, 2, 1, 1, 1], 4),
        ({"patience": "0.25dur"}, [3, 2, 2, 2, 2, 1, 1, 1], 4),
        ({"patience": "2ep"}, [math.nan] * 8, 3),
    ],
)
def test_stops_when_patience_is_exhausted(tmp_path: Path, options: dict[str, Any], scores: list[float], expected: int) -> None:
    outcome = "stopped" if expected < 8 else "finished"
    assert epochs(tmp_path, stopper(**options), scores) == (expected, outcome)


def test_a_run_that_has_ended_is_not_stopped(tmp_path: Path) -> None:
    assert epochs(tmp_path, stopper(), [1, 1, 1], max_duration="3ep") == (3, "finished")


def test_a_manual_evaluation_does_not_count(tmp_path: Path) -> None:
    class EvaluatesManually(Scores):
        def on_eval_end(self, ctx: Context) -> None:
            ctx.log({"validation/score": 0.0 if ctx.standalone else 1.0 / (ctx.step + 1)}, across="same")

    waits = stopper(patience=1)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        max_duration="3ep",
        callbacks=[EvaluatesManually({}), waits],
        runs_folder=tmp_path,
        device="cpu",
    ) as trained:
        for _ in range(3):
            trained.evaluate()
        trained.fit()
    assert trained.state.timestamp.epoch == 3


def test_an_evaluator_that_was_not_due_does_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rare dataset is evaluated after epochs 2, 4 and 6. Evaluations without it do not reduce the patience."""
    data = {"validation": DATA[:1], "rare": Evaluator(DATA[:1], interval="2ep")}
    with caplog.at_level(logging.WARNING, "callsheet"):
        assert epochs(tmp_path, stopper(monitor="rare/score"), [1.0] * 8, data=data) == (6, "stopped")
    warning, ended = caplog.messages
    assert "'rare/score'" in warning
    assert "validation/score" in warning
    assert "training ended at step" in ended


@pytest.mark.parametrize("kind", ["validation/scores", "validation/x"])
def test_an_unknown_metric_is_an_error_that_lists_the_known_ones(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=r"validation/loss, validation/score"):
        epochs(tmp_path, stopper(monitor=kind), [1.0] * 8)


def test_an_unknown_dataset_is_named_at_the_first_evaluation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        epochs(tmp_path, stopper(monitor="valid/score"), [1.0] * 8, max_duration="3ep")
    (warning,) = caplog.messages
    assert "did you mean 'validation/score'" in warning


@pytest.mark.parametrize(
    ("epoch", "patience"),
    [
        pytest.param(epoch, patience, marks=() if patience == 3 or epoch == 3 else pytest.mark.slow)
        for epoch in range(1, 6)
        for patience in (3, "3ep", "0.375dur")
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, epoch: int, patience: Any) -> None:
    scores = [math.nan, 3, 2, 2, 3, 2, 1, 1]
    saver = CheckpointSaver(keep=None, save_interval="1ba")
    assert epochs(tmp_path, stopper(patience=patience), scores, saver) == (6, "stopped")
    for step in (3 * epoch - 1, 3 * epoch):
        (path,) = [found.path for found in find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints if found.step == step]
        again = stopper(patience=patience)
        assert epochs(tmp_path, again, scores, run_name=f"again{step}", resume=path) == (6, "stopped")


def test_a_run_whose_patience_is_exhausted_does_not_continue_when_resumed(tmp_path: Path) -> None:
    scores = [3.0, 2, 2, 2, 1, 1, 1, 1]
    assert epochs(tmp_path, stopper(), scores, CheckpointSaver())[0] == 4
    with trainer(tmp_path, stopper(), scores=scores, resume="auto") as trained:
        trained.fit()
    assert (trained.state.timestamp.batch, trained.run.outcome) == (12, "stopped")
    assert epochs(tmp_path, stopper(patience=3), scores, resume="auto") == (8, "finished")


def test_a_longer_duration_alone_does_not_continue_the_run_and_the_reason_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scores = [3.0, 2, 2, 2, 1, 1, 1, 1]
    assert epochs(tmp_path, stopper(), scores, CheckpointSaver())[0] == 4
    with caplog.at_level(logging.WARNING, "callsheet"):
        with trainer(tmp_path, stopper(), scores=scores, resume="auto", max_duration="20ep") as trained:
            trained.fit()
    assert (trained.state.timestamp.batch, trained.run.outcome) == (12, "stopped")
    assert "EarlyStopper: the patience had run out before the run was resumed at step 12" in caplog.text
    assert "give a longer patience, or remove the callback" in caplog.text


def test_a_new_run_starts_from_scratch(tmp_path: Path) -> None:
    again = stopper()
    assert epochs(tmp_path, again, [1, 2, 2, 2])[0] == 3
    assert epochs(tmp_path, again, [5, 4, 3, 3, 3, 3, 3, 3], run_name="other")[0] == 5


def test_two_instances_work_in_one_run(tmp_path: Path) -> None:
    patient, other = stopper(patience=5), stopper(monitor="validation/loss", mode="max", patience=2)
    other.name = "loss"
    with trainer(tmp_path, patient, other, CheckpointSaver(), scores=[1.0] * 8) as trained:
        trained.fit()
    assert trained.state.timestamp.epoch == 3  # the loss decreases from the start


@pytest.mark.parametrize(
    "options",
    [
        {"patience": 0},
        {"patience": True},
        {"patience": "-1ep"},
        {"mode": "least"},
        {"min_delta": -1.0},
        {"min_delta": math.nan},
        {"monitor": "loss"},
        {"monitor": "/loss"},
    ],
)
def test_rejects_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        stopper(**options)


class LossByRank:
    """A loss function whose evaluation loss decreases on rank 0, and is high and constant on rank 1."""

    def __init__(self, rank: int, left: Iterator[float]) -> None:
        self.rank = rank
        self.left = left

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return nn.functional.mse_loss(outputs, targets)
        return torch.tensor(next(self.left) if self.rank == 0 else 10.0)


def on_a_rank(folder: str) -> tuple[int, str]:
    rank = int(os.environ["RANK"])
    data = DATA * 2
    with Trainer(
        nn.Linear(2, 1),
        LossByRank(rank, iter([5.0, 4, 3, 3, 3, 3, 3, 3])),
        data,
        DATA[:2],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        max_duration="8ep",
        callbacks=[EarlyStopper(monitor="validation/loss", patience=2)],
        runs_folder=folder,
        run_name="run",
        device="cpu",
    ) as trained:
        trained.fit()
    return trained.state.timestamp.epoch, str(trained.run.outcome)


def test_two_ranks_stop_together_on_the_reduced_loss(tmp_path: Path) -> None:
    assert run_ranks(on_a_rank, 2, str(tmp_path)) == [(5, "stopped")] * 2


def test_a_run_without_evaluations_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FakeLoop(EarlyStopper(monitor="validation/loss"), [1.0, 1.0], folder=tmp_path).run()
    assert "no evaluation of the whole run had the metric 'validation/loss'" in caplog.text
