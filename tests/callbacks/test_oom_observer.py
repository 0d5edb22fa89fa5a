from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks.oom_observer import OOMObserver
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks


class Fails(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 3:
            raise torch.OutOfMemoryError("none left")


def fit(folder: Path | str, *callbacks: Callback) -> list[list[float]]:
    torch.manual_seed(0)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        [(torch.ones(2, 2), torch.ones(2, 1))] * 6,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        callbacks=callbacks,
        runs_folder=folder,
        run_name="run",
        device="cpu",
    ) as trainer:
        trainer.fit()
    return [parameter.flatten().tolist() for parameter in trainer.model.parameters()]


def test_without_a_device_it_warns_once_and_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = fit(tmp_path / "plain")
    other = OOMObserver(folder=tmp_path / "other")
    other.name = "other"
    with caplog.at_level(logging.WARNING, "callsheet"):
        assert fit(tmp_path, OOMObserver(), other) == plain
    assert caplog.text.count("OOMObserver: there is no CUDA device, so nothing is observed") == 1
    assert caplog.text.count("other: there is no CUDA device") == 1
    assert not (tmp_path / "run").exists()


def test_without_a_device_the_error_is_unchanged(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        fit(tmp_path, OOMObserver(), Fails())
    assert not list(tmp_path.rglob("*.pickle"))


def on_ranks(folder: str) -> list[list[float]]:
    return fit(folder, OOMObserver())


def test_two_ranks_keep_equal_weights(tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, str(tmp_path))
    assert first == second


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="max_entries=0"):
        OOMObserver(max_entries=0)
    with pytest.raises(ConfigError, match="stacks='c'"):
        OOMObserver(stacks="c")  # type: ignore[arg-type]  # the mistake that is tested
