"""A hand-written loop with callbacks attached: training is unchanged, and the lifecycle's events are fired."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from callsheet import Callback, CallbackManager, Context, Trainer, attach, every
from callsheet.bridges.attached_run import AttachedRun
from callsheet.callbacks import (
    EMA,
    CheckpointSaver,
    EarlyStopper,
    GradientAccumulationScheduler,
    Heartbeat,
    History,
    Lambda,
    LRMonitor,
    OptimizerMonitor,
    SpeedMonitor,
)
from callsheet.checkpoint import read_checkpoint, read_manifest, write_checkpoint
from callsheet.errors import CheckpointError, ConfigError, NotSupported, RequestRejected
from callsheet.loggers import CSVLogger, FileLogger, JSONLLogger, TensorboardLogger
from callsheet.run.agreement import MAX_PERIOD_STEPS
from callsheet.testing import Recorder, check_events, run_ranks
from trainer.resumed_data import ATTACH, Case, result_of  # type: ignore[import-not-found]  # the tests are not a package for mypy

BATCHES = 5


def parts(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = torch.randn(4 * BATCHES, 3)
    return model, optimizer, DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)


def bare(epochs: int, accumulate: int = 1) -> tuple[nn.Module, list[float]]:
    """Train with the loop without callsheet."""
    model, optimizer, data = parts()
    losses = []
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(data, 1):
            loss = nn.functional.mse_loss(model(inputs), targets) / accumulate
            loss.backward()
            losses.append(loss.item())
            if number % accumulate == 0 or number == BATCHES:
                optimizer.step()
                optimizer.zero_grad()
    return model, losses


def attached(
    epochs: int, callbacks: Any, accumulate: int = 1, folder: Path | None = None, **options: Any
) -> tuple[nn.Module, AttachedRun]:
    """Train with the same loop and callbacks attached."""
    model, optimizer, data = parts()
    if folder is not None:
        options = {"run_name": "run", "runs_folder": folder, **options}
    with attach(
        model=model, optimizer=optimizer, callbacks=callbacks, gradient_accumulation_steps=accumulate, log_interval=1, **options
    ) as run:
        for _ in run.epochs(epochs):
            for number, (inputs, targets) in enumerate(run.steps(data), 1):
                loss = nn.functional.mse_loss(model(inputs), targets) / accumulate
                loss.backward()
                if number % accumulate == 0 or number == BATCHES:
                    optimizer.step()
                    optimizer.zero_grad()
    return model, run


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_unchanged_and_every_event_is_fired(accumulate: int) -> None:
    recorder, history = Recorder(fields=("loss", "learning_rate", "batch")), History()
    model, losses = bare(2, accumulate)
    other, run = attached(2, [recorder, history, SpeedMonitor(), OptimizerMonitor(), LRMonitor()], accumulate)
    assert same(model, other)
    check_events(recorder.events)
    steps = -(-BATCHES // accumulate)
    assert recorder.events.count("on_train_step_end") == 2 * steps
    assert recorder.events.count("on_backward_end") == 2 * BATCHES
    assert recorder.events.count("on_epoch_end") == 2
    assert run.ctx.run.outcome == "finished"
    recorded = [
        losses[at : at + accumulate]
        for epoch in (losses[:BATCHES], losses[BATCHES:])
        for at in range(0, BATCHES, accumulate)
        for losses in (epoch,)
    ]
    assert history["train/loss"] == pytest.approx([sum(step) for step in recorded])
    assert history["time/sample"][-1] == 8 * BATCHES


def test_no_hooks_and_patches_are_left_after_the_run() -> None:
    before = Tensor.backward
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[Recorder()], strict=False) as run:
        assert Tensor.backward is not before
        next(run.steps(data))
    assert Tensor.backward is before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


class Stopper(Callback):
    """Requests a stop."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            ctx.control.stop("enough")


def test_a_callback_stops_the_loop() -> None:
    recorder = Recorder()
    _, run = attached(4, [recorder, Stopper(7)])
    assert recorder.recorded[-1].batch == 7
    assert run.ctx.run.outcome == "stopped"
    check_events(recorder.events)


def test_the_duration_ends_the_loop() -> None:
    recorder = Recorder()
    attached(4, [recorder], max_duration="1ep")
    assert recorder.recorded[-1].batch == BATCHES
    check_events(recorder.events)


@pytest.mark.parametrize("step", [3, 5, 7])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_run(step: int, tmp_path: Path) -> None:
    whole, _ = bare(3)
    history = History()
    attached(3, [Stopper(step), CheckpointSaver(save_interval="1ba"), History()], folder=tmp_path)
    model, run = attached(3, [CheckpointSaver(save_interval="1ba"), history], folder=tmp_path, resume="auto")
    assert run.ctx.state.timestamp.batch == 3 * BATCHES
    assert len(history["train/loss"]) == 3 * BATCHES
    assert same(model, whole)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_scheduler_that_changes_the_momentum_causes_no_warning_of_other_options(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(duration: str) -> None:
        model, _, data = parts()
        options = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        saver = CheckpointSaver(save_interval="1ba")
        with attach(
            model=model, optimizer=optimizer, scheduler=scheduler, callbacks=saver, run_name="run", runs_folder=tmp_path,
            resume="auto", max_duration=duration,
        ) as run:  # fmt: skip
            for _ in run.epochs(4):
                for inputs, _ in run.steps(data):
                    model(inputs).sum().backward()
                    optimizer.step()
                    scheduler.step()

    train("3ba")
    train("6ba")
    assert "in the checkpoint" not in caplog.text


def test_a_checkpoint_with_a_position_in_an_older_form_is_rejected(tmp_path: Path) -> None:
    """Until 2026-11-24, callsheet 0.1.0 stored the position in the data in another form."""
    attached(3, [Stopper(5), CheckpointSaver(save_interval="1ba")], folder=tmp_path)
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("*-ba5")
    saved = read_checkpoint(checkpoint)
    position = saved.local["place"]
    saved.local["place"] = {"taken": position["taken"], "epoch_began": {}, "now": position["now"]["global"], "loader": None}
    write_checkpoint(tmp_path / "older", saved.shared, saved.local, read_manifest(checkpoint).info)
    with pytest.raises(CheckpointError, match=r"was written by a version of callsheet 0\.1\.0 from before 2026-11-24"):
        attached(3, [], folder=tmp_path, resume=tmp_path / "older")


def test_a_signal_saves_and_preempts_the_run(tmp_path: Path) -> None:
    class Kill(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    recorder = Recorder()
    _, run = attached(3, [Kill(), recorder], folder=tmp_path)
    assert run.preempted
    assert run.ctx.run.outcome == "preempted"
    assert recorder.events.count("on_preempt") == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()] == ["ep0-ba4"]
    check_events(recorder.events)


def test_preempt_signals_may_be_a_single_name(tmp_path: Path) -> None:
    class Kill(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            signal.raise_signal(signal.SIGUSR1)

    _, run = attached(3, [Kill()], folder=tmp_path, preempt_signals="SIGUSR1")
    assert run.preempted
    assert run.ctx.step == 1


def test_handlers_of_an_evaluation_share_user_state_and_can_mute_handlers_of_training(tmp_path: Path) -> None:
    class Watches(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_step_end(self, ctx: Context) -> None:
            self.steps.append(ctx.step)
            ctx.user_state["step"] = ctx.step

        def on_eval_end(self, ctx: Context) -> None:
            ctx.user_state["evaluated after"] = ctx.user_state["step"]
            ctx.mute(self, "on_train_step_end")

    watches = Watches()
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[watches], runs_folder=tmp_path) as run:
        for _ in range(2):
            for inputs, targets in run.steps(data):
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            run.evaluated({"validation": {"loss": 1.0}})
    assert watches.steps == list(range(1, len(data) + 1))
    assert run.ctx.user_state["evaluated after"] == len(data)


def test_ctrl_c_saves_a_checkpoint_and_raises_keyboard_interrupt(tmp_path: Path) -> None:
    class Interrupt(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        attached(3, [Interrupt()], folder=tmp_path)
    assert (tmp_path / "run" / "checkpoints" / "ep0-ba2").is_dir()


def test_an_exception_of_the_loop_is_reported_and_raised() -> None:
    recorder = Recorder(fields=("exception", "span"))
    model, optimizer, data = parts()
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        attach(model=model, optimizer=optimizer, callbacks=[recorder]) as run,
    ):
        for number, (inputs, _) in enumerate(run.steps(data)):
            model(inputs).sum().backward()
            optimizer.step()
            _ = 1 / (2 - number)
    assert run.ctx.run.outcome == "failed"
    assert recorder.events[-2:] == ["on_exception", "on_run_end"]
    assert isinstance(recorder.values["exception"][0][1], ZeroDivisionError)
    check_events(recorder.events)
    assert Tensor.backward.__name__ == "backward"


def test_a_break_ends_the_epoch() -> None:
    recorder = Recorder()
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[recorder]) as run:
        for _ in range(2):
            for number, (inputs, _) in enumerate(run.steps(data), 1):
                model(inputs).sum().backward()
                optimizer.step()
                if number == 2:
                    break
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == 4
    assert recorder.events.count("on_epoch_end") == 2
    assert run.ctx.run.outcome == "finished"


def test_each_epoch_may_end_with_a_break_or_have_no_steps() -> None:
    recorder = Recorder()
    model, optimizer, data = parts()
    epochs: list[int] = []
    with attach(model=model, optimizer=optimizer, callbacks=[recorder]) as run:
        for epoch in run.epochs(4):
            epochs.append(epoch)
            if epoch == 1:
                continue
            for number, (inputs, _) in enumerate(run.steps(data), 1):
                model(inputs).sum().backward()
                optimizer.step()
                if number == 2:
                    break
    check_events(recorder.events)
    assert epochs == [0, 1, 2, 3]
    assert recorder.events.count("on_train_step_end") == 6
    assert recorder.events.count("on_epoch_end") == 3
    assert run.ctx.run.outcome == "finished"


def test_a_loop_may_skip_its_first_batches() -> None:
    recorder = Recorder()
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[recorder, SpeedMonitor()]) as run:
        for number, (inputs, _) in enumerate(run.steps(data)):
            if number < 2:
                continue
            model(inputs).sum().backward()
            optimizer.step()
    check_events(recorder.events)
    assert run.ctx.step == BATCHES


