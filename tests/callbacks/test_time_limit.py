from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.callbacks.time_limit import TimeLimit
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks

BATCH = (torch.ones(2, 2), torch.ones(2, 1))


class Clock:
    """Replaces the module `time`. Only `Slow` advances it, so tests do not depend on the machine's load."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("callsheet.callbacks.time_limit.time", clock)
    return clock


class Slow(Callback):
    """Makes an event take some time, on the given clock or in real time."""

    def __init__(self, event: str, seconds: float, *, clock: Clock | None = None, rank: int | None = None) -> None:
        self.event = event
        self.seconds = seconds
        self.clock = clock
        self.rank = rank

    def on_event(self, ctx: Context) -> None:
        if ctx.event != self.event or self.rank not in (None, ctx.run.rank):
            return
        if self.clock is None:
            time.sleep(self.seconds)
        else:
            self.clock.now += self.seconds


def endless() -> Iterator[Any]:
    while True:
        yield BATCH


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        [BATCH] * 1000,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        runs_folder=folder,
        device="cpu",
        **({"max_duration": "1ep", "run_name": "run"} | options),
    )


def kinds(folder: Path) -> dict[int, str]:
    found = find_checkpoints(folder / "run" / "checkpoints").checkpoints
    return {checkpoint.step: checkpoint.seal.info["kind"] for checkpoint in found}


def test_stops_in_time_with_a_checkpoint(tmp_path: Path, clock: Clock) -> None:
    limit = TimeLimit(limit=2.0, margin=1.5)
    with trainer(tmp_path, limit, Slow("on_train_step_end", 0.125, clock=clock)) as trained:
        trained.fit()
    assert (trained.run.outcome, trained.state.timestamp.batch, clock.now) == ("stopped", 4, 0.5)
    assert kinds(tmp_path) == {4: "final"}


def test_stops_by_the_real_clock(tmp_path: Path) -> None:
    began = time.monotonic()
    with trainer(tmp_path, TimeLimit(limit=0.5), Slow("on_train_step_end", 0.02), max_duration="100ep") as trained:
        trained.fit()
    assert time.monotonic() - began > 0.5
    assert trained.run.outcome == "stopped"


def test_a_run_that_ends_in_time_is_not_stopped(tmp_path: Path) -> None:
    with trainer(tmp_path, TimeLimit(limit="1h")) as trained:
        trained.fit()
    assert (trained.run.outcome, trained.state.timestamp.batch) == ("finished", 1000)
    assert kinds(tmp_path) == {}


def test_without_saving_no_checkpoint_is_requested(tmp_path: Path, clock: Clock) -> None:
    limit = TimeLimit(limit=0.5, save=False)
    with trainer(tmp_path, limit, Slow("on_train_step_end", 0.125, clock=clock)) as trained:
        trained.fit()
    assert trained.run.outcome == "stopped"
    assert kinds(tmp_path) == {}


def test_the_time_of_the_set_up_counts(tmp_path: Path, clock: Clock) -> None:
    with trainer(tmp_path, TimeLimit(limit=0.25), Slow("on_data_init_start", 0.25, clock=clock)) as trained:
        trained.fit()
    assert trained.state.timestamp.batch == 0
    assert kinds(tmp_path) == {}  # no step was trained, so there is nothing to save


def test_the_time_of_an_evaluation_counts(tmp_path: Path, clock: Clock) -> None:
    limit, slow = TimeLimit(limit=0.5), Slow("on_eval_step_end", 0.5, clock=clock)
    with trainer(tmp_path, limit, slow, eval_dataloader=[BATCH], eval_interval="5ba") as trained:
        trained.fit()
    assert trained.state.timestamp.batch == 5
    assert kinds(tmp_path) == {5: "final"}


def saved_after(folder: Path, clock: Clock, seconds: float) -> None:
    """Train a run that took `seconds`, and was saved after its only step."""
    slow = Slow("on_data_init_start", seconds, clock=clock)
    with trainer(folder, TimeLimit(limit="1h"), CheckpointSaver(), slow) as trained:
        trained.fit("1ba")


@pytest.mark.parametrize(("across", "steps"), [(True, 2), (False, 8)])
def test_the_time_of_earlier_processes_counts_with_across_resumes(tmp_path: Path, clock: Clock, across: bool, steps: int) -> None:
    saved_after(tmp_path, clock, 0.75)
    limit = TimeLimit(limit=1.0, across_resumes=across)
    with trainer(tmp_path, limit, Slow("on_train_step_end", 0.125, clock=clock), resume="auto") as trained:
        trained.fit()
    assert (trained.run.outcome, trained.state.timestamp.batch - 1) == ("stopped", steps)


def test_a_run_at_its_limit_does_not_continue_when_resumed(tmp_path: Path, clock: Clock) -> None:
    saved_after(tmp_path, clock, 0.5)
    with trainer(tmp_path, TimeLimit(limit=0.5), resume="auto") as trained:
        trained.fit()
    assert (trained.run.outcome, trained.state.timestamp.batch) == ("stopped", 1)


def test_the_clock_starts_again_with_a_new_run_and_stops_between_runs(tmp_path: Path, clock: Clock) -> None:
    limit = TimeLimit(limit=0.5)
    for name in ("run", "other"):
        slow = Slow("on_data_init_start", 0.375, clock=clock)
        with trainer(tmp_path, limit, slow, run_name=name) as trained:
            trained.fit("3ba")
        assert trained.run.outcome == "finished"
        clock.now += 0.375
        assert limit.state_dict()["seconds"] == 0.375


def test_two_limits_work_in_one_run(tmp_path: Path, clock: Clock) -> None:
    job, run = TimeLimit(limit=0.25, across_resumes=False), TimeLimit(limit="1h")
    job.name = "job"
    with trainer(tmp_path, job, run, Slow("on_train_step_end", 0.125, clock=clock)) as trained:
        trained.fit()
    assert trained.run.outcome == "stopped"


@pytest.mark.parametrize(
    "options", [{"limit": "10ba"}, {"limit": 0}, {"limit": "-1sec"}, {"limit": 60, "margin": "1m"}, {"limit": "1m", "margin": -1}]
)
def test_rejects_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TimeLimit(**options)


def on_a_rank(folder: str) -> tuple[int, str, float]:
    assert os.environ["WORLD_SIZE"] == "2"
    slow = Slow("on_train_step_end", 0.01, rank=1)
    with trainer(Path(folder), TimeLimit(limit=0.5), slow) as trained:
        trained.fit()
        left = sorted(kinds(Path(folder)))
    return trained.state.timestamp.batch, str(trained.run.outcome), left[-1]


def test_two_ranks_stop_and_save_at_the_same_step(tmp_path: Path) -> None:
    one, other = run_ranks(on_a_rank, 2, str(tmp_path))
    assert one == other
    step, outcome, saved = one
    assert outcome == "stopped"
    assert 0 < step < 500
    assert saved == step
