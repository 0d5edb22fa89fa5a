"""Hosts compare their counts of steps and epochs with the framework's, and record only real differences."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events, create_supervised_trainer
from lightning.pytorch import Callback as LightningCallback
from torch import nn
from transformers import TrainerCallback

from callsheet import Callback, Context
from callsheet.bridges.count_check import Counts
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.huggingface import host as huggingface_host
from callsheet.bridges.ignite import host as ignite_host
from callsheet.bridges.lightning import host as lightning_host
from callsheet.loggers import JSONLLogger
from callsheet.report import RunFolder
from callsheet.report.problems import problems

from .loops import lightning as lightning_loop
from .loops.job import POINTS
from .test_unforeseen import huggingface_trainer


class Counted(Callback):
    """Records how many steps and epochs each run has counted at its end."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, int]] = []

    def on_run_end(self, ctx: Context) -> None:
        self.ends.append((ctx.state.timestamp.batch, ctx.state.timestamp.epoch))


@pytest.mark.usefixtures("counts_may_differ")
def test_a_difference_in_counts_is_logged_once_recorded_and_corrected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(1, 1)
    counts = Counts(4, 7)
    run = HostedRun([JSONLLogger()], model=model, host="The loop", run_name="run", runs_folder=tmp_path)
    run.begin()
    run.counts.follow(lambda: counts)  # the loop has trained 4 steps and 7 epochs before
    run.driver.start("train_step")
    counts = Counts(6, 8)
    run.end_epoch(is_whole=True)
    run.driver.start("train_step")
    counts = Counts(6, 9)
    run.end_epoch(is_whole=True)
    assert run.state.timestamp[1:3] == (2, 2)
    run.finish()
    beginning = "The loop has counted 2 steps, and callsheet 1"
    assert [record.message.startswith(beginning) for record in caplog.records] == [True]
    (end,) = [
        line for line in map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines()) if line["event"] == "run_end"
    ]
    assert end["inexact_counts"].startswith(beginning)
    assert end["inexact_counts"].endswith("from step 1 on")
    (problem,) = [each for each in problems(RunFolder.read(tmp_path / "run")) if "counts" in each.title]
    assert problem.detail == end["inexact_counts"]


@pytest.mark.usefixtures("counts_may_differ")
def test_faults_that_cancel_out_in_the_counts_are_logged_and_recorded_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = Counts(0, 0)
    run = HostedRun([], model=nn.Linear(1, 1), host="The loop", run_name="run", runs_folder=tmp_path)
    run.begin()
    run.counts.follow(lambda: counts)
    for done in (1, 2):
        run.driver.start("train_step")
        counts = Counts(done, done)
        run.end_epoch(is_whole=True)
    run.counts.doubt()
    run.counts.doubt()
    run.finish()
    (message,) = [record.message for record in caplog.records]
    assert message == f"{run.ctx.run.inexact_counts}. Training continues"
    assert message.startswith(
        "The loop has left out, repeated or reordered events; figures per step or epoch may be wrong from step 3 on"
    )


class ReturnsNoLoss(lightning_loop.Module):
    """Returns no loss for one batch, which Lightning counts as a step nevertheless."""

    def training_step(self, batch: Any, index: int) -> Any:
        return None if index == 2 else super().training_step(batch, index)


class SeveralOptimizers(lightning_loop.Module):
    """Steps two optimizers in each batch, so that Lightning's `global_step` grows by two."""

    def __init__(self) -> None:
        super().__init__(POINTS)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.01), torch.optim.SGD(self.parameters(), lr=0.01)]


class LeavesEpoch(LightningCallback):  # type: ignore[misc]
    """Stops training at the second batch of the second epoch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = trainer.current_epoch == 1 and batch_idx == 1


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (lambda: lightning_loop.Module(POINTS), {"accumulate_grad_batches": 4}, (4, 2)),
        (lambda: lightning_loop.Module(POINTS), {"max_steps": 8, "max_epochs": -1}, (8, 1)),
        (lambda: lightning_loop.Module(POINTS), {"num_sanity_val_steps": 2, "val_check_interval": 2}, (12, 2)),
        (lambda: lightning_loop.Module(POINTS), {"limit_train_batches": 5}, (10, 2)),
        (lambda: lightning_loop.Module(POINTS), {"leaves": True}, (8, 1)),
        (lambda: ReturnsNoLoss(POINTS), {}, (12, 2)),
        (SeveralOptimizers, {}, (12, 2)),
    ],
)
def test_the_counts_equal_lightning_s(module: Any, options: dict[str, Any], expected: tuple[int, int], tmp_path: Path) -> None:
    counted, options = Counted(), dict(options)
    callbacks = [lightning_host([counted], strict=False), *([LeavesEpoch()] if options.pop("leaves", False) else [])]
    trainer, module = lightning_loop.quiet_trainer(tmp_path, callbacks, **options), module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, POINTS.batches(), POINTS.validation_batches())
        assert counted.ends == [expected]
        if "max_steps" not in options and trainer.max_epochs > 0:  # fit again with the same Trainer
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1
            trainer.should_stop = False
            trainer.fit(module, POINTS.batches(), POINTS.validation_batches())
            assert len(counted.ends) == 2


@pytest.mark.parametrize("leave", ["terminate", "terminate_epoch"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_counts_equal_ignite_s_after_a_termination(leave: str, accumulate: int, tmp_path: Path) -> None:
    model, counted = POINTS.made_model(), Counted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer: Any = create_supervised_trainer(model, optimizer, POINTS.loss, gradient_accumulation_steps=accumulate)
    hosted = ignite_host(
        [counted], model=model, optimizer=optimizer, gradient_accumulation_steps=accumulate, run_name="small", runs_folder=tmp_path,
        strict=False,
    )  # fmt: skip
    hosted.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=8), getattr(trainer, leave))
    trainer.run(POINTS.batches(), max_epochs=3)
    assert len(counted.ends) == 1


class LeavesEarly(TrainerCallback):  # type: ignore[misc]
    """Leaves the first epoch early."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == 2


@pytest.mark.parametrize("callbacks", [[], [LeavesEarly()]])
def test_the_counts_equal_the_hugging_face_trainer_s_in_each_run(callbacks: list[Any], tmp_path: Path) -> None:
    counted = Counted()
    trainer = huggingface_trainer(tmp_path, huggingface_host([counted]), *callbacks)
    trainer.train()
    trainer.train()  # the Trainer counts from 0 again
    assert counted.ends[0] == counted.ends[1]
    assert counted.ends[0][0] == trainer.state.global_step