@pytest.mark.parametrize("listens", [True, False])
def test_a_batch_of_none_is_passed_on(listens: bool) -> None:
    recorder = Recorder()
    model, optimizer, _ = parts()
    data, trained = [torch.ones(2, 3), None, torch.ones(2, 3)], 0
    with attach(model=model, optimizer=optimizer, callbacks=[recorder] if listens else []) as run:
        for _ in run.epochs(2):
            for batch in run.steps(data):
                if batch is None:
                    continue
                model(batch).sum().backward()
                optimizer.step()
                trained += 1
    assert trained == 4
    assert run.ctx.step == 6
    if listens:
        check_events(recorder.events)


@pytest.mark.parametrize("callbacks", [[], [OptimizerMonitor()], [SpeedMonitor()]], ids=["none", "backward", "timing"])
def test_the_loss_of_a_step_includes_each_backward_of_several_optimizer_steps(callbacks: list[Callback]) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(model=model, optimizer=optimizer, callbacks=[*callbacks, history := History()], log_interval=1) as run:
        for batch in run.steps([torch.ones(1, 1)] * 12):
            for _ in range(3):
                (model(batch).sum() * 0 + 1.5).backward()
                optimizer.step()
    assert history["train/loss"] == [4.5] * 12


def test_an_optimizer_step_inside_the_batches_of_a_step_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[], gradient_accumulation_steps=2) as run:
        for inputs, _ in run.steps(data):
            model(inputs).sum().backward()
            optimizer.step()
    (warning,) = caplog.messages
    assert warning.startswith("the loop has stepped the optimizer after batch 1 of 2.")


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (None, r"^evaluate= has returned None: give the results by dataset name"),
        ({"loss": 1.0}, r"^evaluate= has returned \{'loss': 1\.0\}: give the results by dataset name"),
        ({"test": {"loss": "low"}}, r"^evaluate= has returned test/loss = low: this is not a number"),
    ],
)
def test_wrong_results_of_an_evaluation_are_rejected(results: Any, message: str) -> None:
    class Asks(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            ctx.control.evaluate("to see")

    with pytest.raises(ConfigError, match=message):
        attached(1, [Asks()], evaluate=lambda: results)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"scheduler": len}, r"^scheduler= is a builtin_function_or_method without state_dict\(\)"),
        ({"evaluate": 3}, r"^evaluate=3: give a function"),
        ({"config": [1]}, r"^config= is a list; give the settings by name"),
    ],
)
def test_wrong_arguments_are_rejected_at_once(option: dict[str, Any], message: str) -> None:
    model, optimizer, _ = parts()
    with pytest.raises(ConfigError, match=message):
        attach(model=model, optimizer=optimizer, callbacks=[], **option)


def test_a_run_that_has_ended_cannot_be_used_again() -> None:
    recorder = Recorder()
    model, optimizer, data = parts()
    run = attach(model=model, optimizer=optimizer, callbacks=[recorder])

    def train() -> None:
        for inputs, _ in run.steps(data):
            model(inputs).sum().backward()
            optimizer.step()

    with run:
        train()
    events = list(recorder.events)
    with pytest.raises(RequestRejected, match=r"^steps\(\) after the run's end"):
        train()
    with pytest.raises(RequestRejected, match=r"^this run has ended; call callsheet\.attach again"), run:
        train()
    assert recorder.events == events


def test_a_loop_that_leaves_its_epochs_with_break_ends_at_its_duration(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=recorder, max_duration="2ep") as run:
        for _ in range(4):
            for inputs, _ in run.steps(data):
                model(inputs).sum().backward()
                optimizer.step()
                if not run.ctx.step % 2:
                    break
    assert run.ctx.step == 4
    assert recorder.events.count("on_epoch_end") == 2
    check_events(recorder.events)
    (warning,) = caplog.messages
    assert warning.startswith("training has ended at step 4 (reached max_duration, 2ep)")


def test_after_a_break_a_resume_continues_at_the_same_step(tmp_path: Path) -> None:
    data = [torch.full((1, 1), float(number)) for number in range(10)]

    def trained(breaks: list[int], resume: str | None = None) -> list[list[float]]:
        model, seen = nn.Linear(1, 1), list[list[float]]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        saver = CheckpointSaver(save_interval="1ba")
        with attach(
            model=model, optimizer=optimizer, callbacks=saver, run_name="run", runs_folder=tmp_path, log_interval=1, resume=resume
        ) as run:
            for last in breaks:
                seen.append([])
                for batch in run.steps(data):
                    model(batch).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    seen[-1].append(float(batch))
                    if len(seen[-1]) == last:
                        break
        return seen

    assert trained([4, 3]) == [[0, 1, 2, 3], [0, 1, 2]]
    assert trained([99], resume="auto") == [[3, 4, 5, 6, 7, 8, 9]]


def test_an_error_names_a_handler_that_is_a_partial_function() -> None:
    def handle(number: int, ctx: Context) -> None: ...

    manager = CallbackManager()
    manager.register("on_forward_end", functools.partial(handle, 1))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with attach(model=model, optimizer=optimizer, callbacks=manager) as run:
            for batch in run.steps([torch.zeros(1, 1)]):
                (model.weight.sum() * batch.sum()).backward()  # the model is not called
                optimizer.step()

    with pytest.raises(NotSupported, match=r"partial.* listens to on_forward_end"):
        train()


