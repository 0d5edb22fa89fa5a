"""When another process has taken over a run's folder, no callback of the run writes to it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer, attach, callbacks, loggers
from callsheet.callbacks import CheckpointSaver, HangDetector, Heartbeat
from callsheet.core.ranks import Ranks
from callsheet.core.run_state import RunInfo
from callsheet.errors import CallsheetError, RunLockLostError
from callsheet.loggers import CSVLogger, FileLogger, JSONLLogger
from callsheet.loggers.file_logger import Capture
from callsheet.run import run_lock
from callsheet.testing import Subject
from callsheet.testing.ranks import run_ranks

WRITING = [
    name
    for package in (callbacks, loggers)
    for name in package.__all__
    if getattr(getattr(package, name), "writes_to_run_folder", False) is True
]
OF_ONE_PROCESS = ("events.out.tfevents", "wandb")
"""Files of other packages' writers, whose names no other process uses."""


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and name != "run.json" and not any(each in name for each in OF_ONE_PROCESS):
            found[name] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found


class LosesFolder(Callback):
    """Marks the folder as lost at step 5, then continues to train and logs data of every kind."""

    phase = "decide"

    def __init__(self) -> None:
        self.files: dict[str, tuple[int, int]] = {}

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 5:
            ctx.run.has_lost_folder = True
            assert ctx.run.folder is not None
            ctx.run.folder.mkdir(exist_ok=True)
            (ctx.run.folder / "trigger").write_text("save for another process\n")
            self.files = files_in(ctx.run.folder)
        elif ctx.step > 5:
            print("printed by a run that has lost its folder")
            ctx.log_hyperparameters({"late": ctx.step})
            ctx.log_table("late", ["step"], [[ctx.step]])
            ctx.log_images("late", [torch.zeros(3, 2, 2)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRITING)
def test_a_built_in_writes_nothing_to_a_lost_folder(name: str, subjects: Mapping[str, Subject], tmp_path: Path) -> None:
    subject, loses = subjects[name], LosesFolder()
    with subject.trainer(tmp_path, CallbackManager([loses, subject.make()])) as trainer:
        trainer.fit()
    assert trainer.run.folder is not None
    assert files_in(trainer.run.folder) == loses.files


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capture", ["python", "fd"])
def test_the_log_of_the_output_gets_neither_what_is_printed_nor_the_traceback(capture: Capture, tmp_path: Path) -> None:
    def lose(ctx: Context) -> None:
        if ctx.step == 2:
            print("incomplete", end="", flush=True)
            ctx.run.has_lost_folder = True
        if ctx.step == 3:
            raise ValueError("the error of the loser")

    with pytest.raises(ValueError, match="the error of the loser"):
        train(tmp_path, [FileLogger(capture=capture), At(lose)])
    written = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "the error of the loser" not in written
    assert "--- " in written


class At(Callback):
    def __init__(self, function: Any) -> None:
        self.function = function

    def on_train_step_end(self, ctx: Context) -> None:
        self.function(ctx)


def take_over(ctx: Context, folder: Path) -> None:
    """Take over the lock of the run's folder as another machine would, and wait until the run has detected the loss."""
    lock = folder / ".run.lock"
    another = {"token": "another", "machine": "b", "machine_id": "b", "beat": time.time()}
    (lock / "2").write_text(json.dumps(json.loads((lock / "1").read_text()) | another))
    (lock / "1").unlink()
    deadline = time.monotonic() + 20
    while not ctx.run.has_lost_folder:  # wait until the lock's thread detects it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def train(folder: Path, held: list[Callback], *, attached: bool = False) -> None:
    model, data = nn.Linear(4, 1), [torch.ones(2, 4)] * 12
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"run_name": "run", "runs_folder": folder, "log_interval": 1}
    if attached:
        with attach(model=model, optimizer=optimizer, callbacks=held, **options) as run:
            for batch in run.steps(data):
                optimizer.zero_grad()
                model(batch).mean().backward()
                optimizer.step()
        return
    Trainer(model, lambda outputs, _: outputs.mean(), data, optimizer=optimizer, callbacks=held, progress=False, **options).fit()


@pytest.mark.parametrize("attached", [False, True])
def test_after_the_lock_is_taken_over_no_file_in_the_folder_changes(
    attached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.05)
    found: dict[str, tuple[int, int]] = {}

    def lose(ctx: Context) -> None:
        if ctx.step == 5:
            take_over(ctx, tmp_path)
            found.update(files_in(tmp_path / "run"))

    logging: list[Callback] = [JSONLLogger(), CSVLogger(), FileLogger()]
    with pytest.raises(RunLockLostError):
        train(tmp_path, [*logging, Heartbeat(seconds=0.001), CheckpointSaver(save_interval="3ba"), At(lose)], attached=attached)
    assert "heartbeat.json" in found
    assert files_in(tmp_path / "run") == found


def lose_folder_on_rank_zero(folder: str, attached: bool) -> tuple[bool, bool]:
    run_lock.HEARTBEAT_SECONDS = 0.05
    runs: list[RunInfo] = []

    def lose(ctx: Context) -> None:
        runs.append(ctx.run)
        if ctx.step == 5 and ctx.run.is_world_process_zero:
            take_over(ctx, Path(folder))

    try:
        train(Path(folder), [At(lose)], attached=attached)
    except CallsheetError as error:
        return isinstance(error, RunLockLostError), runs[-1].has_lost_folder
    return False, runs[-1].has_lost_folder


@pytest.mark.parametrize("attached", [False, True])
def test_after_rank_zero_has_lost_the_lock_no_other_rank_may_write(attached: bool, tmp_path: Path) -> None:
    assert run_ranks(lose_folder_on_rank_zero, 2, str(tmp_path), attached) == [(True, True)] * 2


def test_the_stacks_of_a_hang_are_not_written_to_a_lost_folder(tmp_path: Path) -> None:
    detector = HangDetector(min_seconds=0.2, pause_seconds=0.2)

    def hang(ctx: Context) -> None:
        if ctx.step == 1:
            ctx.run.has_lost_folder = True
            time.sleep(0.8)

    train(tmp_path, [detector, At(hang)])
    assert not (tmp_path / "run" / "hangs").exists()


def test_a_path_outside_the_folder_may_be_written(tmp_path: Path) -> None:
    run = RunInfo("run", folder=tmp_path / "run", ranks=Ranks())
    assert run.may_write(tmp_path / "run" / "a")
    run.has_lost_folder = True
    assert not run.may_write(tmp_path / "run" / "a" / "b")
    assert not run.may_write(os.path.relpath(tmp_path / "run"))
    assert run.may_write(tmp_path / "run-2")
