"""Recordings of the device's memory, and the files that are written from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.memory_monitor import MemoryMonitor
from callsheet.callbacks.memory_snapshot import MemorySnapshot
from callsheet.callbacks.oom_observer import OOMObserver

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class AllocatesTooMuch(Callback):
    """Allocates more memory than the device has at a step."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.held: Tensor | None = None

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.at:
            self.held = torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def fit(folder: Path, *callbacks: Callback) -> list[dict[str, float]]:
    records: list[dict[str, float]] = []
    with Trainer(
        nn.Linear(256, 256),
        nn.functional.mse_loss,
        [(torch.ones(64, 256), torch.ones(64, 256))] * 8,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        callbacks=callbacks,
        runs_folder=folder,
        run_name="run",
        log_interval="2ba",
        device="cuda",
    ) as trainer:
        trainer.callbacks.register("on_log", lambda ctx: records.append(dict(ctx.record.values)), phase="report")
        trainer.fit()
    return records


def test_a_snapshot_is_written_and_drawn(tmp_path: Path) -> None:
    fit(tmp_path, MemorySnapshot())
    folder = tmp_path / "run" / "memory"
    names = {path.name for path in folder.iterdir()}
    assert names == {f"MemorySnapshot-step4-rank0{end}" for end in (".pickle", ".html", "-segments.html")}
    assert (folder / "MemorySnapshot-step4-rank0.html").stat().st_size > 10_000


def test_a_snapshot_is_written_when_memory_runs_out(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        fit(tmp_path, OOMObserver(), AllocatesTooMuch(3))
    names = {path.name for path in (tmp_path / "run" / "memory").iterdir()}
    assert names == {f"OOMObserver-oom-rank0{end}" for end in (".pickle", ".html", "-segments.html")}


def test_a_run_with_enough_memory_writes_nothing(tmp_path: Path) -> None:
    fit(tmp_path, OOMObserver())
    assert not (tmp_path / "run").exists()


def test_the_allocators_counters_are_shown(tmp_path: Path) -> None:
    record = fit(tmp_path, MemoryMonitor())[-1]
    assert 0 < record["memory/allocated"] <= record["memory/peak_allocated"] <= record["memory/peak_reserved"]
    assert record["memory/ooms"] >= 0