@pytest.mark.parametrize("within", [True, False])
def test_the_loop_s_evaluations_are_reported(within: bool, tmp_path: Path) -> None:
    """Evaluations during a step or between epochs are reported, and callbacks can make decisions from them."""
    recorder, history = Recorder(fields=("eval_results",)), History()
    saver = CheckpointSaver(save_interval="1ep", monitor="validation/loss", keep=1)
    callbacks = [recorder, history, saver, EarlyStopper(monitor="validation/loss", patience="1ep")]
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=callbacks, run_name="run", runs_folder=tmp_path) as run:
        for epoch in run.epochs(9):
            for number, (inputs, targets) in enumerate(run.steps(data), 1):
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                if within and number == BATCHES:
                    run.evaluated({"validation": {"loss": float(epoch)}})
            if not within:
                run.evaluated({"validation": {"loss": float(epoch)}})
    check_events(recorder.events)
    assert history["validation/loss"][:2] == [0.0, 1.0]
    assert run.ctx.run.outcome == "stopped"
    assert run.ctx.step == 2 * BATCHES  # the second evaluation stops the run, and no further step is trained


def train_until_stop_at_evaluation(rank: int, stop_on: int, folder: str) -> tuple[int, str]:
    class StopsOnOneRank(Callback):
        def on_eval_all_end(self, ctx: Context) -> None:
            if rank == stop_on:
                ctx.control.stop("good enough")

    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=StopsOnOneRank(), run_name="run", runs_folder=folder) as run:
        for epoch in run.epochs(3):
            for inputs, _ in run.steps(data):
                model(inputs).sum().backward()
                optimizer.step()
            run.evaluated({"validation": {"loss": float(epoch)}})
    return run.ctx.step, str(run.ctx.run.outcome)


def train_rank_until_stop_at_evaluation(folder: str) -> tuple[int, str]:
    torch.distributed.init_process_group("gloo")
    found = train_until_stop_at_evaluation(torch.distributed.get_rank(), 1, folder)
    torch.distributed.destroy_process_group()
    return found


def test_a_stop_at_an_evaluation_between_epochs_acts_at_once_on_all_ranks(tmp_path: Path) -> None:
    assert run_ranks(train_rank_until_stop_at_evaluation, 2, str(tmp_path)) == [(BATCHES, "stopped")] * 2


def test_a_signal_in_an_evaluation_between_epochs_ends_the_run_without_a_further_step(tmp_path: Path) -> None:
    def train(epochs: int, *, is_cut: bool = False, resume: str | None = None) -> tuple[nn.Module, AttachedRun]:
        model, optimizer, data = parts()
        with attach(
            model=model, optimizer=optimizer, callbacks=CheckpointSaver(), run_name="run", runs_folder=tmp_path, resume=resume
        ) as run:
            for _ in run.epochs(epochs):
                for inputs, targets in run.steps(data):
                    nn.functional.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if is_cut:
                    signal.raise_signal(signal.SIGTERM)
                run.evaluated({"validation": {"loss": 1.0}})
        return model, run

    _, cut = train(3, is_cut=True)
    assert cut.preempted
    assert cut.ctx.step == BATCHES
    model, resumed = train(3, resume="auto")
    assert resumed.ctx.step == 3 * BATCHES
    assert same(model, bare(3)[0])


def train_with_range_loop(folder: Path, *callbacks: Callback, epochs: int = 4, **options: Any) -> AttachedRun:
    """Train with a loop `for epoch in range(epochs)`, which does not end at a stop. It evaluates after each epoch."""
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=callbacks, run_name="run", runs_folder=folder, **options) as run:
        for epoch in range(epochs):
            for inputs, _ in run.steps(data):
                model(inputs).sum().backward()
                optimizer.step()
            run.evaluated({"validation": {"loss": float(epoch)}})
    return run


def test_a_loop_over_range_that_continues_after_a_stop_logs_one_warning_with_a_hint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = train_with_range_loop(tmp_path, recorder := Recorder(), Stopper(BATCHES + 2))
    assert run.ctx.step == BATCHES + 2
    check_events(recorder.events)
    warning, ended = caplog.messages
    assert ended == f"run: training ended at step {BATCHES + 2}, stopped by Stopper: enough"
    assert warning.startswith(f"training has ended at step {BATCHES + 2} (stopped by Stopper: enough)")
    assert "Write `for epoch in run.epochs(n):` instead of `for epoch in range(n):`" in warning


def test_a_resumed_loop_over_range_logs_a_warning_that_it_trains_too_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_with_range_loop(tmp_path, CheckpointSaver(), epochs=2)
    assert not caplog.messages
    train_with_range_loop(tmp_path, CheckpointSaver(), epochs=2, resume="auto")
    (warning,) = caplog.messages
    assert warning.startswith("the run was resumed after 2 complete epochs")
    assert warning.endswith("write `for epoch in run.epochs(n):`")


