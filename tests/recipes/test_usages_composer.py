"""Usages from Composer's page "Callbacks", written for callsheet: one test per usage, in the order of the page. See `usages`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import callsheet.callbacks
from callsheet import Callback, CallbackManager, Context, Event, Trainer
from callsheet.callbacks import CheckpointSaver, LRMonitor, SpeedMonitor
from callsheet.errors import RegistrationError
from callsheet.loggers import InMemoryLogger
from callsheet.testing import Recorder

from .usages import DATA, train


def test_built_in_monitors_write_to_the_given_logger() -> None:
    logger = InMemoryLogger()
    train([SpeedMonitor(window_size=2), LRMonitor()], loggers=[logger])
    assert logger.history("lr/SGD/0") == ([1, 2, 3, 4, 5, 6], [0.01] * 6)
    assert logger.history("throughput/batches_per_second")[1]


PAGE = {
    *(
        "CheckpointSaver",
        "EarlyStopper",
        "ExportForInferenceCallback",
        "ImageVisualizer",
        "LRMonitor",
        "MLPerfCallback",
        "MemoryMonitor",
    ),
    *("MemorySnapshot", "NaNMonitor", "OOMObserver", "OptimizerMonitor", "RuntimeEstimator", "SpeedMonitor", "ThresholdStopper"),
}


def test_all_callbacks_in_the_page_s_table_exist() -> None:
    assert set(callsheet.callbacks.__all__) >= PAGE


def test_an_event_method_and_on_event_receive_the_same_epochs() -> None:
    class EpochMonitor(Callback):
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def on_epoch_start(self, ctx: Context) -> None:
            self.epochs.append(ctx.state.timestamp.epoch)

    class CatchAll(Callback):
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def on_event(self, ctx: Context) -> None:
            if ctx.event == Event.EPOCH_START:
                self.epochs.append(ctx.state.timestamp.epoch)

    train([one := EpochMonitor(), other := CatchAll()])
    assert one.epochs == other.epochs == [0, 1]  # completed epochs; `ctx.epoch` is the current one, from 1


def test_overriding_both_on_event_and_an_event_method_is_rejected() -> None:
    class Both(Callback):
        def on_event(self, ctx: Context) -> None: ...

        def on_epoch_start(self, ctx: Context) -> None: ...

    # In Composer, the method is silently ignored.
    with pytest.raises(RegistrationError, match="overrides both on_event and on_epoch_start"):
        CallbackManager([Both()])


COMPOSER = {
    "on_run_start": "init",
    "on_checkpoint_load_start": "before_load",
    "on_checkpoint_load_end": "after_load",
    "on_train_start": "fit_start",
    "on_round_start": "iteration_start",
    "on_epoch_start": "epoch_start",
    "on_fetch_start": "before_dataloader",
    "on_fetch_end": "after_dataloader",
    "on_train_step_start": "batch_start",
    "on_forward_backward_start": "before_train_batch",
    "on_forward_start": "before_forward",
    "on_forward_end": "after_forward",
    "on_loss_start": "before_loss",
    "on_loss_end": "after_loss",
    "on_backward_start": "before_backward",
    "on_backward_end": "after_backward",
    "on_forward_backward_end": "after_train_batch",
    "on_train_step_end": "batch_end",
    "on_eval_all_start": "eval_before_all",
    "on_eval_start": "eval_start",
    "on_eval_step_start": "eval_batch_start",
    "on_eval_forward_start": "eval_before_forward",
    "on_eval_forward_end": "eval_after_forward",
    "on_eval_step_end": "eval_batch_end",
    "on_eval_end": "eval_end",
    "on_eval_all_end": "eval_after_all",
    "on_epoch_end": "epoch_end",
    "on_round_end": "iteration_end",
    "on_train_end": "fit_end",
}


def test_events_are_fired_in_the_order_of_the_page_s_pseudocode(tmp_path: Path) -> None:
    """One epoch of two batches of two microbatches, with an evaluation after the second batch."""
    recorded: list[str] = []

    class RecordsEvents(Callback):
        def on_event(self, ctx: Context) -> None:
            if ctx.event == "on_checkpoint_due" and ctx.boundary != "before_eval":
                recorded.append({"step": "batch", "epoch": "epoch", "round": "iteration"}[ctx.boundary] + "_checkpoint")
            elif ctx.event == "on_fetch_end" and ctx.batch is None:
                pass  # the end of the data
            elif str(ctx.event) in COMPOSER:
                recorded.append(COMPOSER[str(ctx.event)])

    data = DATA[:2]
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        data,
        data[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        microbatch_size=2,
        eval_interval="2ba",
        epochs_per_round=1,  # otherwise no round is completed, and its end is not fired
        callbacks=RecordsEvents(),
        runs_folder=tmp_path,
        run_name="run",
        resume="auto",
        device="cpu",
    ) as trainer:
        trainer.fit()
    microbatch = ["before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"]
    fetch = ["before_dataloader", "after_dataloader"]
    batch = [*fetch, "batch_start", "before_train_batch", *microbatch * 2, "after_train_batch", "batch_end"]
    evaluation_batch = ["eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"]
    evaluation = ["eval_before_all", "eval_start", *evaluation_batch, "eval_end", "eval_after_all"]
    assert recorded == [
        *["init", "before_load", "after_load", "fit_start", "iteration_start", "epoch_start"],
        *[*batch, "batch_checkpoint"],
        *[*batch, *evaluation, "batch_checkpoint"],
        "before_dataloader",  # this fetch finds the end of the data
        *["epoch_end", "epoch_checkpoint", "iteration_end", "iteration_checkpoint", "fit_end"],
    ]


def test_ctx_standalone_is_true_only_in_an_evaluation_outside_training() -> None:
    recorded: list[bool] = []
    manager = CallbackManager()
    manager.register("on_eval_all_start", lambda ctx: recorded.append(ctx.standalone))
    with Trainer(nn.Linear(2, 1), nn.functional.mse_loss, callbacks=manager, device="cpu") as trainer:
        trainer.evaluate(DATA)
    train(manager, max_duration="1ep")
    assert recorded == [True, False]


def test_a_parameter_that_is_added_in_on_run_start_is_trained() -> None:
    class Surgery(Callback):
        phase = "change"

        def on_run_start(self, ctx: Context) -> None:
            ctx.model.register_parameter("bias", nn.Parameter(torch.full((1,), 7.0)))

    trainer = train(Surgery())
    assert trainer.model.get_parameter("bias").item() != 7.0  # it is in the optimizer


def test_a_batch_can_be_transformed_in_on_fetch_end() -> None:
    seen: list[float] = []

    class Transform(Callback):
        phase = "change"

        def on_fetch_end(self, ctx: Context) -> None:
            if ctx.batch is not None:
                ctx.batch = (ctx.batch[0] * 0, ctx.batch[1])

    manager = CallbackManager([Transform()])
    manager.register("on_forward_start", lambda ctx: seen.append(ctx.microbatch[0].abs().sum().item()))
    train(manager, max_duration="1ep")
    assert seen == [0.0, 0.0, 0.0]


def test_the_saver_uses_the_evaluation_of_the_same_boundary(tmp_path: Path) -> None:
    kinds: list[tuple[int, str]] = []
    manager = CallbackManager([CheckpointSaver(save_interval=None, save_at_end=False, monitor="validation/loss")])
    manager.register("on_checkpoint_published", lambda ctx: kinds.append((ctx.checkpoint.step, ctx.checkpoint.kind)))
    train(manager, eval_interval="2ba", runs_folder=tmp_path, run_name="run")
    assert kinds == [(2, "best"), (4, "best"), (6, "best")]  # the loss decreases at each evaluation


def test_each_fit_fires_its_events_and_the_run_ends_once() -> None:
    recorder = Recorder()
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=recorder,
        device="cpu",
    ) as trainer:
        trainer.fit()
        trainer.fit("2ep")
    assert [event for event in recorder.events if event in ("on_train_start", "on_train_end", "on_run_end")] == [
        *["on_train_start", "on_train_end"] * 2,
        "on_run_end",
    ]
