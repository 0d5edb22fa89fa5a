from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, CallbackManager, Context, Trainer
from callsheet.callbacks import hang_detector
from callsheet.callbacks.hang_detector import HangDetector
from callsheet.core.costs import PATH_EVENTS
from callsheet.errors import ConfigError, HangError
from callsheet.testing import RankProcesses, run_ranks

AT = 40  # the step that hangs; until then, the detector has checked the steps of 20 ms seven times


def stuck_here(seconds: float) -> None:
    time.sleep(seconds)


class Hangs(Callback):
    """Takes 20 ms for each step, and `seconds` for one step of one rank, for a save, or for an evaluation."""

    def __init__(self, where: str = "step", *, at: int = AT, seconds: float = 4.0, rank: int = 0) -> None:
        self.where, self.at, self.seconds, self.rank = where, at, seconds, rank

    def on_train_step_start(self, ctx: Context) -> None:
        time.sleep(0.02)
        if ctx.step == self.at and self.where == "step" and ctx.run.rank == self.rank:
            stuck_here(self.seconds)

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == AT + 2:
            ctx.control.save("once", replicated=True)

    def on_eval_step_start(self, ctx: Context) -> None:
        if self.where == "evaluation":
            stuck_here(self.seconds)

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        if self.where == "save":
            stuck_here(self.seconds)


def fit(folder: Path | str, *callbacks: Callback, **options: Any) -> Trainer:
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 100
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        data,
        data[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        callbacks=callbacks,
        runs_folder=folder,
        run_name="run",
        eval_interval=f"{AT + 4}ba",
        max_duration=f"{AT + 8}ba",
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()
    assert not [
        thread for thread in threading.enumerate() if thread.name == "callsheet-hangs" and thread.is_alive() and _is_alive(thread)
    ]
    return trainer


def _is_alive(thread: threading.Thread) -> bool:
    thread.join(2)
    return thread.is_alive()


def detector(**options: Any) -> HangDetector:
    """Return a detector with a limit of one second, which allows for the pauses and slow steps of a busy machine."""
    return HangDetector(**({"min_seconds": 1.0, "factor": 10.0} | options))


@pytest.mark.test_all
def test_writes_the_stacks_and_reports_when_the_run_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        assert fit(tmp_path, detector(), Hangs()).run.outcome == "finished"
    (file,) = (tmp_path / "run" / "hangs").iterdir()
    assert file.name == f"rank0-step{AT}.txt"
    text = file.read_text()
    assert "in stuck_here" in text
    assert "callsheet-hangs" in text or "in _watch" in text  # the stacks of all threads
    assert caplog.text.count("made no progress") == 1
    assert caplog.text.count("rank 0 continues after") == 1


@pytest.mark.test_all
@pytest.mark.parametrize("where", ["evaluation", "save"])
def test_evaluations_and_saves_are_not_hangs(where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, detector(), Hangs(where))
    assert "made no progress" not in caplog.text


@pytest.mark.test_all
def test_evaluations_and_saves_that_exceed_their_own_limit_are_hangs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, detector(pause_seconds=1.5), Hangs("evaluation"))
    assert "made no progress" in caplog.text


@pytest.mark.test_all
def test_the_first_step_may_be_slow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, detector(), Hangs(at=1))
    assert "made no progress" not in caplog.text


@pytest.mark.test_all
def test_the_limit_grows_with_the_learned_step_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, detector(factor=200.0), Hangs(seconds=2.0))  # a limit of 200 times 20 ms
    assert "made no progress" not in caplog.text


@pytest.mark.test_all
def test_learned_step_times_are_kept_across_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stops(Callback):
        def on_checkpoint_published(self, ctx: Context) -> None:
            ctx.control.stop("to resume")

    fit(tmp_path, detector(), Hangs(at=0), Stops())
    resumed = detector()
    with caplog.at_level(logging.WARNING, "callsheet"):
        fit(tmp_path, resumed, Hangs(at=AT + 6), resume="auto")  # too few steps to learn the time again
    assert "made no progress" in caplog.text
    assert f"around step {AT + 6}" in caplog.text


@pytest.mark.test_all
def test_raises_during_a_sleep(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(HangError, match=f"around step {AT} on rank 0"):
        fit(tmp_path, detector(action="raise"), Hangs(seconds=60))
    assert time.monotonic() - began < 20
    assert "in stuck_here" in (tmp_path / "run" / "hangs" / f"rank0-step{AT}.txt").read_text()
    assert signal.getsignal(signal.SIGRTMAX - 3) == signal.SIG_DFL


@pytest.mark.test_all
def test_does_nothing_if_the_step_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hang_detector, "_OTHER_RANKS_SECONDS", 60.0)
    with caplog.at_level(logging.WARNING, "callsheet"):
        assert fit(tmp_path, detector(action="raise"), Hangs()).run.outcome == "finished"
    assert caplog.text.count("made no progress") == 1


