from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.disk_space_guard import DiskSpaceGuard
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks

FILLING, NOISE = 1 << 30, 1 << 29  # in bytes; other processes write to this disk too


class FillsDisk(Callback):
    """Allocates disk space at one step, and frees it at another."""

    def __init__(self, file: Path, *, at: int = 5, until: int = 10_000) -> None:
        self.file, self.at, self.until = file, at, until
        self.saved: list[tuple[int, tuple[str, ...]]] = []

    def on_checkpoint_published(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        self.saved.append((ctx.checkpoint.step, ctx.checkpoint.requested_by))

    def on_train_step_start(self, ctx: Context) -> None:
        if ctx.run.rank == 0 and ctx.step == self.at:
            with open(self.file, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, FILLING)
        if ctx.step == self.until:
            self.file.unlink()


def fit(folder: Path | str, *callbacks: Callback, steps: int = 20, **options: Any) -> Trainer:
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * steps
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=callbacks,
        runs_folder=folder,
        run_name="run",
        log_interval="2ba",
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    return trainer


def space_left(folder: Path | str) -> int:
    """Return a limit in bytes that is reached only when `FillsDisk` has allocated its file."""
    return shutil.disk_usage(folder).free - NOISE


def test_stops_with_a_checkpoint_while_there_is_space(tmp_path: Path) -> None:
    limit = space_left(tmp_path)
    fills = FillsDisk(tmp_path / "filling")
    trainer = fit(tmp_path, fills, DiskSpaceGuard(warn_below=limit, stop_below=limit))
    (tmp_path / "filling").unlink()
    assert (trainer.ctx.step, trainer.run.outcome) == (6, "stopped")
    assert fills.saved == [(6, ("DiskSpaceGuard",))]


def test_warns_once_and_again_after_space_was_freed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit = space_left(tmp_path)
    guard = DiskSpaceGuard(warn_below=limit, stop_below=0)
    with caplog.at_level(logging.WARNING, "callsheet"):
        trainer = fit(tmp_path, FillsDisk(tmp_path / "one", at=3, until=9), FillsDisk(tmp_path / "two", at=13, until=19), guard)
    assert trainer.run.outcome == "finished"
    assert caplog.text.count("are free") == 2


class SaveAndStop(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 3:
            ctx.control.save("to resume")
            ctx.control.stop("to resume")


def test_there_must_be_space_for_the_largest_checkpoint_also_after_a_resume(tmp_path: Path) -> None:
    large, resumed = DiskSpaceGuard(warn_below=1, stop_below=1), DiskSpaceGuard(warn_below=1, stop_below=1)
    # Pretend that a save was this large: there is space for one, but not for 1.1 of them.
    large.load_state_dict({"largest": space_left(tmp_path)})
    fit(tmp_path, SaveAndStop(), large)
    trainer = fit(tmp_path, resumed, resume="auto")
    assert (trainer.ctx.step, trainer.run.outcome) == (4, "stopped")
    assert resumed.state_dict() == large.state_dict()
    assert len(find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints) == 2  # there was space for one more


def test_records_the_size_of_checkpoints(tmp_path: Path) -> None:
    guard = DiskSpaceGuard(warn_below=1, stop_below=1)
    fit(tmp_path, SaveAndStop(), guard)
    (found,) = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    size = sum(path.stat().st_size for path in Path(found.path).rglob("*") if path.is_file())
    assert guard.state_dict()["largest"] == pytest.approx(size, rel=0.1)
    resumed = DiskSpaceGuard(warn_below=1, stop_below=1)
    fit(tmp_path, resumed, resume="auto")  # the checkpoint was written before its size was known
    assert resumed.state_dict() == guard.state_dict()


def test_without_space_for_a_checkpoint_none_is_started(tmp_path: Path) -> None:
    guard = DiskSpaceGuard(warn_below=1, stop_below=1)
    guard.load_state_dict({"largest": 1 << 60})
    assert fit(tmp_path, guard).run.outcome == "stopped"
    assert not find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints


def on_ranks(folder: str, limit: int) -> int:
    guard = DiskSpaceGuard(warn_below=limit, stop_below=limit)
    return fit(folder, FillsDisk(Path(folder, "filling")), guard, steps=2000).ctx.step


def test_all_ranks_stop_at_the_same_step(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path), space_left(tmp_path))
    (tmp_path / "filling").unlink()
    assert first == second
    assert 6 <= first < 2000
    assert len(find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints) == 1


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="warn_below=1, stop_below=2"):
        DiskSpaceGuard(warn_below=1, stop_below=2)
