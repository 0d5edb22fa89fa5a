from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import callsheet.loggers.progress_bar_logger
import callsheet.loggers.support.silence_watch
from callsheet import Callback, Context, Trainer
from callsheet.errors import ConfigError
from callsheet.loggers import ProgressBarLogger
from callsheet.loggers.support.silence_watch import SilenceWatch

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 40

FITS = """
import sys, torch
from callsheet import Callback, Trainer
from callsheet.loggers import ProgressBarLogger

class Ends(Callback):
    def on_train_step_end(self, ctx):
        if ctx.step == 20:
            print("printed elsewhere")
            if sys.argv[1] == "fail":
                raise ValueError("a bad step")

data = [(torch.ones(2, 2), torch.ones(2, 1))] * 40
with Trainer(
    torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data, data[:1], callbacks=[ProgressBarLogger(), Ends()], max_duration="30ba",
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), runs_folder=sys.argv[2], run_name="run", device="cpu",
) as trainer:
    trainer.fit()
"""
HIDES, SHOWS = "\x1b[?25l", "\x1b[?25h"  # escape codes for the cursor


class Acts(Callback):
    """Calls a function at the end of one step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step = step
        self.act = act

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step:
            self.act(ctx)


def fail(ctx: Context) -> None:
    raise ValueError("a bad step")


def fit(folder: Path, *callbacks: Callback, **options: Any) -> None:
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        runs_folder=folder,
        run_name="run",
        device="cpu",
        **{"max_duration": "30ba", **options},
    ) as trainer:
        trainer.fit()


def on_a_terminal(how: str, folder: Path) -> str:
    """Return what a script writes to its standard error, a terminal, while its standard output is a file."""
    pty = pytest.importorskip("pty")
    parent_end, child_end = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(callsheet.__file__).parents[1]), "TERM": "xterm", "COLUMNS": "120"}
    with open(folder / "stdout", "wb") as stdout:
        process = subprocess.Popen([sys.executable, "-c", FITS, how, str(folder)], env=env, stdout=stdout, stderr=child_end)
    os.close(child_end)
    seen = b""
    while True:
        try:
            part = os.read(parent_end, 4096)
        except OSError:  # raised on Linux when the other end is closed
            part = b""
        if not part:
            break
        seen += part
    os.close(parent_end)
    process.wait()
    return seen.decode()


def test_lines_report_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ProgressBarLogger(), Acts(12, lambda ctx: ctx.control.save("asked for")))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4  # of three records within five seconds, only the first is printed
    assert re.fullmatch(r" 33%  epoch 1  step 10  loss [\d.e-]+  [\d,.]+ samples/s  0:00:00 left", lines[0])
    assert lines[1] == f"checkpoint (requested): {tmp_path / 'run' / 'checkpoints' / 'ep0-ba12'}"
    assert re.fullmatch(r"evaluation at step 30: validation/loss [\d.e-]+", lines[2])
    assert re.fullmatch(r"run finished: epoch 1  step 30  0:00:00 of training  \(reached max_duration, 30ba\)", lines[3])


def test_nothing_goes_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ProgressBarLogger())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("bar", [True, False])
def test_an_exception_is_reported_as_the_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str], bar: bool) -> None:
    stdout, stderr = sys.stdout, sys.stderr
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, ProgressBarLogger(bar=bar), Acts(20, fail))
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    assert capsys.readouterr().err.splitlines()[-1].startswith("run failed: epoch 1  step 20")


@pytest.mark.test_all
def test_a_terminal_has_a_bar_and_lines_above_it(tmp_path: Path) -> None:
    seen = on_a_terminal("finish", tmp_path)
    assert seen.count(HIDES) == seen.count(SHOWS) == 1
    in_bar, after = seen.split(SHOWS)
    assert "━" in in_bar
    assert re.search(r"100%.*epoch 1  step 30  loss", in_bar)
    assert "evaluation at step 30: validation/loss" in in_bar
    assert "run finished: epoch 1  step 30" in after
    assert (tmp_path / "stdout").read_text() == "printed elsewhere\n"


@pytest.mark.test_all
def test_the_bar_is_removed_before_the_traceback(tmp_path: Path) -> None:
    seen = on_a_terminal("fail", tmp_path)
    assert seen.count(HIDES) == seen.count(SHOWS) == 1
    after = seen.split(SHOWS)[1]
    assert after.index("run failed") < after.index("Traceback")
    assert "━" not in after
    assert (tmp_path / "stdout").read_text() == "printed elsewhere\n"


def test_a_bar_that_cannot_be_drawn_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        """A terminal whose writes fail while `is_gone`."""

        is_gone = False

        def write(self, text: str) -> int:
            if self.is_gone:
                raise OSError("the terminal is gone")
            return super().write(text)

        def isatty(self) -> bool:
            return True

    def disconnect(ctx: Context) -> None:
        terminal.is_gone = True

    def reconnect(ctx: Context) -> None:
        terminal.is_gone = False
        assert sys.stderr is terminal  # the bar's wrapper was removed

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(callsheet.loggers.progress_bar_logger, "_REFRESH_SECONDS", 0.0)  # every step
    fit(tmp_path, ProgressBarLogger(bar=True), Acts(5, disconnect), Acts(10, reconnect))
    assert "━" in terminal.getvalue()
    assert "run finished" in terminal.getvalue()


def test_many_records_print_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, ProgressBarLogger(bar=False), log_interval="1ba", eval_interval=None)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="bar='on'"):
        ProgressBarLogger(bar="on")


def test_evaluations_and_tests_count_their_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callsheet.loggers.progress_bar_logger, "_LINE_SECONDS", 0.0)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        {"first": DATA[:3], "second": DATA[:2]},
        callbacks=[ProgressBarLogger(bar=False)],
        runs_folder=tmp_path,
        device="cpu",
    ) as trainer:
        trainer.evaluate()
        trainer.test(DATA[:2])
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [f"evaluating first: batch {number}" for number in (1, 2, 3)]
    assert lines[3:5] == [f"evaluating second: batch {number}" for number in (1, 2)]
    assert lines[6:8] == ["testing: batch 1", "testing: batch 2"]


class TerminalWithEvent(io.StringIO):
    """A terminal that sets an event when the awaited text is written."""

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self._awaited, self.is_there = awaited, threading.Event()

    def write(self, text: str) -> int:
        if self._awaited in text:
            self.is_there.set()
        return super().write(text)

    def isatty(self) -> bool:
        return True


def test_a_handler_that_takes_long_is_named_on_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalWithEvent("(in Acts.on_train_step_end for 0 s)")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(callsheet.loggers.support.silence_watch, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(callsheet.loggers.progress_bar_logger, "_SILENT_SECONDS", 0.02)
    was_named = []
    fit(tmp_path, ProgressBarLogger(bar=True), Acts(5, lambda ctx: was_named.append(terminal.is_there.wait(30))))
    assert was_named == [True]
    assert "callsheet-silence-watch" not in {thread.name for thread in threading.enumerate()}


def test_an_evaluation_batch_that_takes_long_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = TerminalWithEvent("(no news for 0 s)")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(callsheet.loggers.support.silence_watch, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(callsheet.loggers.progress_bar_logger, "_SILENT_SECONDS", 0.02)

    class Slow(nn.Linear):
        was_seen = False

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.was_seen = terminal.is_there.wait(30)
            return super().forward(input)

    model = Slow(2, 1)
    with Trainer(
        model, nn.functional.mse_loss, None, DATA[:1], callbacks=[ProgressBarLogger(bar=True)], runs_folder=tmp_path, device="cpu"
    ) as trainer:
        trainer.evaluate()
    assert model.was_seen


def test_the_watch_thread_ends_when_the_terminal_is_gone() -> None:
    def fail(text: str) -> None:
        texts.append(text)
        raise OSError("the terminal is gone")

    texts: list[str] = []
    watch = SilenceWatch(lambda: -100.0, fail, patience=0.0)
    watch._thread.join(30)
    assert not watch._thread.is_alive()
    watch.stop()
    assert len(texts) == 1
