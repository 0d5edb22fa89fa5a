from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, RunInfo, Trainer
from callsheet.callbacks.save_on_trigger import SaveOnTrigger
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.report import leave_request, withdraw_request


class LeavesRequests(Callback):
    """Writes requests to the trigger file at a step, as another program would."""

    def on_train_step_start(self, ctx: Context) -> None:
        assert ctx.run.folder is not None
        if ctx.step == 3:
            ctx.run.folder.mkdir(exist_ok=True)
            leave_request(ctx.run.folder / "trigger", "save", "before\nthe maintenance")
            leave_request(ctx.run.folder / "trigger", "stop", "for it")


def test_requests_in_the_file_are_carried_out(tmp_path: Path) -> None:
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 8
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=[SaveOnTrigger(seconds=0), LeavesRequests()],
        runs_folder=tmp_path,
        run_name="run",
        device="cpu",
    ) as trainer:
        trainer.fit()
    (saved,) = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert (saved.step, trainer.ctx.step, trainer.run.outcome) == (3, 3, "stopped")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoints", "run.json"}


def test_pending_requests_are_kept_without_duplicates(tmp_path: Path) -> None:
    file = tmp_path / "trigger"
    line = leave_request(file, "save", "one\nsave two")
    assert line == "save one save two"
    assert file.read_text() == "save one save two\n"
    leave_request(file, "stop")
    leave_request(file, "save", "three")
    assert sorted(file.read_text().splitlines()) == ["save three", "stop"]
    assert [path.name for path in tmp_path.iterdir()] == ["trigger"]


def test_requests_of_an_operator_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "trigger"
    file.touch()
    leave_request(file, "stop")
    assert sorted(file.read_text().splitlines()) == ["save", "stop"]  # an empty file requests a save
    file.write_text("evaluate without an end")
    line = leave_request(file, "stop", "x" * 5000)
    assert sorted(file.read_text().splitlines()) == ["evaluate without an end", line]
    assert len(line) < 300


def test_a_single_request_can_be_withdrawn(tmp_path: Path) -> None:
    file = tmp_path / "trigger"
    line = leave_request(file, "stop", "too soon")
    leave_request(file, "save")
    withdraw_request(file, line)
    assert file.read_text() == "save\n"
    withdraw_request(file, "save")
    assert not file.exists()
    withdraw_request(file, "save")
    assert not list(tmp_path.iterdir())


def test_a_harmful_request_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown request 'stopp'; did you mean 'stop'"):
        leave_request(tmp_path / "trigger", "stopp")
    (tmp_path / "target").write_text("a secret\n")
    (tmp_path / "trigger").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="not a regular file"):
        leave_request(tmp_path / "trigger", "stop")
    assert (tmp_path / "target").read_text() == "a secret\n"
    with pytest.raises(OSError, match="nowhere"):
        leave_request(tmp_path / "nowhere" / "trigger", "stop")


def test_no_request_is_lost_while_one_thread_writes_and_one_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last request of each kind is read, and none is read twice. A newer request replaces a pending one of its kind."""
    taken: list[str] = []
    trigger = SaveOnTrigger(file=tmp_path / "trigger", seconds=0)
    trigger.on_run_start(Context(RunInfo("run")))
    done = threading.Event()

    def take() -> None:
        while not done.is_set() or (tmp_path / "trigger").exists():
            taken.extend(trigger._take_lines())

    capture = threading.Thread(target=take)
    capture.start()
    for number in range(300):
        leave_request(tmp_path / "trigger", "save", str(number))
        leave_request(tmp_path / "trigger", "stop", str(number))
    done.set()
    capture.join(60)
    assert not capture.is_alive()
    for word in ("save", "stop"):
        numbers = [int(line.split()[1]) for line in taken if line.startswith(word)]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == 299
    assert not list(tmp_path.iterdir())
    assert not caplog.records


def test_requests_are_written_although_links_are_not_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", reject)
    leave_request(tmp_path / "trigger", "save")
    leave_request(tmp_path / "trigger", "stop")
    assert sorted((tmp_path / "trigger").read_text().splitlines()) == ["save", "stop"]
    assert [path.name for path in tmp_path.iterdir()] == ["trigger"]