@pytest.mark.parametrize(
    ("options", "why"),
    [({}, "all 2 epochs of run.epochs(2) are done"), ({"max_duration": "2ep"}, "it has reached max_duration, 2ep")],
    ids=["epochs", "max_duration"],
)
def test_resuming_a_complete_run_takes_no_step_and_logs_a_warning(
    options: dict[str, Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attached(2, CheckpointSaver(), folder=tmp_path, **options)
    assert not caplog.messages
    _, run = attached(2, CheckpointSaver(), folder=tmp_path, resume="auto", **options)
    assert run.ctx.step == 2 * BATCHES
    (warning,) = caplog.messages
    assert f"is complete at step {2 * BATCHES}: {why}, and no further step is taken. To train longer, give" in warning
    assert warning.endswith("To train from the start, leave out resume= and give another run_name")


def test_evaluations_of_one_step_are_merged_and_a_second_one_between_epochs_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder(fields=("eval_results",))
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=recorder) as run:
        for inputs, _ in run.steps(data):
            model(inputs).sum().backward()
            optimizer.step()
            if run.ctx.step == 2:
                run.evaluated({"validation": {"loss": 1.0}})
                run.evaluated({"validation": {"accuracy": 0.5}, "test": {"loss": 2.0}})
        run.evaluated({"validation": {"loss": 3.0}})
        run.evaluated({"test": {"loss": 4.0}})
    first = {"validation": {"loss": 1.0, "accuracy": 0.5}, "test": {"loss": 2.0}}
    second = {"validation": {"loss": 3.0}}
    assert recorder.values["eval_results"] == [("on_eval_all_end", first), ("on_eval_all_end", second)]
    check_events(recorder.events)
    (warning,) = caplog.messages
    assert warning.startswith("run.evaluated() was called a second time without a training step in between")


def test_a_requested_evaluation_is_made_or_reported_as_unsupported(caplog: pytest.LogCaptureFixture) -> None:
    class RequestsEvaluation(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 3:
                ctx.control.evaluate("now", replicated=True)

    recorder = Recorder(fields=("eval_results",))
    attached(1, [RequestsEvaluation(), recorder], evaluate=lambda: {"held out": {"accuracy": 0.5}})
    assert recorder.values["eval_results"] == [("on_eval_all_end", {"held out": {"accuracy": 0.5}})]
    check_events(recorder.events)
    attached(1, [RequestsEvaluation()])
    assert (
        "RequestsEvaluation calls ctx.control.evaluate, which this loop does not support here; it supports save, stop."
        in caplog.text
    )


class EvaluatesAt(Callback):
    """Requests an evaluation at every second step and after every epoch, and keeps the results in its state."""

    def __init__(self, signals_at: tuple[str, int] | None = None) -> None:
        self.found: list[tuple[int, float]] = []
        self.signals_at = signals_at

    def state_dict(self) -> dict[str, Any]:
        return {"found": list(self.found)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.found = [(step, value) for step, value in state["found"]]

    def _request_evaluation(self, ctx: Context, where: str) -> None:
        ctx.control.evaluate("it is time", replicated=True)
        if self.signals_at == (where, ctx.step):
            signal.raise_signal(signal.SIGTERM)

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step % 2:
            self._request_evaluation(ctx, "step")

    def on_epoch_end(self, ctx: Context) -> None:
        self._request_evaluation(ctx, "epoch")

    def on_eval_all_end(self, ctx: Context) -> None:
        self.found.append((ctx.step, ctx.eval_results["held out"]["loss"]))
        if self.signals_at == ("evaluation", ctx.step):
            signal.raise_signal(signal.SIGTERM)


def evaluating(folder: Path, *callbacks: Callback, resume: str | None = None) -> tuple[nn.Module, AttachedRun]:
    """Train two epochs with evaluations whose results depend on the weights and on random numbers that they draw."""
    model, optimizer, data = parts()

    def evaluate() -> dict[str, dict[str, float]]:
        return {"held out": {"loss": sum((each.double() * torch.rand(1)).mean().item() for each in model.parameters())}}

    run = attach(
        model=model, optimizer=optimizer, callbacks=callbacks, run_name="run", runs_folder=folder, resume=resume, max_duration="2ep",
        evaluate=evaluate,
    )  # fmt: skip
    with run:
        while not run.is_over:
            for inputs, targets in run.steps(data):
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
    return model, run


@pytest.mark.parametrize(
    "signals_at",
    [("step", 1), ("step", 3), ("step", 5), ("epoch", 5), ("step", 9), ("epoch", 10), ("evaluation", 3), ("evaluation", 5)],
    ids=lambda at: "-".join(map(str, at)),
)
def test_an_evaluation_that_a_signal_prevents_is_made_after_the_resume(tmp_path: Path, signals_at: tuple[str, int]) -> None:
    """The resumed run evaluates the restored weights before its next step. It does not repeat a finished evaluation."""
    model, _ = evaluating(tmp_path / "whole", whole := EvaluatesAt())
    _, stopped = evaluating(tmp_path / "parts", EvaluatesAt(signals_at))
    assert stopped.preempted
    recorder = Recorder()
    again, _ = evaluating(tmp_path / "parts", resumed := EvaluatesAt(), recorder, resume="auto")
    assert resumed.found == whole.found
    assert same(again, model)
    check_events(recorder.events)


class SignalsAtEpochEnd(Callback):
    """Sends a signal to this process at the end of an epoch."""

    def on_epoch_end(self, ctx: Context) -> None:
        if ctx.epoch == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def train_with_work_between_epochs(
    folder: Path, ends_in: str, *callbacks: Callback, leaves: bool = False
) -> tuple[nn.Module, list[float], Mapping[str, Any]]:
    """Train four epochs with a loop that evaluates and steps its scheduler after each epoch.

    The second epoch ends the run early, by an error in a step or in the evaluation, or by a signal in the evaluation.
    """
    model, optimizer, data = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = []
    stopper = EarlyStopper(monitor="validation/loss", patience=100)
    try:
        with attach(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            callbacks=[*callbacks, CheckpointSaver(), stopper],
            run_name="run",
            runs_folder=folder,
            resume="auto",
        ) as run:
            for epoch in run.epochs(4):
                for number, (inputs, targets) in enumerate(run.steps(data)):
                    if (epoch, number, ends_in) == (1, 2, "step"):
                        raise RuntimeError("the run dies")
                    if (epoch, number, ends_in) in ((1, 2, "signal in a step"), (1, BATCHES - 1, "signal in the last step")):
                        os.kill(os.getpid(), signal.SIGTERM)
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(inputs), targets).backward()
                    optimizer.step()
                    rates.append(optimizer.param_groups[0]["lr"])
                if run.preempted and leaves:
                    break
                with torch.no_grad():
                    losses = [
                        nn.functional.mse_loss(model(inputs), targets).item() for inputs, targets in data
                    ]  # draws random numbers
                if epoch == 1 and ends_in == "evaluation":
                    raise RuntimeError("the run dies")
                if epoch == 1 and ends_in == "signal in the evaluation":
                    os.kill(os.getpid(), signal.SIGTERM)
                run.evaluated({"validation": {"loss": sum(losses)}})
                scheduler.step()
    except RuntimeError:
        pass
    state = stopper.state_dict()
    return model, rates, {"best": state["best"], "best_at": state["best_at"]["batch"], "seen_at": state["seen_at"]["batch"]}


@pytest.mark.parametrize(
    ("ends_in", "leaves", "steps"),
    [
        ("step", False, 1),
        ("evaluation", False, 1),
        ("signal in a step", False, 1.6),
        ("signal in a step", True, 1.6),
        ("signal in the last step", False, 2),
        ("signal in the last step", True, 2),
        ("signal at the epoch's end", False, 2),
        ("signal in the evaluation", False, 2),
    ],
)
def test_a_checkpoint_at_an_epoch_s_end_holds_what_the_loop_does_between_epochs(
    ends_in: str, leaves: bool, steps: float, tmp_path: Path
) -> None:
    """`leaves` says whether the loop leaves its epochs when it is preempted; `steps` counts the epochs before the resume."""
    whole, rates, state = train_with_work_between_epochs(tmp_path / "whole", "")
    signals = [SignalsAtEpochEnd()] if "epoch" in ends_in else []
    train_with_work_between_epochs(tmp_path / "resumed", ends_in, *signals, leaves=leaves)
    resumed, later_rates, resumed_state = train_with_work_between_epochs(tmp_path / "resumed", "")
    assert later_rates == rates[round(steps * BATCHES) :]
    assert same(whole, resumed)
    assert resumed_state == state


def test_the_final_checkpoint_does_not_hold_what_the_loop_does_after_its_epochs(tmp_path: Path) -> None:
    model, optimizer, data = parts()
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "run_name": "run", "runs_folder": tmp_path}
    with contextlib.suppress(RuntimeError), attach(callbacks=[CheckpointSaver()], max_duration="2ep", **options) as run:
        for _ in run.epochs(3):
            for inputs, targets in run.steps(data):
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        raise RuntimeError("the test of the model fails")
    assert read_manifest(tmp_path / "run" / "checkpoints" / "ep2-ba10").info["kind"] == "final"


def test_a_loop_that_exits_because_it_is_preempted_has_a_checkpoint_of_its_epoch(tmp_path: Path) -> None:
    model, optimizer, data = parts()
    options: dict[str, Any] = {"model": model, "optimizer": optimizer, "run_name": "run", "runs_folder": tmp_path}
    with contextlib.suppress(SystemExit), attach(callbacks=[CheckpointSaver()], **options) as run:
        for _ in run.epochs(3):
            for inputs, targets in run.steps(data):
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
            os.kill(os.getpid(), signal.SIGTERM)
            run.evaluated({"validation": {"loss": 1.0}})
            if run.preempted:
                raise SystemExit(75)
    assert read_manifest(tmp_path / "run" / "checkpoints" / "ep1-ba5").info["kind"] == "preempt"


def signal_one_rank(moment: str) -> tuple[str, int]:
    torch.distributed.init_process_group("gloo")
    model, optimizer, _ = parts()
    data = [(torch.ones(2, 3), torch.zeros(2, 1))] * 50
    with attach(model=model, optimizer=optimizer, timeout_seconds=20) as run:
        for epoch in run.epochs(3):
            for number, (inputs, targets) in enumerate(run.steps(data)):
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                if torch.distributed.get_rank() == 1 and (epoch, number) == (1, {"first step": 0, "last step": 49}.get(moment)):
                    os.kill(os.getpid(), signal.SIGTERM)
            if torch.distributed.get_rank() == 1 and (epoch, moment) == (1, "between epochs"):
                os.kill(os.getpid(), signal.SIGTERM)
    torch.distributed.destroy_process_group()
    return str(run.ctx.run.outcome), run.ctx.step


@pytest.mark.parametrize("moment", ["first step", "last step", "between epochs"])
def test_a_signal_on_one_rank_near_an_epoch_s_end_preempts_all_ranks(moment: str) -> None:
    one, other = run_ranks(signal_one_rank, 2, moment)
    assert one == other
    assert one[0] == "preempted"


class ZeroesLoss(Callback):
    """Multiplies the loss by zero."""

    phase = "change"

    def on_loss_end(self, ctx: Context) -> None:
        ctx.loss = ctx.loss * 0

    def on_forward_end(self, ctx: Context) -> None:
        ctx.outputs = ctx.outputs + 0


def test_a_loss_that_a_callback_replaces_is_used_in_training() -> None:
    model, _, _ = parts()
    other, _ = attached(1, [ZeroesLoss()])
    assert same(model, other)


def test_the_loop_receives_the_microbatch_that_a_callback_has_set() -> None:
    class ReplacesMicrobatch(Callback):
        phase = "change"

        def on_microbatch_start(self, ctx: Context) -> None:
            ctx.microbatch = [torch.ones(1, 3), torch.ones(1, 1)]

    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[ReplacesMicrobatch()]) as run:
        for inputs, targets in run.steps(data):
            assert inputs.shape == (1, 3)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


