from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.save_on_trigger import SaveOnTrigger
from callsheet.callbacks.support.listeners import LISTENERS, listeners_in
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks


class WritesTrigger(Callback):
    """Writes the trigger file at a step, as an operator would, and records what the loop did."""

    def __init__(self, file: Path, content: str, *, at: int = 3, age: float = 0.0) -> None:
        self.file, self.content, self.at, self.age = file, content, at, age
        self.recorded: list[tuple[str, int]] = []
        self.requested_by: tuple[str, ...] = ()

    def on_train_step_start(self, ctx: Context) -> None:
        if ctx.step == self.at and ctx.run.rank == 0:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(self.content)
            if self.age:
                os.utime(self.file, (time.time() - self.age,) * 2)

    def on_eval_all_start(self, ctx: Context) -> None:
        self.recorded.append(("evaluate", ctx.step))

    def on_checkpoint_save_end(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        self.recorded.append(("save", ctx.step))
        self.requested_by = ctx.checkpoint.requested_by

    def on_train_end(self, ctx: Context) -> None:
        self.recorded.append(("end", ctx.step))


def fit(folder: Path | str, *callbacks: Callback, steps: int = 8, **options: Any) -> Trainer:
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * steps
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        data,
        data[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=callbacks,
        runs_folder=folder,
        run_name="run",
        eval_interval=None,
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("content", "recorded"),
    [
        ("save before the maintenance\n", [("save", 3), ("end", 8)]),
        ("evaluate\n", [("evaluate", 3), ("end", 8)]),
        ("STOP: the budget is used up\n", [("end", 3)]),
        ("save\nevaluate\nstop\n", [("save", 3), ("evaluate", 3), ("end", 3)]),
    ],
)
def test_each_request_is_carried_out_once(content: str, recorded: list[tuple[str, int]], tmp_path: Path) -> None:
    file = tmp_path / "run" / "trigger"
    writes = WritesTrigger(file, content)
    trainer = fit(tmp_path, SaveOnTrigger(seconds=0), writes)
    assert writes.recorded == recorded
    assert not [path for path in file.parent.iterdir() if path.name.startswith("trigger")]
    assert trainer.run.outcome == ("stopped" if "stop" in content.lower() else "finished")
    if "save" in content:
        assert writes.requested_by == ("SaveOnTrigger",)


def test_an_empty_file_requests_a_save_once_it_is_old_enough(tmp_path: Path) -> None:
    fresh, old = WritesTrigger(tmp_path / "fresh", ""), WritesTrigger(tmp_path / "old", "", age=5)
    fit(tmp_path, SaveOnTrigger(file=tmp_path / "fresh", seconds=0), fresh)
    assert fresh.recorded == [("end", 8)]
    assert fresh.file.exists()
    fit(tmp_path / "other", SaveOnTrigger(file=tmp_path / "old", seconds=0), old)
    assert old.recorded == [("save", 3), ("end", 8)]


def test_a_line_without_a_newline_may_be_incomplete(tmp_path: Path) -> None:
    writes = WritesTrigger(tmp_path / "trigger", "stop")
    fit(tmp_path, SaveOnTrigger(file=tmp_path / "trigger", seconds=0), writes)
    assert writes.recorded == [("end", 8)]


def test_an_invalid_request_is_named_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writes = WritesTrigger(tmp_path / "trigger", "sav\n__import__('os').abort()\n\x1b[31m\n" + "x" * 100_000 + "\n", age=5)
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, SaveOnTrigger(file=tmp_path / "trigger", seconds=0), writes)
    assert "unknown request 'sav'; did you mean 'save'?" in caplog.text
    assert "\x1b" not in caplog.text
    assert writes.recorded == [("end", 8)]
    assert not writes.file.exists()


def test_a_link_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "target").write_text("stop\n")
    (tmp_path / "trigger").symlink_to(tmp_path / "target")
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, SaveOnTrigger(file=tmp_path / "trigger", seconds=0))
    assert caplog.text.count("not a regular file") == 1
    assert (tmp_path / "target").exists()


def test_it_checks_during_an_evaluation_too(tmp_path: Path) -> None:
    file = tmp_path / "trigger"

    class DuringEvaluation(Callback):
        def on_eval_step_start(self, ctx: Context) -> None:
            file.write_text("stop enough\n")

        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 3:
                ctx.control.evaluate("now")

    writes = WritesTrigger(tmp_path / "never", "", at=99)
    fit(tmp_path, SaveOnTrigger(file=file, seconds=0), DuringEvaluation(), writes)
    assert writes.recorded == [("evaluate", 3), ("end", 3)]


def test_it_checks_at_the_given_interval(tmp_path: Path) -> None:
    writes = WritesTrigger(tmp_path / "trigger", "stop\n")
    fit(tmp_path, SaveOnTrigger(file=tmp_path / "trigger", seconds=1000), writes)
    assert writes.recorded == [("end", 8)]


def test_two_files_work_in_one_run(tmp_path: Path) -> None:
    other = SaveOnTrigger(file=tmp_path / "two", seconds=0)
    other.name = "two"
    one, two = WritesTrigger(tmp_path / "one", "evaluate\n", at=2), WritesTrigger(tmp_path / "two", "save\n", at=5)
    fit(tmp_path, SaveOnTrigger(file=tmp_path / "one", seconds=0), other, one, two)
    assert two.recorded == [("evaluate", 2), ("save", 5), ("end", 8)]
    assert two.requested_by == ("two",)


class RecordsListeners(Callback):
    """Records the list of trigger files at one step."""

    def __init__(self) -> None:
        self.recorded: dict[str, str] = {}

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 3:
            self.recorded = listeners_in(ctx.run.folder or "")


def test_its_file_is_listed_while_the_run_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named, looks = SaveOnTrigger(file="else/where"), RecordsListeners()
    named.name = "other"
    fit(tmp_path, SaveOnTrigger(), named, looks)
    assert looks.recorded == {"SaveOnTrigger": "trigger", "other": str(tmp_path / "else" / "where")}
    assert not (tmp_path / "run" / LISTENERS).exists()
    with pytest.raises(ValueError, match="on purpose"):
        fit(tmp_path / "fails", SaveOnTrigger(), Fails())
    assert not (tmp_path / "fails" / "run" / LISTENERS).exists()


class Fails(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        raise ValueError("on purpose")


def test_it_checks_its_file_even_if_the_list_of_files_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Hinders(Callback):
        def on_checkpoint_load_end(self, ctx: Context) -> None:
            (tmp_path / "run" / LISTENERS).mkdir(parents=True)

    writes = WritesTrigger(tmp_path / "run" / "trigger", "stop\n")
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, Hinders(), SaveOnTrigger(seconds=0), writes)
    assert writes.recorded == [("end", 3)]
    assert "SaveOnTrigger: cannot write the run's list of trigger files" in caplog.text


def on_ranks(folder: str) -> tuple[list[tuple[str, int]], int]:
    class Slow(Callback):
        def on_train_step_start(self, ctx: Context) -> None:
            time.sleep(0.01)

    writes = WritesTrigger(Path(folder, "trigger"), "save now\nstop now\n", at=3)
    trainer = fit(folder, SaveOnTrigger(file=Path(folder, "trigger"), seconds=0), Slow(), writes, steps=400)
    return writes.recorded, trainer.ctx.step


def test_all_ranks_act_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path))
    assert first == second
    (saved, save_step), (ended, end_step) = first[0]
    assert (saved, ended) == ("save", "end")
    assert 3 <= save_step == end_step < 150
    assert len(find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints) == 1


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="seconds=-1"):
        SaveOnTrigger(seconds=-1)
