from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.heartbeat import Heartbeat
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks


class Probe(Callback):
    """Reads the heartbeat file at each of its events."""

    phase = "restore"

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def on_event(self, ctx: Context) -> None:
        if self.file.exists() and "fetch" not in str(ctx.event):
            self.seen.append((str(ctx.event), json.loads(self.file.read_text())))


def fit(folder: Path | str, *callbacks: Callback, steps: int = 6, fails: bool = False) -> None:
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * steps

    class Acts(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 3:
                ctx.control.save("once", replicated=True)
            if ctx.step == 5 and fails:
                raise RuntimeError("broken")

    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        data,
        data[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=[*callbacks, Acts()],
        runs_folder=folder,
        run_name="run",
        eval_interval="4ba",
        device="cpu",
    ) as trainer:
        trainer.fit()


def test_writes_the_state_and_the_outcome_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "run" / "heartbeat.json"
    probe = Probe(file)
    fit(tmp_path, Heartbeat(seconds=1e-9), probe)
    for event, beat in probe.seen:
        if event == "on_train_step_end":
            assert (beat["state"], beat["step"], beat["batch"]) == ("training", beat["step"], beat["step"])
        if event in ("on_eval_all_start", "on_eval_step_end", "on_eval_end"):
            assert (beat["state"], beat["step"]) == ("evaluating", 4 if beat["step"] == 4 else 6)
    assert [beat["step"] for event, beat in probe.seen if event == "on_train_step_end"] == [1, 2, 3, 4, 5, 6]
    assert [beat["state"] for event, beat in probe.seen if event.startswith("on_checkpoint_save")] == ["saving", "training"]
    last = json.loads(file.read_text())
    assert (last["state"], last["step"], last["pid"], last["rank"]) == ("finished", 6, os.getpid(), 0)
    assert {path.name for path in file.parent.iterdir() if path.is_file()} == {"heartbeat.json", "run.json"}  # no temporary files


def test_a_failure_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, Heartbeat(), fails=True)
    assert json.loads((tmp_path / "run" / "heartbeat.json").read_text())["state"] == "failed"


def test_within_the_interval_only_changes_of_state_are_written(tmp_path: Path) -> None:
    probe = Probe(tmp_path / "beat")
    fit(tmp_path, Heartbeat(file=tmp_path / "beat", seconds=1000), probe)
    assert {beat["step"] for event, beat in probe.seen if event == "on_train_step_end"} == {0, 3, 4}  # changes of state only


def test_readers_never_see_a_partial_file(tmp_path: Path) -> None:
    file, is_over = tmp_path / "beat", threading.Event()
    read: list[int] = []

    def reader() -> None:
        while not is_over.is_set():
            if file.exists():
                read.append(json.loads(file.read_text())["step"])

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        fit(tmp_path, Heartbeat(file=file, seconds=1e-9), steps=300)
    finally:
        is_over.set()
        thread.join()
    assert len(set(read)) > 3
    assert read == sorted(read)


def test_a_deleted_folder_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Remove(Callback):
        def on_train_start(self, ctx: Context) -> None:
            (tmp_path / "beats" / "beat").unlink()
            (tmp_path / "beats").rmdir()

    with caplog.at_level(logging.ERROR, "callsheet"):
        fit(tmp_path, Remove(), Heartbeat(file=tmp_path / "beats" / "beat"))
    assert "Heartbeat" in caplog.text


def on_ranks(folder: str) -> None:
    heartbeat = Heartbeat(ranks="all")
    heartbeat.name = "everybody"
    fit(folder, Heartbeat(), heartbeat)


@pytest.mark.slow
def test_rank_zero_writes_one_file_or_each_rank_its_own(tmp_path: Path) -> None:
    run_ranks(on_ranks, 2, str(tmp_path))
    names = sorted(path.name for path in (tmp_path / "run").glob("heartbeat*.json"))
    assert names == ["heartbeat-rank0.json", "heartbeat-rank1.json", "heartbeat.json"]
    beats = [json.loads((tmp_path / "run" / name).read_text()) for name in names]
    assert [beat["rank"] for beat in beats] == [0, 1, 0]
    assert {beat["state"] for beat in beats} == {"finished"}


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="seconds=0"):
        Heartbeat(seconds=0)
    with pytest.raises(ConfigError, match=r"\{rank\}"):
        Heartbeat(file="beat.json", ranks="all")