def test_a_scaled_loss_is_reported_without_its_scale() -> None:
    history = History()
    model, optimizer, data = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with attach(model=model, optimizer=optimizer, callbacks=[history, Recorder()], scaler=scaler, log_interval=1) as run:
        expected = []
        for inputs, targets in run.steps(data):
            loss = nn.functional.mse_loss(model(inputs), targets)
            expected.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert history["train/loss"] == pytest.approx(expected)


def test_a_listener_added_during_training_receives_records_of_the_steps_from_then_on() -> None:
    manager, history = CallbackManager(), History()
    model, optimizer, data = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses = []
    with attach(model=model, optimizer=optimizer, callbacks=manager, scheduler=scheduler, log_interval=4) as run:
        for _ in run.epochs(3):
            for inputs, targets in run.steps(data):
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                losses.append(loss.item())
                if len(losses) == 6:  # the first record, of four steps, had no listeners
                    manager.add(history)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert history["train/loss"] == pytest.approx([sum(losses[6:8]) / 2, sum(losses[8:12]) / 4, sum(losses[12:]) / 3])
    assert history["train/learning_rate"] == pytest.approx([0.05 * 0.5**step for step in (7, 11, 14)])


def test_an_error_in_on_log_of_the_last_record_fails_the_run() -> None:
    class Fails(Callback):
        def on_log(self, ctx: Context) -> None:
            raise ValueError("no disk")

    recorder = Recorder()
    model, optimizer, data = parts()
    run = attach(model=model, optimizer=optimizer, callbacks=[recorder, Fails()])
    with pytest.raises(ValueError, match="no disk"), run:  # noqa: PT012
        for inputs, targets in run.steps(data):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert recorder.events[-2:] == ["on_exception", "on_run_end"]


def test_values_that_a_lane_logs_at_the_end_of_training_are_in_the_last_record() -> None:
    class LogsAtTheEnd(Callback):
        lane = "background"

        def on_epoch_end(self, ctx: Context) -> None:
            ctx.log({"lane/logged": 1.0})

    history = History()
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[LogsAtTheEnd(), history]) as run:
        for inputs, targets in run.steps(data):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert history["lane/logged"] == [1.0]


def test_without_callbacks_no_loss_is_kept(tmp_path: Path) -> None:
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[], run_name="run", runs_folder=tmp_path) as run:
        for inputs, targets in run.steps(data):
            assert not optimizer._optimizer_step_pre_hooks
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if run.ctx.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        assert not run._run.records.metrics
    assert run.preempted
    info = read_manifest(tmp_path / "run" / "checkpoints" / "ep0-ba2").info
    assert (info["step"], info["train_loss"], info["is_finite"]) == (2, None, True)


def test_an_evaluation_inside_the_loop_fires_no_forward_events() -> None:
    recorder = Recorder()
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[recorder]) as run:
        for inputs, targets in run.steps(data):
            model.eval()
            with torch.no_grad():
                model(inputs)
            model.train()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert recorder.events.count("on_forward_end") == BATCHES


# --- what is not supported ---


def loop_over_children(strict: bool, callbacks: list[Callback], accumulate: int = 1) -> None:
    """Train with a loop that calls the model's submodules and never the model itself."""
    model, optimizer, data = parts()
    with attach(
        model=model, optimizer=optimizer, callbacks=callbacks, strict=strict, gradient_accumulation_steps=accumulate
    ) as run:
        for inputs, _ in run.steps(data):
            model[2](model[0](inputs)).sum().backward()  # type: ignore[index]
            optimizer.step()


class Listens(Callback):
    def on_forward_end(self, ctx: Context) -> None: ...


def test_a_listener_to_an_event_that_the_loop_does_not_fire_is_rejected(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(NotSupported, match=r"Listens listens to on_forward_end, which this loop did not fire.*strict=False"):
        loop_over_children(True, [Listens()])
    with caplog.at_level(logging.WARNING, "callsheet"):
        loop_over_children(False, [Listens()])
    assert "Listens listens to on_forward_end" in caplog.text
    loop_over_children(True, [Stopper(100)])  # without listeners


def test_a_loop_that_steps_less_often_than_declared_is_rejected() -> None:
    model, optimizer, data = parts()
    with pytest.raises(NotSupported, match="in its first batch; set gradient_accumulation_steps="):  # noqa: PT012
        with attach(model=model, optimizer=optimizer, callbacks=[]) as run:
            for number, (inputs, _) in enumerate(run.steps(data), 1):
                model(inputs).sum().backward()
                if number % 2 == 0:
                    optimizer.step()


@pytest.mark.parametrize("accumulate", [0, True, "2"])
def test_invalid_gradient_accumulation_steps_are_rejected(accumulate: Any) -> None:
    model, optimizer, _ = parts()
    with pytest.raises(ConfigError, match="gradient_accumulation_steps="):
        attach(model=model, optimizer=optimizer, callbacks=[], gradient_accumulation_steps=accumulate)


def test_steps_inside_steps_are_rejected() -> None:
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[], strict=False) as run:
        outer = run.steps(data)
        next(outer)
        with pytest.raises(RequestRejected, match="an epoch has to end"):
            next(run.steps(data))


def test_functions_and_callbacks_of_a_manager_are_called_at_their_intervals() -> None:
    manager, seen = CallbackManager(), []

    @manager.register("on_train_step_end", every="2ba")
    def look(ctx: Context) -> None:
        seen.append(ctx.step)

    class EverySecondStep(Callback):
        @every("2ba")
        def on_train_step_end(self, ctx: Context) -> None:
            seen.append(-ctx.step)

    manager.add(EverySecondStep())
    attached(1, manager)
    assert seen == [2, -2, 4, -4]


# --- many ranks ---


