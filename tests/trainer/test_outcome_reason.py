"""The reason why a run ended: callbacks can read it, and it decides what a repeated command does."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from callsheet import Callback, Context, Trainer, attach
from callsheet.callbacks import CheckpointSaver, EarlyStopper, SaveOnTrigger
from callsheet.cli.main import main
from callsheet.core.run_state import RunInfo
from callsheet.loggers import ConsoleLogger, JSONLLogger
from callsheet.report import RunFolder
from callsheet.run.reasons import is_secret, one_line
from callsheet.testing import run_ranks


class AtStep(Callback):
    """Calls a function after one step. `level` is only there to be recorded as a setting."""

    def __init__(self, step: int, act: Callable[[Context], Any], level: int = 0) -> None:
        self.step, self.act, self.level = step, act, level

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            self.act(ctx)


class Watch(Callback):
    """Records the steps, and the run's information at its end."""

    run: RunInfo
    steps: tuple[int, ...] = ()

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps += (ctx.step,)

    def on_run_end(self, ctx: Context) -> None:
        self.run = ctx.run


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    torch.manual_seed(0)
    data = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(5)]
    options = {"max_duration": "20ba", "eval_interval": "3ba", **options}
    return Trainer(
        torch.nn.Linear(3, 1),
        mse_loss,
        data,
        data[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        callbacks=[*callbacks],
        runs_folder=folder,
        run_name="x",
        device="cpu",
        **options,
    )


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Watch:
    with trainer(folder, *callbacks, watch := Watch(), **options) as made:
        made.fit()
    return watch


def request_stop(ctx: Context) -> None:
    ctx.control.stop("the curve is flat")


def request_resumable_stop(ctx: Context) -> None:
    ctx.control.stop("requested", resumable=True)


def test_a_run_that_reached_its_duration_has_it_as_the_reason(tmp_path: Path) -> None:
    assert fit(tmp_path).run.outcome_reason == "reached max_duration, 20ba"


def test_without_training_there_is_no_reason(tmp_path: Path) -> None:
    with trainer(tmp_path, watch := Watch()) as made:
        made.evaluate()
    assert (watch.run.outcome, watch.run.outcome_reason) == ("finished", "")


def test_the_callback_that_stopped_the_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopper = AtStep(4, request_stop)
    stopper.name = "flatness"
    reason = "stopped by flatness: the curve is flat"
    run = fit(tmp_path, stopper, JSONLLogger(), ConsoleLogger()).run
    assert (run.outcome, run.outcome_reason) == ("stopped", reason)
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"({reason})")
    assert json.loads((tmp_path / "x" / "events.jsonl").read_text().splitlines()[-1])["reason"] == reason
    assert RunFolder.read(tmp_path / "x").reason == reason
    assert main(["runs", str(tmp_path)]) == 0
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize(
    ("which", "outcome", "reason"),
    [
        (signal.SIGTERM, "preempted", "signal SIGTERM"),
        (signal.SIGINT, "interrupted", "signal SIGINT (Ctrl-C)"),
    ],
)
def test_the_signal_that_ended_a_run_is_the_reason(which: signal.Signals, outcome: str, reason: str, tmp_path: Path) -> None:
    watch = Watch()
    made = trainer(tmp_path, AtStep(4, lambda ctx: os.kill(os.getpid(), which)), watch)
    try:
        made.fit()
    except KeyboardInterrupt:
        assert which is signal.SIGINT
    made.close()
    assert (watch.run.outcome, watch.run.outcome_reason) == (outcome, reason)


def test_the_reason_has_the_error_without_its_credentials(tmp_path: Path) -> None:
    def fail(ctx: Context) -> None:
        raise ConnectionError("no answer from https://me:hunter2@example.com/hook/T123?key=9\napi_key=abc123, password: xyz")

    watch = Watch()
    with pytest.raises(ConnectionError), trainer(tmp_path, AtStep(4, fail), watch) as made:
        made.fit()
    assert watch.run.outcome == "failed"
    assert watch.run.outcome_reason == "ConnectionError: no answer from https://example.com/... api_key=..., password: ..."


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\n two\x1b[31m", "one two [31m"),
        ("a" * 1000, "a" * 297 + "..."),
        ("s3://bucket/run/x and ssh://me:pw@host/y", "s3://bucket/run/x and ssh://...@host/y"),
        ("Authorization: Bearer abc.def", "Authorization: ..."),
        ("train/tokens_per_second is 5, below 6", "train/tokens_per_second is 5, below 6"),
    ],
)
def test_a_reason_is_one_plain_line(text: str, line: str) -> None:
    assert one_line(text) == line


# --- the same command again ---


def early(patience: int = 2) -> list[Callback]:
    return [EarlyStopper(monitor="validation/loss", patience=patience), CheckpointSaver()]


def test_a_run_that_a_callback_stopped_is_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = fit(tmp_path, *early())
    assert first.steps[-1] == 9
    assert first.run.outcome_reason.startswith("stopped by EarlyStopper: no improvement on validation/loss = ")
    with caplog.at_level(logging.WARNING, "callsheet"):
        again = fit(tmp_path, *early(), resume="auto")
    assert again.steps == ()
    assert (again.run.outcome, again.run.outcome_reason) == (first.run.outcome, first.run.outcome_reason)
    assert f"{tmp_path / 'x'} was stopped by EarlyStopper at step 9: no improvement" in caplog.text
    assert "To train from the start, give the run another name or folder" in caplog.text
    assert "--" not in caplog.text
    assert "change the settings of EarlyStopper" in caplog.text
    assert fit(tmp_path, *early(patience=3), resume="auto").steps == (10, 11, 12)


