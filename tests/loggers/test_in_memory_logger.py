from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.errors import ConfigError
from callsheet.loggers import InMemoryLogger
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3


class LogsAllKinds(Callback):
    """Logs data of every kind at every step, and adds values to records, which `Clears` removes."""

    def on_train_step_end(self, ctx: Context) -> None:
        ctx.log_table("table", ["step"], [[ctx.step]])
        ctx.log_images("image", [torch.zeros(2, 2), torch.ones(3, 2, 2)])
        ctx.log_file("file", f"{ctx.step}.txt")
        ctx.log_hyperparameters({"lr": 0.01, "seen": ctx.step})

    def on_log(self, ctx: Context) -> None:
        ctx.log({"shows/added": ctx.step}, across="same")


class Clears(Callback):
    phase = "restore"

    def on_log(self, ctx: Context) -> None:
        ctx.record.values.clear()  # type: ignore[attr-defined]  # it is read-only for a type checker


def fit(folder: Path, logger: InMemoryLogger, *callbacks: Callback, **options: Any) -> None:
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        loggers=[logger],
        runs_folder=folder,
        device="cpu",
        **{"max_duration": "2ep", "log_interval": "1ba", "run_name": "run", "config": {"lr": 0.5, "depth": 2}, **options},
    ) as trainer:
        trainer.fit()


def test_keeps_everything_that_is_logged(tmp_path: Path) -> None:
    logger = InMemoryLogger(images=True)
    fit(tmp_path, logger, LogsAllKinds(), Clears())
    assert [record.step for record in logger.records] == [1, 2, 3, 3, 4, 5, 6, 6]
    steps, losses = logger.history("train/loss")
    assert steps == [1, 2, 3, 4, 5, 6]
    assert losses == sorted(losses, reverse=True)
    assert logger.history("validation/loss")[0] == [3, 6]
    assert logger.history("shows/added") == ([1, 2, 3, 3, 4, 5, 6, 6], [1.0, 2.0, 3.0, 3.0, 4.0, 5.0, 6.0, 6.0])
    assert logger.hyperparameters == {"lr": 0.01, "depth": 2, "seen": 6}
    assert logger.tables["table"] == [(step, ["step"], [[step]]) for step in range(1, 7)]
    assert [step for step, _ in logger.images["image"]] == [1, 2, 3, 4, 5, 6]
    assert [image.tolist() for image in logger.images["image"][0][1]] == [[[[0] * 3] * 2] * 2, [[[255] * 3] * 2] * 2]
    assert logger.images["image"][0][1][0].dtype == numpy.uint8
    assert logger.files == {"file": Path("6.txt")}
    assert logger.costs is not None
    assert "InMemoryLogger" in {cost.callback for cost in logger.costs.costs}


def test_images_are_kept_only_on_request(tmp_path: Path) -> None:
    logger = InMemoryLogger()
    fit(tmp_path, logger, LogsAllKinds())
    assert logger.images == {}


def test_only_the_newest_values_are_kept(tmp_path: Path) -> None:
    logger = InMemoryLogger(most=2, images=True)
    fit(tmp_path, logger, LogsAllKinds())
    assert logger.history("shows/added")[0] == [6, 6]
    assert [step for step, _, _ in logger.tables["table"]] == [5, 6]
    assert [step for step, _ in logger.images["image"]] == [5, 6]


def test_a_run_starts_empty_also_when_resumed(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                ctx.control.save("asked for")
            if ctx.step == 4:
                ctx.control.stop("asked for")

    logger = InMemoryLogger()
    fit(tmp_path, logger, LogsAllKinds(), Saves())
    assert logger.history("train/loss")[0] == [1, 2, 3, 4]
    fit(tmp_path, logger, resume="auto")
    assert logger.history("train/loss")[0] == [3, 4, 5, 6]
    assert not logger.tables
    assert not logger.files
    assert logger.hyperparameters == {"lr": 0.5, "depth": 2}


def test_a_name_that_was_not_logged_is_an_error(tmp_path: Path) -> None:
    logger = InMemoryLogger()
    with pytest.raises(KeyError, match="logged: nothing"):
        logger.history("train/loss")
    fit(tmp_path, logger)
    with pytest.raises(KeyError, match="did you mean 'train/loss'"):
        logger.history("train/los")


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="most=0"):
        InMemoryLogger(most=0)


def on_a_rank(folder: str) -> tuple[int, int]:
    logger, everywhere = InMemoryLogger(), InMemoryLogger()
    everywhere.ranks = "all"
    fit(Path(folder), logger, everywhere)
    return len(logger.records), len(everywhere.records)


def test_only_the_first_rank_keeps_data_by_default(tmp_path: Path) -> None:
    (first, all_of_first), (second, all_of_second) = run_ranks(on_a_rank, 2, str(tmp_path))
    assert first == all_of_first == all_of_second > 0
    assert second == 0