def ddp(folder: str, stop_on: int) -> tuple[list[float], str, int]:
    """Train on this rank's half of the data. One rank requests a stop, and all ranks stop together."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model, optimizer, _ = parts()
    wrapped = nn.parallel.DistributedDataParallel(model)
    data = [(torch.full((2, 3), 0.1 * (rank + step % 3)), torch.zeros(2, 1)) for step in range(3 * MAX_PERIOD_STEPS)]

    class StopsOnOneRank(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.run.rank == stop_on and ctx.step == 5:
                ctx.control.stop("one rank is enough")

    recorder = Recorder()
    saver = CheckpointSaver(save_interval="100ba")
    with attach(
        model=wrapped, optimizer=optimizer, callbacks=[StopsOnOneRank(), recorder, saver], run_name="run", runs_folder=folder
    ) as run:
        for inputs, targets in run.steps(data):
            nn.functional.mse_loss(wrapped(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    check_events(recorder.events)
    torch.distributed.destroy_process_group()
    return [parameter.sum().item() for parameter in model.parameters()], str(run.ctx.run.outcome), run.ctx.step


def test_two_ranks_stop_together_and_save_one_checkpoint(tmp_path: Path) -> None:
    (one, outcome, step), (other, its_outcome, its_step) = run_ranks(ddp, 2, str(tmp_path), 1)
    assert one == other
    assert outcome == its_outcome == "stopped"
    assert step == its_step
    assert 5 <= step <= 5 + 2 * MAX_PERIOD_STEPS  # ranks exchange requests once per period: one period to send it, one to read it
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
    assert saved  # both ranks write one checkpoint; earlier ones were deleted
    assert all(int(name.removeprefix("ep0-ba")) in (*range(100, step, 100), step) for name in saved)


def test_a_copy_of_the_model_fires_no_events(tmp_path: Path) -> None:
    recorder, copies = Recorder(), []

    class Copies(Callback):
        def on_forward_end(self, ctx: Context) -> None:
            copies.append(copy.deepcopy(ctx.model))
            copies.append(pickle.loads(pickle.dumps(ctx.model)))
            for each in copies[-2:]:
                each(torch.zeros(1, 2))

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model=model, optimizer=optimizer, callbacks=[Copies(), recorder], runs_folder=tmp_path) as run:
        for inputs in run.steps([torch.zeros(1, 2)] * 2):
            model(inputs).sum().backward()
            optimizer.step()
    check_events(recorder.events)
    assert recorder.events.count("on_forward_end") == 2
    assert len(copies) == 4


def test_a_loop_that_does_not_use_the_run_is_rejected() -> None:
    model, optimizer, data = parts()
    attached = attach(model=model, optimizer=optimizer, callbacks=[])
    with pytest.raises(RequestRejected, match=r"with callsheet\.attach"):
        next(attached.steps(data))

    def train_without_steps() -> None:
        with attached as run:
            for _ in run.epochs(2):
                for inputs, _ in data:
                    model(inputs)

    with pytest.raises(RequestRejected, match=r"run\.steps\(dataloader\)"):
        train_without_steps()


def test_results_without_a_dataset_are_rejected() -> None:
    model, optimizer, _ = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[]) as run:
        with pytest.raises(ConfigError, match="by dataset name"):
            run.evaluated({"loss": 1.2})  # type: ignore[dict-item]


@pytest.mark.parametrize("has_more_listeners", [False, True])
def test_fields_of_a_skipped_step_do_not_depend_on_other_listeners(has_more_listeners: bool) -> None:
    manager, seen = CallbackManager(), list[tuple[bool, Any, float]]()
    manager.register("on_train_step_end", lambda ctx: seen.append((ctx.step_skipped, ctx.grad_norm, ctx.learning_rate)))
    if has_more_listeners:
        manager.register("on_optimizer_step_start", lambda ctx: None)
    model, optimizer, data = parts()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with attach(model=model, optimizer=optimizer, callbacks=manager, scaler=scaler) as run:
        for step, (inputs, targets) in enumerate(run.steps(data)):
            loss = nn.functional.mse_loss(model(inputs), targets) * (float("inf") if step == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert seen == [(True, None, 0.05)] + [(False, None, 0.05)] * (BATCHES - 1)


@pytest.mark.parametrize("received", [(), ("on_optimizer_step_start",), ("on_clip_gradients_end",), ("on_train_step_start",)])
def test_the_recorded_learning_rate_is_the_one_before_the_scheduler_steps(received: tuple[str, ...]) -> None:
    class ListensToEvent(Callback): ...

    for event in received:
        setattr(ListensToEvent, event, lambda self, ctx: None)
    model, optimizer, data = parts()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    callbacks = [history := History(), *([ListensToEvent()] if received else [])]
    with attach(model=model, optimizer=optimizer, scheduler=scheduler, callbacks=callbacks, log_interval=1) as run:
        for inputs, targets in run.steps(data):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
    assert history["train/learning_rate"] == pytest.approx([0.05 * 0.5**step for step in range(BATCHES)])
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_an_unmuted_handler_has_no_fields_of_an_earlier_step() -> None:
    class MutesItself(Callback):
        def __init__(self) -> None:
            self.read: list[tuple[int, bool, bool]] = []

        def on_train_step_start(self, ctx: Context) -> None:
            self.read.append((ctx.step, ctx.has("batch"), ctx.has("learning_rate") or ctx.has("loss") or ctx.has("grad_norm")))
            ctx.mute(self, "on_train_step_start", until=ctx.step + 25)

    attached(12, now := MutesItself())
    assert now.read == [(step, True, False) for step in (1, 26, 51)]


def test_the_batch_is_available_at_an_exception_without_other_listeners() -> None:
    class KeepsBatch(Callback):
        batch: Any = None

        def on_exception(self, ctx: Context) -> None:
            self.batch = ctx.batch

    model, optimizer, data = parts()
    dumps, batches = KeepsBatch(), list[Any]()

    def train() -> None:
        with attach(model=model, optimizer=optimizer, callbacks=dumps) as run:
            for batch in run.steps(data):
                batches.append(batch)
                nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
                if len(batches) == 3:
                    raise ValueError("here")
                optimizer.step()

    with pytest.raises(ValueError, match="here"):
        train()
    assert dumps.batch is batches[2]


@pytest.mark.parametrize(("others", "first"), [([Lambda(on_train_end=print)], 2), ([], 3)])
def test_a_callback_added_within_a_step_has_all_fields_at_its_first_end_of_a_step(others: list[Callback], first: int) -> None:
    manager, recorded = CallbackManager(others), list[tuple[int, bool]]()
    fields = ("batch", "loss", "loss_dict", "learning_rate", "grad_norm", "step_skipped")
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=manager) as run:
        for step, (inputs, targets) in enumerate(run.steps(data)):
            if step == 1:
                manager.register("on_train_step_end", lambda ctx: recorded.append((ctx.step, all(map(ctx.has, fields)))))
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorded == [(step, True) for step in range(first, BATCHES + 1)]


def test_a_callback_added_within_a_step_that_nothing_read_is_called_from_the_next_step_also_if_it_keeps_fields() -> None:
    class Keeps(Callback):
        keep_fields = ("outputs",)

        def __init__(self) -> None:
            self.losses: list[tuple[int, bool]] = []

        def on_train_step_end(self, ctx: Context) -> None:
            self.losses.append((ctx.step, math.isfinite(ctx.loss)))

    manager, keeps = CallbackManager(), Keeps()
    model, optimizer, data = parts()
    with attach(model=model, optimizer=optimizer, callbacks=manager) as run:
        for step, (inputs, targets) in enumerate(run.steps(data)):
            if step == 1:
                manager.add(keeps)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert keeps.losses == [(step, True) for step in range(3, BATCHES + 1)]


def test_callbacks_and_loggers_both_receive_the_records(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"runs_folder": tmp_path, "run_name": "run", "log_interval": 1}
    with attach(model=model, optimizer=optimizer, callbacks=[history := History()], loggers=[JSONLLogger()], **options) as run:
        for inputs, targets in run.steps([(torch.ones(2, 2), torch.ones(2, 1))] * 2):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert len(history["train/loss"]) == 2
    assert sum("train/loss" in line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_an_unknown_argument_is_rejected_with_its_name_in_callsheet() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(TypeError, match="attach has no argument 'max_epochs'; give max_duration='3ep', for three epochs"):
        attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_epochs=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("argument", ["eval_interval", "eval_dataloader", "eval_steps", "val_loader"])
def test_an_evaluation_argument_is_rejected_with_a_hint_how_attach_evaluates(argument: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=rf"attach has no argument '{argument}'; give the results .* to run\.evaluated\(.*evaluate=FUNCTION"
    ):
        attach(model=model, optimizer=optimizer, **{argument: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize("callbacks", [["all"], []])
def test_a_loop_that_accumulates_within_one_step_fires_all_its_microbatches(callbacks: list[str]) -> None:
    """As in nanoGPT, the loop takes one batch from the iterator and then runs forward and backward several times."""

    def trained(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for batch in run:
            total = 0.0
            for part in batch.chunk(4):
                loss = model(part).square().mean() / 4
                loss.backward()
                total += float(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
        return losses

    batches = list(torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(1)))
    model, optimizer, _ = parts()
    plain = trained(batches, model, optimizer)
    observed, optimizer, _ = parts()
    recorder, history = Recorder(), History()
    listeners: list[Callback] = [recorder] if callbacks else []
    with attach(model=observed, optimizer=optimizer, callbacks=[history, *listeners], log_interval=1) as run:
        assert trained(run.steps(batches), observed, optimizer) == plain
    assert same(model, observed)
    assert history["train/loss"] == pytest.approx(plain)
    if callbacks:
        check_events(recorder.events)
        for event in ("microbatch", "forward", "loss", "backward"):
            assert recorder.events.count(f"on_{event}_start") == recorder.events.count(f"on_{event}_end") == 12, event
        assert recorder.events.count("on_train_step_end") == 3


def test_a_warning_says_that_replacing_a_later_microbatch_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    class Replaces(Callback):
        phase = "change"

        def on_microbatch_start(self, ctx: Context) -> None:
            ctx.microbatch = ctx.microbatch * 2

    model, optimizer, _ = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[Replaces()]) as run:
        for batch in run.steps([torch.ones(2, 3)] * 2):
            assert torch.equal(batch, torch.full((2, 3), 2.0))
            for _ in range(3):
                model(batch).sum().backward()
            optimizer.step()
    assert [record.message for record in caplog.records if "ctx.microbatch" in record.message] == [
        "A callback has replaced ctx.microbatch in a loop that takes several microbatches of one batch. The loop has the batch already, so "
        "only what replaces the first microbatch of a step is used. Replace ctx.batch at on_fetch_end instead."
    ]


def test_activation_checkpointing_starts_no_microbatch() -> None:
    model, optimizer, _ = parts()
    recorder = Recorder()
    with attach(model=model, optimizer=optimizer, callbacks=[recorder]) as run:
        for batch in run.steps([torch.ones(2, 3)] * 2):
            checkpointed: Any = torch.utils.checkpoint.checkpoint(model, batch, use_reentrant=False)
            checkpointed.sum().backward()
            optimizer.step()
    check_events(recorder.events)
    assert recorder.events.count("on_forward_start") == recorder.events.count("on_backward_end") == 2


def test_a_gan_whose_discriminator_is_trained_first_is_rejected_with_a_hint() -> None:
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.Adam(generator.parameters())

    def trained() -> None:
        with attach(model=generator, optimizer=optimizer, callbacks=[SpeedMonitor()]) as run:
            for real in run.steps([torch.randn(8, 4)] * 3):
                discriminator(real).mean().backward()
                discriminator(generator(torch.randn(8, 4))).mean().backward()
                optimizer.step()

    with pytest.raises(NotSupported, match=r"SpeedMonitor listens to on_forward_end.*before the model was.*GAN's discriminator"):
        trained()


class OptimWrapper:
    """Like fastai's: wraps torch's optimizer, and its `step` calls the optimizer's `step`."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt

    def step(self) -> None:
        self.opt.step()


