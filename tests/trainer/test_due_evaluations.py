"""After a signal at an evaluation's boundary, the resumed run evaluates the restored weights before its next step."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver, EarlyStopper
from callsheet.checkpoint import find_checkpoints, read_manifest
from callsheet.testing.grammar import check_events
from callsheet.testing.ranks import run_ranks
from callsheet.testing.recorder import Recorder

from .small_run import History


class Signals(Callback):
    """Sends this process a SIGTERM when an event is fired at a step."""

    def __init__(self, event: str, step: int) -> None:
        self.event, self.step = event, step

    def on_event(self, ctx: Context) -> None:
        if ctx.event == self.event and ctx.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def trained(folder: Path, *callbacks: Callback, interval: str, rate: float) -> dict[str, Any]:
    """Train or resume a run. Return its records, the steps of its evaluations, its best checkpoint, and its outcome."""
    torch.manual_seed(3)
    inputs = torch.randn(24, 3)
    data, held_out = TensorDataset(inputs, inputs.sum(1, keepdim=True)), [(inputs[:4], inputs[:4].sum(1, keepdim=True))] * 40
    history, recorder = History(), Recorder()
    with Trainer(
        nn.Linear(3, 1),
        nn.functional.mse_loss,
        lambda: DataLoader(data, batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")), shuffle=True),
        {"a": held_out, "b": held_out},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        max_duration="18ba",
        eval_interval=interval,
        log_interval="1000ba",
        run_name="run",
        runs_folder=folder,
        resume="auto",
        seed=1,
        callbacks=[
            history,
            recorder,
            EarlyStopper(monitor="b/loss", patience=2),
            CheckpointSaver(save_interval="1000ba", monitor="b/loss"),
            *callbacks,
        ],
    ) as trainer:
        trainer.fit()
    check_events(recorder.events)
    records = [
        [step, {name: value for name, value in values.items() if not name.endswith("per_second")}]
        for step, values in history.records
    ]
    kept = [read_manifest(checkpoint.path).info for checkpoint in find_checkpoints(folder / "run" / "checkpoints").checkpoints]
    return {
        "outcome": str(trainer.run.outcome),
        "step": trainer.state.timestamp.batch,
        "losses": history.losses,
        "records": records,
        "best": max((info["step"], info["val_losses"]["b"]) for info in kept if info["best_metric_key"])
        if any(info["best_metric_key"] for info in kept)
        else None,
        "weights": trainer.model.state_dict()["weight"].tolist(),
    }


def stopped_and_resumed(folder: str, rank_of_signal: int, cases: list[tuple[str, int, str, float]]) -> list[Any]:
    """Run each case on one rank: without interruption, and with a signal at an event of a step."""
    found = []
    for number, (event, step, interval, rate) in enumerate(cases):
        signals = [Signals(event, step)] if int(os.environ.get("RANK", "0")) == rank_of_signal else []
        straight = trained(Path(folder) / f"{number} straight", interval=interval, rate=rate)
        first = trained(Path(folder) / f"{number}", *signals, interval=interval, rate=rate)
        second = trained(Path(folder) / f"{number}", interval=interval, rate=rate)
        found.append((straight, first, second))
    return found


IMPROVES, WORSENS = 0.1, 3.0
CASES = [
    ("on_train_step_end", 4, "4ba", IMPROVES),
    ("on_eval_all_start", 4, "4ba", IMPROVES),
    ("on_eval_step_start", 8, "4ba", WORSENS),  # during the first evaluation with a worse result
    ("on_eval_end", 12, "4ba", WORSENS),  # in the evaluation after which the run stops
    ("on_epoch_end", 6, "1ep", IMPROVES),
    ("on_eval_step_start", 6, "1ep", IMPROVES),
    ("on_eval_step_start", 18, "4ba", IMPROVES),  # after the last training step
]


def check(straight: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["outcome"] == "preempted"
    assert second == straight


@pytest.mark.parametrize("case", CASES)
def test_the_resumed_run_equals_the_uninterrupted_one(case: tuple[str, int, str, float], tmp_path: Path) -> None:
    [(straight, first, second)] = stopped_and_resumed(str(tmp_path), 0, [case])
    check(straight, first, second)
    assert straight["best"] is not None


def test_the_cases_contain_runs_that_stop_early_and_runs_that_do_not(tmp_path: Path) -> None:
    assert trained(tmp_path / "1", interval="4ba", rate=WORSENS)["outcome"] == "stopped"
    assert trained(tmp_path / "2", interval="4ba", rate=IMPROVES)["outcome"] == "finished"


@pytest.mark.test_all
def test_on_two_ranks_with_a_signal_to_one_the_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    cases = [CASES[1], CASES[3], CASES[5]]
    for rank in run_ranks(stopped_and_resumed, 2, str(tmp_path), 1, cases):
        for (straight, first, second), case in zip(rank, cases, strict=True):
            assert first["outcome"] == "preempted", case
            assert second == straight, case


class RequestsEvaluation(Callback):
    """Requests an evaluation at a step, and records the steps of all evaluations."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.steps: list[int] = []

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            ctx.control.evaluate("the test requests it")

    def on_eval_all_end(self, ctx: Context) -> None:
        self.steps.append(ctx.step)


class SavesAndStops(Callback):
    """At a step, requests a checkpoint and a stop."""

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 6:
            ctx.control.save("the test requests it")
            ctx.control.stop("the test requests it")


@pytest.mark.parametrize("interval", ["1ep", "3ba"])
@pytest.mark.parametrize("stops", [False, True])
def test_an_evaluation_at_the_last_step_of_an_epoch_is_that_of_the_epoch(interval: str, stops: bool, tmp_path: Path) -> None:
    data = [(torch.ones(2, 2), torch.zeros(2, 1))] * 3
    found = []
    for callbacks in [[SavesAndStops()], []] if stops else [[]]:
        requests = RequestsEvaluation(6)
        with Trainer(
            nn.Linear(2, 1), nn.functional.mse_loss, data, data, max_duration="4ep", eval_interval=interval, run_name="run",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), runs_folder=tmp_path, resume="auto" if stops else None,
            callbacks=[requests, *callbacks],
        ) as trainer:  # fmt: skip
            trainer.fit()
        found += requests.steps
    # The checkpoint was saved before the evaluation at step 6, so the resumed run repeats this evaluation.
    assert found == ([3, 6, 6, 9, 12] if stops else [3, 6, 9, 12])
