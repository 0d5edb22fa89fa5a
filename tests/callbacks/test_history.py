from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks import CheckpointSaver, LRMonitor
from callsheet.callbacks.history import History
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import ConfigError
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 4
TIMED = ("train/tokens_per_second",)


class LogsNonFinite(Callback):
    """Logs non-finite values at odd steps (only on rank 1 if it exists), and adds values to the record."""

    phase = "decide"

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step % 2 and ctx.run.rank == ctx.run.world_size - 1:
            ctx.log({"odd/nan": math.nan})

    def on_log(self, ctx: Context) -> None:
        ctx.log({"odd/added": ctx.step}, across="same")


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    torch.manual_seed(1)
    return Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        {"one": DATA[:1], "two": DATA[1:]},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.125),
        callbacks=CallbackManager(callbacks, checking=True),
        runs_folder=folder,
        device="cpu",
        **({"max_duration": "3ep", "run_name": "run", "log_interval": "1ba", "eval_interval": "6ba"} | options),
    )


def fit(folder: Path, *callbacks: Callback, **options: Any) -> History:
    history = History()
    with trainer(folder, history, *callbacks, **options) as trained:
        trained.fit()
    return history


def plain(history: History) -> str:
    """Return the whole history as text, so that NaN equals NaN."""
    return repr((history.records, history.evaluations))


def test_columns_have_the_logged_values_and_their_steps(tmp_path: Path) -> None:
    history = fit(tmp_path, LogsNonFinite(), LRMonitor(), log_interval="2ba")
    assert history.steps("train/loss") == [2, 4, 6, 8, 10, 12]
    assert history["lr/SGD/0"] == [0.125] * 6
    losses = history["train/loss"]
    assert losses == sorted(losses, reverse=True)
    assert all(map(math.isnan, history["odd/nan"]))
    assert history["one/loss"] == [results["one"]["loss"] for _, results in history.evaluations]
    assert history.steps("one/loss") == [step for step, _ in history.evaluations] == [6, 12]
    assert set(history.evaluations[0][1]) == {"one", "two"}


def test_additions_to_a_record_are_kept_in_any_order_of_callbacks(tmp_path: Path) -> None:
    history = fit(tmp_path, LogsNonFinite(), eval_interval=None)
    assert history["odd/added"] == [float(step) for step in range(1, 13)]


def test_a_record_that_is_kept_is_not_changed_later(tmp_path: Path) -> None:
    class Late(Callback):
        phase = "restore"

        def on_log(self, ctx: Context) -> None:
            ctx.record.values.clear()  # type: ignore[attr-defined]  # it is read-only for a type checker

    assert len(fit(tmp_path, Late(), eval_interval=None)["train/loss"]) == 12


def test_manual_evaluations_are_left_out(tmp_path: Path) -> None:
    history = History()
    with trainer(tmp_path, history) as trained:
        trained.evaluate()
        trained.fit()
        trained.evaluate()
    assert [step for step, _ in history.evaluations] == [6, 12]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = fit(tmp_path, LogsNonFinite(), CheckpointSaver(save_interval="1ba", keep=None))
    found = find_checkpoints(tmp_path / "run" / "checkpoints").checkpoints
    assert len(found) >= 12
    for checkpoint in found:
        history = fit(tmp_path, LogsNonFinite(), resume=checkpoint.path, run_name=f"from-{Path(checkpoint.path).name}")
        assert plain(history) == plain(whole)


def test_only_the_newest_records_and_evaluations_are_kept(tmp_path: Path) -> None:
    history = History(most=3)
    with trainer(tmp_path, history, eval_interval="2ba") as trained:
        trained.fit()
    assert len(history.records) == 3
    assert [step for step, _ in history.evaluations] == [8, 10, 12]


def test_a_new_run_starts_from_scratch_and_a_further_fit_continues(tmp_path: Path) -> None:
    history = History()
    for name in ("run", "other"):
        with trainer(tmp_path, history, run_name=name) as trained:
            trained.fit("1ep")
            trained.fit("2ep")
        assert history.steps("train/loss") == list(range(1, 9))


def test_two_instances_work_in_one_run(tmp_path: Path) -> None:
    short = History(most=1)
    short.name = "short"
    whole = fit(tmp_path, short, CheckpointSaver())
    assert short.records == whole.records[-1:]


def test_a_name_that_was_not_logged_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="did you mean 'train/loss'"):
        fit(tmp_path)["train/los"]


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="most=0"):
        History(most=0)


def on_a_rank(folder: str) -> str:
    assert os.environ["WORLD_SIZE"] == "2"
    history = fit(Path(folder), LogsNonFinite())
    assert history.steps("odd/nan") == [1, 3, 5]
    return plain(history)


def test_two_ranks_keep_the_same_history(tmp_path: Path) -> None:
    one, other = run_ranks(on_a_rank, 2, str(tmp_path))
    assert one == other