@pytest.mark.parametrize("way", ["the callback's settings", "without the callback", "a longer duration", "the checkpoint's path"])
def test_a_stopped_run_continues_if_something_relevant_has_changed(way: str, tmp_path: Path) -> None:
    assert fit(tmp_path, AtStep(4, request_stop), CheckpointSaver()).steps[-1] == 4
    assert fit(tmp_path, AtStep(4, request_stop), CheckpointSaver(), resume="auto").steps == ()
    stoppers = {"the callback's settings": [AtStep(4, request_stop, level=1)], "without the callback": []}.get(
        way, [AtStep(4, request_stop)]
    )
    options: dict[str, Any] = {"a longer duration": {"max_duration": "25ba"}}.get(way, {})
    resume = str(tmp_path / "x" / "checkpoints" / "ep0-ba4") if way == "the checkpoint's path" else "auto"
    assert fit(tmp_path, *stoppers, CheckpointSaver(), resume=resume, **options).steps[0] == 5


def test_a_run_that_a_person_stopped_continues(tmp_path: Path) -> None:
    (tmp_path / "ask").write_text("stop\n")
    stopper = SaveOnTrigger(file=tmp_path / "ask", seconds=0.0)
    watch = fit(tmp_path, stopper, CheckpointSaver())
    assert watch.run.outcome_reason == "stopped by SaveOnTrigger: requested in the file ask"
    stopped_at = watch.steps[-1]
    assert stopped_at < 20
    assert fit(tmp_path, stopper, CheckpointSaver(), resume="auto").steps[0] == stopped_at + 1


def test_a_checkpoint_that_is_saved_after_training_has_the_reason(tmp_path: Path) -> None:
    with trainer(tmp_path, AtStep(4, request_stop)) as made:
        made.fit()
        made.save_checkpoint()
    assert fit(tmp_path, AtStep(4, request_stop), resume="auto").steps == ()


class AtEpochEnd(Callback):
    """Stops at the epoch's end, which comes after the checkpoint of its last step."""

    def on_epoch_end(self, ctx: Context) -> None:
        ctx.control.stop("one is enough", replicated=True)


def test_a_stop_after_the_step_s_checkpoint_is_saved_as_well(tmp_path: Path) -> None:
    saver = CheckpointSaver(save_interval="5ba")
    assert fit(tmp_path, AtEpochEnd(), saver, eval_interval=None).steps[-1] == 5
    assert fit(tmp_path, AtEpochEnd(), saver, eval_interval=None, resume="auto").steps == ()


def test_an_attached_loop_that_a_callback_stopped_is_complete(tmp_path: Path) -> None:
    def train(**options: Any) -> tuple[int, Watch]:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        data = [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(5)]
        steps, watch = 0, Watch()
        with attach(
            model=model,
            optimizer=optimizer,
            callbacks=[AtStep(4, request_stop), CheckpointSaver(), watch],
            runs_folder=tmp_path,
            run_name="x",
            **options,
        ) as run:
            for inputs, targets in run.steps(data):
                mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        return steps, watch

    steps, watch = train()
    assert (steps, watch.run.outcome_reason) == (4, "stopped by AtStep: the curve is flat")
    steps, watch = train(resume="auto")
    assert (steps, watch.run.outcome_reason) == (0, "stopped by AtStep: the curve is flat")


def _stop_on_one(ctx: Context) -> None:
    if ctx.run.rank == 1:
        ctx.control.stop("rank 1 has had enough")


def _of_rank(folder: Path) -> str:
    return fit(folder, AtStep(4, _stop_on_one), max_duration="200ba", eval_interval=None).run.outcome_reason


def test_all_ranks_name_the_callback_that_stopped_the_run(tmp_path: Path) -> None:
    assert run_ranks(_of_rank, 2, tmp_path) == ["stopped by AtStep: rank 1 has had enough"] * 2


@pytest.mark.parametrize("name", ["api_key", "hf_token", "auth_token", "tokens_secret", "PASSWORD", "--token"])
def test_is_secret_accepts_names_of_credentials(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["max_new_tokens", "tokenizer", "pad_token_id", "eos_token", "tokens_per_second", "lr"])
def test_is_secret_rejects_names_about_the_tokens_of_a_text(name: str) -> None:
    assert not is_secret(name)


def attached(folder: Path, *callbacks: Callback) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model=model, optimizer=optimizer, callbacks=callbacks, runs_folder=folder, run_name="x") as run:
        for batch in run.steps([torch.ones(2, 3)] * 5):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("train", [fit, attached])
def test_an_early_end_is_logged_unless_a_progress_callback_shows_it(
    train: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "a", AtStep(2, request_stop))
    (line,) = [record.getMessage() for record in caplog.records if "training ended" in record.getMessage()]
    assert line == "x: training ended at step 2, stopped by AtStep: the curve is flat"
    caplog.clear()
    train(tmp_path / "b", AtStep(2, request_stop), ConsoleLogger())
    train(tmp_path / "c")
    assert not any("training ended" in record.getMessage() for record in caplog.records)
