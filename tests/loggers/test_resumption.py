"""Which records of `JSONLLogger` and `CSVLogger` are valid after a resume."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import nn

import callsheet
from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.loggers import CSVLogger, JSONLLogger, read_metrics
from callsheet.report import RunFolder


def train_attached(folder: Path, *, until: int = 4) -> None:
    """Train in a hand-written loop that saves and then evaluates after each epoch, and crashes in epoch `until`."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.full((2, 2), float(number)), torch.ones(2, 1)) for number in range(4)]
    with callsheet.attach(
        model=model, optimizer=optimizer, callbacks=[CheckpointSaver(save_interval="2ep")], loggers=[JSONLLogger(), CSVLogger()],
        max_duration="4ep", run_name="run", runs_folder=folder, resume="auto", log_interval=2,
    ) as run:  # fmt: skip
        for epoch in run.epochs(4):
            for inputs, targets in run.steps(data):
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if epoch == until:
                    raise RuntimeError("crash")
            run.evaluated({"validation": {"loss": loss.item()}})


def records(folder: Path) -> list[tuple[int, float | None]]:
    found = [(record.step, record.values.get("validation/loss")) for record in read_metrics(folder / "run")]
    with open(folder / "run" / "metrics.csv") as file:
        rows = [
            (int(row["step"]), float(row["validation/loss"]) if row["validation/loss"] else None) for row in csv.DictReader(file)
        ]
    assert rows == found
    run = RunFolder.read(folder / "run")
    assert [(record.step, record.values.get("validation/loss")) for record in run.records] == found
    return found


def test_an_evaluation_after_the_checkpoint_of_its_step_is_kept(tmp_path: Path) -> None:
    train_attached(tmp_path / "whole")
    try:
        train_attached(tmp_path / "resumed", until=2)
    except RuntimeError:
        train_attached(tmp_path / "resumed")
    assert records(tmp_path / "resumed") == records(tmp_path / "whole")
    assert [step for step, loss in records(tmp_path / "whole") if loss is not None] == [4, 8, 12, 16]


def test_a_finished_run_that_is_started_again_changes_nothing(tmp_path: Path) -> None:
    train_attached(tmp_path)
    before = records(tmp_path)
    train_attached(tmp_path)
    assert records(tmp_path) == before


class _Crash(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            raise RuntimeError("crash")


def test_an_evaluation_that_is_repeated_replaces_the_earlier_one(tmp_path: Path) -> None:
    """The checkpoint is from before the evaluation of its step, so the resumed run repeats the evaluation."""
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 4

    def train(name: str, crash: int) -> None:
        torch.manual_seed(0)
        with Trainer(
            nn.Linear(2, 1), nn.functional.mse_loss, data, data, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            callbacks=[CheckpointSaver(save_interval="1ep", before_eval=True), _Crash(crash)], max_duration="3ep",
            loggers=[JSONLLogger(), CSVLogger()], run_name="run", runs_folder=tmp_path / name, resume="auto", log_interval=2, progress=False,
        ) as trainer:  # fmt: skip
            trainer.fit()

    train("whole", 0)
    try:
        train("resumed", 6)
    except RuntimeError:
        train("resumed", 0)
    assert records(tmp_path / "resumed") == records(tmp_path / "whole")
    resumes = RunFolder.read(tmp_path / "resumed" / "run").resumes
    assert [resume.step for resume in resumes] == [4]
