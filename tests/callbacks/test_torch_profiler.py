from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile, record_function

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.torch_profiler import TorchProfiler
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks


class Marks(Callback):
    """Marks every step in the trace with its number. Fails at step `fails_at`, and saves and stops at step `stops_at`."""

    def __init__(self, fails_at: int = 0, stops_at: int = 0) -> None:
        self.fails_at, self.stops_at = fails_at, stops_at

    def on_forward_backward_end(self, ctx: Context) -> None:
        with record_function(f"the step {ctx.step}"):
            if ctx.step == self.fails_at:
                raise RuntimeError("broken")

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.stops_at:
            ctx.control.save("to resume")
            ctx.control.stop("to resume")


def fit(folder: Path | str, *callbacks: Callback, **options: Any) -> Trainer:
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 20
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=callbacks,
        runs_folder=folder,
        run_name="run",
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    assert not torch._C._autograd._profiler_enabled()
    return trainer


def traces(folder: Path) -> dict[str, list[int]]:
    """Return the steps in each trace, by file name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
        found[path.name] = sorted(int(name.removeprefix("the step ")) for name in names if name.startswith("the step "))
    return found


def test_profiles_the_given_steps(tmp_path: Path) -> None:
    fit(tmp_path, Marks(), TorchProfiler(skip_first=3, wait=2, warmup=1, active=2, repeat=2))
    assert traces(tmp_path / "run" / "traces") == {
        "TorchProfiler-step8-rank0.json": [7, 8],
        "TorchProfiler-step13-rank0.json": [12, 13],
    }


def test_profiles_from_the_first_step_and_repeats_without_end(tmp_path: Path) -> None:
    fit(tmp_path, Marks(), TorchProfiler(skip_first=0, wait=0, warmup=0, active=6, repeat=0))
    assert traces(tmp_path / "run" / "traces") == {
        "TorchProfiler-step6-rank0.json": [1, 2, 3, 4, 5, 6],
        "TorchProfiler-step12-rank0.json": [7, 8, 9, 10, 11, 12],
        "TorchProfiler-step18-rank0.json": [13, 14, 15, 16, 17, 18],
        "TorchProfiler-step20-rank0.json": [19, 20],  # shortened by the end of the run
    }


def test_the_steps_before_an_exception_are_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, Marks(fails_at=6), TorchProfiler(skip_first=3, wait=0, warmup=1, active=5))
    assert not torch._C._autograd._profiler_enabled()
    assert traces(tmp_path / "run" / "traces") == {"TorchProfiler-step6-rank0.json": [5, 6]}


def test_a_resumed_run_continues_with_the_steps_of_the_run(tmp_path: Path) -> None:
    fit(tmp_path, Marks(stops_at=9), TorchProfiler(skip_first=3, wait=2, warmup=1, active=2, repeat=2))
    assert list(traces(tmp_path / "run" / "traces")) == ["TorchProfiler-step8-rank0.json"]
    fit(tmp_path, Marks(), TorchProfiler(skip_first=3, wait=2, warmup=1, active=2, repeat=2), resume="auto")
    assert traces(tmp_path / "run" / "traces")["TorchProfiler-step13-rank0.json"] == [12, 13]
    assert len(traces(tmp_path / "run" / "traces")) == 2


def test_two_instances_work_in_one_run_one_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    early = TorchProfiler(skip_first=0, wait=0, warmup=1, active=3, folder=tmp_path / "own")
    late = TorchProfiler(skip_first=8, wait=0, warmup=1, active=1)
    overlapping = TorchProfiler(skip_first=9, wait=0, warmup=0, active=1)
    early.name, late.name, overlapping.name = "early", "late", "overlapping"
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, Marks(), early, late, overlapping)
    assert traces(tmp_path / "own") == {"early-step4-rank0.json": [2, 3, 4]}
    assert traces(tmp_path / "run" / "traces") == {"late-step10-rank0.json": [10]}
    assert "overlapping: the steps from 10 on are not profiled" in caplog.text


def test_if_two_instances_would_overlap_in_the_warm_up_only_one_profiles(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (TorchProfiler(skip_first=1, wait=0, warmup=2, active=2) for _ in range(2))
    one.name, other.name = "one", "other"
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, Marks(), one, other)
    assert traces(tmp_path / "run" / "traces") == {"one-step5-rank0.json": [4, 5]}
    assert "other: the steps from 2 on are not profiled" in caplog.text


def test_another_profiler_is_not_disturbed(tmp_path: Path) -> None:
    with profile() as other_profiler:
        data = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
        with Trainer(
            nn.Linear(2, 1),
            nn.functional.mse_loss,
            data,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
            callbacks=[TorchProfiler(skip_first=0, wait=0, warmup=0, active=1)],
            runs_folder=tmp_path,
            device="cpu",
        ) as trainer:
            trainer.fit()
    assert other_profiler.key_averages()


def on_ranks(folder: str) -> None:
    zero = TorchProfiler(skip_first=4, wait=0, warmup=0, active=1, ranks="zero")
    zero.name = "zero"
    fit(folder, Marks(), TorchProfiler(skip_first=1, wait=0, warmup=0, active=1), zero)


def test_each_rank_writes_its_own_trace(tmp_path: Path) -> None:
    run_ranks(on_ranks, 2, str(tmp_path))
    assert set(traces(tmp_path / "run" / "traces")) == {
        "TorchProfiler-step2-rank0.json",
        "TorchProfiler-step2-rank1.json",
        "zero-step5-rank0.json",
    }


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="active=0: give 1 or more"):
        TorchProfiler(active=0)