class SetFitModel:
    """Like SetFit's: contains modules, but is not a module itself."""

    def __init__(self) -> None:
        self.model_body, self.model_head, self.name = nn.Linear(3, 8), nn.Linear(8, 1), "small"


def test_an_optimizer_inside_a_wrapper_is_observed() -> None:
    model, optimizer, data = parts()
    wrapper: Any = OptimWrapper(optimizer)
    recorder = Recorder()
    with attach(model=model, optimizer=wrapper, callbacks=[recorder]) as run:
        assert run.ctx.optimizer is optimizer
        for inputs, targets in run.steps(data):
            nn.functional.mse_loss(model(inputs), targets).backward()
            wrapper.step()
    check_events(recorder.events)
    assert recorder.events.count("on_optimizer_step_end") == BATCHES


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model": [nn.Linear(1, 1), nn.Linear(1, 1)]},
            r"model= is a list of 2.*one model with one optimizer\. Give the model whose",
        ),
        (
            {"model": SetFitModel()},
            r"SetFitModel, which is not a torch.nn.Module.*model=model.model_body or model=model.model_head",
        ),
        ({"optimizer": (1, 2)}, r"optimizer= is a tuple of 2.*one model with one optimizer\. Give the one"),
        ({"optimizer": object()}, r"optimizer= is a object, which is not a torch.optim.Optimizer.*OptimWrapper"),
    ],
)
def test_objects_that_are_not_a_torch_model_or_optimizer_are_rejected_with_a_hint(given: dict[str, Any], message: str) -> None:
    model, optimizer, _ = parts()
    whole: Any = {"model": model, "optimizer": optimizer, "callbacks": []} | given
    with pytest.raises(ConfigError, match=message):
        attach(**whole)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": torch.optim.SGD}, r"optimizer= is the class SGD, .*, such as SGD\(model\.parameters\(\), lr=0\.1\)$"),
        ({"model": nn.Linear}, r"model= is the class Linear, .*, such as Linear\(\.\.\.\)$"),
        ({"resume": True}, "^resume=True: give 'auto', the path of a checkpoint, or None$"),
        ({"resume": "auto"}, "^resume='auto' needs a run_name"),
        ({"runs_folder": 3}, "^runs_folder=3: give the path of a folder, such as 'runs'$"),
        ({"run_name": 3}, "^run_name=3 must be a plain name"),
    ],
)
def test_invalid_arguments_are_rejected_with_a_hint(given: dict[str, Any], message: str) -> None:
    model, optimizer, _ = parts()
    with pytest.raises(ConfigError, match=message):
        attach(**{"model": model, "optimizer": optimizer, **given})


def test_positional_arguments_are_rejected_with_a_hint() -> None:
    model, optimizer, _ = parts()
    with pytest.raises(
        ConfigError, match=r"^attach takes no argument without its name: write attach\(model=\.\.\., optimizer=\.\.\.\)$"
    ):
        attach(model, optimizer)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.log("loss", 1.0), r"^log\('loss', 1\.0\): .* such as log\(\{'loss': 0\.5\}\)$"),
        (lambda run: run.log("loss"), r"^log\('loss'\): give one dictionary"),
        (lambda run: run.ctx.log("loss", 1.0), r"^log\('loss', 1\.0\): give one dictionary"),
        (lambda run: run.ctx.log(loss=1), r"^log\(loss=1\): give one dictionary .* such as log\(\{'loss': 0\.5\}\)$"),
        (lambda run: run.log(loss=1), r"^log\(loss=1\): give one dictionary"),
        (lambda run: run.log(), r"^log\(\): give one dictionary"),
        (lambda run: run.evaluated(1.5), r"^evaluated\(1\.5\): give the results by dataset name"),
        (lambda run: next(run.epochs("3")), r"^epochs\('3'\): give the number of epochs"),
    ],
)
def test_invalid_calls_are_rejected_with_a_hint(call: Callable[[AttachedRun], Any], message: str) -> None:
    model, optimizer, _ = parts()
    with attach(model=model, optimizer=optimizer, callbacks=[]) as run, pytest.raises(ConfigError, match=message):
        call(run)