@pytest.mark.test_all
def test_raises_in_a_thread_that_executes_python_code(tmp_path: Path) -> None:
    class Spins(Callback):
        def on_train_step_start(self, ctx: Context) -> None:
            until = time.monotonic() + (60 if ctx.step == AT else 0.02)
            while time.monotonic() < until:
                time.sleep(0.001)

    errors: list[BaseException] = []

    def run() -> None:
        try:
            fit(tmp_path, detector(action="raise"), Spins())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert [type(error) for error in errors] == [HangError]


def killed(folder: str) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    min_seconds = {"0": 1.5, "1": 1.0}[os.environ["RANK"]]  # the waiting rank detects the hang half a second later
    fit(folder, detector(action="kill", exit_code=77, min_seconds=min_seconds), Hangs(seconds=60, rank=1))


@pytest.mark.test_all
def test_kills_every_rank_after_each_has_written_its_stacks(tmp_path: Path) -> None:
    with RankProcesses(killed, 2, str(tmp_path)) as ranks:
        ends = ranks.wait(60)
    assert [end.exitcode for end in ends] == [77, 77]
    folder = tmp_path / "run" / "hangs"
    assert "in stuck_here" in (folder / f"rank1-step{AT}.txt").read_text()
    waiting = (folder / f"rank0-step{AT}.txt").read_text()  # this rank waits for the other one
    assert "stuck_here" not in waiting
    assert "in _epoch" in waiting
    for rank in (0, 1):
        assert json.loads((folder / f"rank{rank}-step{AT}-collectives.json").read_text())["entries"]


class HoldsTheLog(Callback):
    """Hangs while holding a log handler's lock, as a write to a blocked terminal does."""

    def on_train_step_start(self, ctx: Context) -> None:
        time.sleep(0.02)
        if ctx.step == AT:
            handler = logging.StreamHandler()
            logging.getLogger("callsheet").addHandler(handler)
            try:
                with handler.lock or threading.RLock():
                    stuck_here(120)
            finally:
                logging.getLogger("callsheet").removeHandler(handler)


def killed_with_the_log(folder: str) -> None:
    hang_detector._ACTION_SECONDS = 1.0
    fit(folder, detector(action="kill", exit_code=77), HoldsTheLog())


@pytest.mark.test_all
def test_kills_although_logging_is_blocked(tmp_path: Path) -> None:
    with RankProcesses(killed_with_the_log, 1, str(tmp_path)) as ranks:
        ends = ranks.wait(60)
    assert [end.exitcode for end in ends] == [77]
    assert "in stuck_here" in (tmp_path / "run" / "hangs" / f"rank0-step{AT}.txt").read_text()


@pytest.mark.test_all
def test_raises_although_logging_is_blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detector, "_ACTION_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(HangError, match=f"around step {AT} on rank 0"):
        fit(tmp_path, detector(action="raise"), HoldsTheLog())
    assert time.monotonic() - began < 60
    for thread in threading.enumerate():
        if thread.name == "callsheet-hangs-report":
            thread.join(60)  # the report is logged later


def with_two_detectors(folder: str) -> None:
    other = detector(folder=Path(folder, "other"), min_seconds=1.5)
    other.name = "other"
    logging.disable(logging.CRITICAL)
    fit(folder, detector(), other, Hangs(rank=1))


@pytest.mark.test_all
def test_two_instances_work_in_one_run_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(with_two_detectors, 2, str(tmp_path))
    for folder in (tmp_path / "run" / "hangs", tmp_path / "other"):
        found = {path.name for path in folder.glob("*.txt")}  # on a slow machine, there may be another report
        assert found >= {f"rank0-step{AT}.txt", f"rank1-step{AT}.txt"}


def test_it_does_not_listen_to_steps() -> None:
    received = {line[0] for line in CallbackManager([HangDetector()]).call_sheet().rows()}
    assert not received & (PATH_EVENTS - {"on_eval_step_end"})


def test_rejects_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="factor=1"):
        HangDetector(factor=1)
    with pytest.raises(ConfigError, match="exit_code=0"):
        HangDetector(exit_code=0)
    with pytest.raises(ConfigError, match="did you mean 'raise'"):
        HangDetector(action="rais")  # type: ignore[arg-type]  # the mistake that is tested


@pytest.mark.test_all
def test_the_main_thread_is_named_among_many_others(tmp_path: Path) -> None:
    release = threading.Event()
    others = [threading.Thread(target=release.wait, args=(60,), daemon=True) for _ in range(120)]
    for thread in others:
        thread.start()
    try:
        fit(tmp_path, detector(), Hangs())
    finally:
        release.set()
    (file,) = (tmp_path / "run" / "hangs").iterdir()
    assert "in stuck_here" in file.read_text()