def test_a_dataloader_without_a_length_trains_all_its_batches(tmp_path: Path) -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.ones(8, 3))

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model=model, optimizer=optimizer, callbacks=None, run_name="small", runs_folder=tmp_path) as run:
        for _ in run.epochs(2):
            for batch in run.steps(DataLoader(Stream(), batch_size=2)):
                model(batch).sum().backward()
                optimizer.step()
    assert run.ctx.state.timestamp.batch == 8


def test_a_callback_whose_request_the_loop_does_not_support_is_rejected_at_the_start() -> None:
    model, optimizer, _ = parts()
    scheduler = GradientAccumulationScheduler(schedule={2: 4})
    with pytest.raises(NotSupported, match=r"GradientAccumulationScheduler asks for ctx\.control\.set_gradient_accumulation"):
        attach(model=model, optimizer=optimizer, callbacks=[scheduler])


def test_a_callback_that_is_not_hashable_is_called_at_every_step(tmp_path: Path) -> None:
    @dataclass
    class Steps(Callback):
        count: int = 0

        def on_train_step_end(self, ctx: Context) -> None:
            self.count += 1

    steps, (model, optimizer, data) = Steps(), parts()
    with attach(model=model, optimizer=optimizer, callbacks=[steps], runs_folder=tmp_path) as run:
        for inputs, targets in run.steps(data):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert steps.count == BATCHES


WORKERS: Mapping[str, Any] = {"workers": 2, "persistent": True, "context": "fork"}


@pytest.mark.filterwarnings("ignore:.*set_vital", "ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(**WORKERS),
        Case(order="shuffle, generator"),
        Case(order="with generator"),
        Case(order="counting with state"),
        Case(order="of epoch"),
        Case(order="own batches"),
        Case("items with generators"),
        Case("stream with generator", "", **WORKERS),
    ],
    ids=str,
)
def test_a_resume_gives_the_batches_of_an_uninterrupted_run_in_any_epoch(case: Case) -> None:
    for epoch, place in ((1, 2), (2, 0), (3, 1)):
        result = result_of(replace(case, epoch=epoch, place=place), ATTACH)
        assert result.outcome == "exact", (epoch, place, result.message)


@pytest.mark.parametrize("order", ["counting", "shuffles its list"])
def test_a_resume_logs_a_warning_of_a_sampler_whose_state_it_cannot_restore(order: str) -> None:
    result = result_of(Case(order=order), ATTACH)
    assert result.outcome == "warned"
    assert "changed while training" in result.message


def batches_without_and_with_resume(folder: Path, made: Callable[[int], Any], stop_after: int) -> tuple[list[Any], list[Any]]:
    """Return the batches of three epochs of four steps, of an uninterrupted run and of a resumed one.

    `made` returns the dataloader of an epoch.
    """

    def train(name: str, callbacks: list[Callback]) -> list[Any]:
        model, seen = nn.Linear(1, 1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(
            model=model, optimizer=optimizer, callbacks=callbacks, run_name=name, runs_folder=folder, resume="auto"
        ) as run:
            for epoch in run.epochs(3):
                for batch in run.steps(made(epoch)):
                    model(batch).sum().backward()
                    optimizer.step()
                    seen.append(batch.flatten().tolist())
        return seen

    def stop(ctx: Context) -> None:
        if ctx.step == stop_after:
            ctx.control.save("test")
            ctx.control.stop("test", resumable=True)

    return train("whole", []), train("stopped", [Lambda(on_train_step_end=stop)]) + train("stopped", [])


@pytest.mark.parametrize("stop_after", [3, 8, 9])
def test_a_resume_gives_the_same_batches_if_each_epoch_has_a_new_dataloader(stop_after: int, tmp_path: Path) -> None:
    data = torch.arange(8.0).reshape(8, 1)

    def made(epoch: int) -> Any:
        return DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(epoch))  # type: ignore[arg-type]

    whole, stopped = batches_without_and_with_resume(tmp_path, made, stop_after)
    assert stopped == whole


def test_a_resume_logs_a_warning_of_a_wrapped_dataloader_with_its_own_generator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = torch.arange(8.0).reshape(8, 1)

    class Wrapper:
        def __init__(self) -> None:
            self.inner: Any = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator())  # type: ignore[arg-type]

        def __iter__(self) -> Iterator[Any]:
            return iter(self.inner)

    batches_without_and_with_resume(tmp_path, lambda epoch: Wrapper(), stop_after=5)
    assert "Wrapper wraps a DataLoader with a generator of its own" in caplog.text


def train_in(folder: Path, loop: str, callbacks: list[Callback], **options: Any) -> int:
    """Train in a run in `folder`, and return the number of steps."""
    model, optimizer, data = parts()
    if loop == "attach":
        with attach(model=model, optimizer=optimizer, callbacks=callbacks, runs_folder=folder, **options) as run:
            for inputs, _ in run.steps(data):
                model(inputs).sum().backward()
                optimizer.step()
        return run.ctx.step
    with Trainer(
        model, nn.functional.mse_loss, train_dataloader=data, optimizer=optimizer, max_duration="1ep", callbacks=callbacks,
        runs_folder=folder, **options,
    ) as trainer:  # fmt: skip
        trainer.fit()
    return trainer.state.timestamp.batch


@pytest.mark.parametrize("loop", ["attach", "Trainer"])
@pytest.mark.parametrize("options", [{}, {"run_name": "run"}], ids=["unnamed", "named"])
@pytest.mark.parametrize("kind", [JSONLLogger, CSVLogger, FileLogger, TensorboardLogger, Heartbeat])
def test_a_callback_without_write_permission_is_disabled_with_one_message(
    loop: str, options: dict[str, Any], kind: type[Callback], read_only_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert train_in(read_only_folder, loop, [kind()], **options) == BATCHES
    (message,) = caplog.messages
    assert message.startswith(f"Callback {kind.__name__} may not use {read_only_folder}/")
    assert "(Permission denied), so it is switched off in this run; training continues. Make the folder writable" in message
    assert caplog.records[0].exc_info is None


@pytest.mark.parametrize("loop", ["attach", "Trainer"])
def test_a_read_only_checkpoint_folder_is_rejected_before_the_first_step(
    loop: str, read_only_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    with pytest.raises(CheckpointError) as rejection:
        train_in(read_only_folder, loop, [recorder, CheckpointSaver()], run_name="run")
    assert str(rejection.value).startswith(
        f"cannot write to {read_only_folder}/run/checkpoints ({read_only_folder}: Permission denied), where CheckpointSaver would"
    )
    assert "on_train_step_start" not in recorder.events
    assert not caplog.messages


def test_the_averaged_weights_are_in_the_model_while_the_function_evaluates_it(tmp_path: Path) -> None:
    """`on_eval_all_start` is fired before the function `evaluate` is called."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights: list[torch.Tensor] = []

    def evaluate() -> dict[str, dict[str, float]]:
        weights.append(model.weight.detach().clone())
        return {"validation": {"loss": 1.0}}

    recorder, average = Recorder(), model.weight.detach().clone()
    callbacks = [EMA(half_life=1), RequestsEvaluation(step=2), recorder]
    with attach(model=model, optimizer=optimizer, callbacks=callbacks, evaluate=evaluate, runs_folder=tmp_path) as run:
        for batch in run.steps([torch.ones(2, 2)] * 3):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not weights:
                average.lerp_(model.weight.detach(), 0.5)
                trained = model.weight.detach().clone()
    check_events(recorder.events)
    assert torch.allclose(weights[0], average)
    assert not torch.allclose(weights[0], trained)


class RequestsEvaluation(Callback):
    """Requests an evaluation at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            ctx.control.evaluate("the test requests it")
