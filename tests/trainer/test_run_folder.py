"""A run folder has one writer at a time, and which folders count as a run, in real trainings."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet import Callback, Context, Trainer, attach
from callsheet.callbacks import CheckpointSaver
from callsheet.checkpoint import find_checkpoints
from callsheet.errors import CheckpointError, ConfigError, RunInUseError, RunLockLostError
from callsheet.loggers import JSONLLogger
from callsheet.run.run_guard import check_lock_timeout
from callsheet.run.run_lock import RunLock

SCRIPT = Path(__file__).parent / "locked_run.py"

Starts = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starts]:
    started: list[subprocess.Popen[str]] = []

    def starts(*words: str, steps: int = 1_000_000, ranks: int = 1) -> subprocess.Popen[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, str(SCRIPT), str(tmp_path), str(steps), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, process_group=0
            )
        )
        return started[-1]

    yield starts
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def until(process: subprocess.Popen[str], word: str) -> str:
    """Return the output of the process up to a line that begins with `word`."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith(word):
            return output
    raise AssertionError(f"it never printed {word!r}:\n{output}")


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, True, "30"])
def test_a_wrong_lock_timeout_is_rejected(seconds: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"lock_timeout_seconds={seconds!r}: give a finite number of seconds")):
        check_lock_timeout(seconds)


@pytest.mark.slow  # it starts several processes that import torch
def test_a_second_start_of_a_running_script_is_rejected_and_after_a_kill_it_resumes(start: Starts, tmp_path: Path) -> None:
    first = start()
    until(first, "step 3")
    second = start(steps=5)
    output = second.communicate(timeout=120)[0]
    assert second.returncode == 1
    assert f"RunInUseError: {tmp_path}/x is being trained by process {first.pid} on machine " in output
    assert "begins" not in output
    until(first, "step 30")  # it saves a checkpoint at each step
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    last = find_checkpoints(tmp_path / "x" / "checkpoints").checkpoints[0].step
    third = start(steps=last + 1)
    output = third.communicate(timeout=120)[0]
    assert third.returncode == 0, output
    assert f"begins at {last}" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]  # the lock is gone with the run


@pytest.mark.slow  # it starts several processes that import torch
def test_a_suspended_run_that_lost_its_folder_ends_with_an_error(start: Starts, tmp_path: Path) -> None:
    first = start()
    until(first, "step 3")
    os.kill(first.pid, signal.SIGSTOP)
    second = start("stale=0.5", "timeout=60", "machine=another")
    until(second, "step")
    os.kill(first.pid, signal.SIGCONT)
    output = first.communicate(timeout=120)[0]
    assert first.returncode == 1
    assert f"RunLockLostError: this run has lost the lock of {tmp_path}/x" in output
    assert f"process {second.pid}" in output
    step = int(until(second, "step").rpartition("step ")[2])
    until(second, f"step {step + 5}")  # it continues
    lines = (tmp_path / "x" / "events.jsonl").read_text()
    assert "RunLockLostError" not in lines  # the file belongs to the second process


@pytest.mark.slow
def test_all_ranks_raise_if_the_folder_is_in_use(start: Starts, tmp_path: Path) -> None:
    first = start()
    until(first, "step 3")
    both = start("timeout=2", ranks=2)
    output = both.communicate(timeout=120)[0]
    assert both.returncode != 0
    assert output.count(f"RunInUseError: {tmp_path}/x is being trained by process {first.pid}") == 2
    assert output.count("waiting up to 2 s") == 1
    assert "begins" not in output


@pytest.mark.slow
def test_all_ranks_end_if_the_lock_is_lost(start: Starts, tmp_path: Path) -> None:
    first = start(ranks=2)
    until(first, "step 3")
    for pid in _children(first.pid):
        os.kill(pid, signal.SIGSTOP)
    second = start("stale=0.5", "timeout=60", "machine=another")
    until(second, "step")
    for pid in _children(first.pid):
        os.kill(pid, signal.SIGCONT)
    output = first.communicate(timeout=120)[0]
    assert first.returncode != 0
    assert "has lost the lock" in output
    step = int(until(second, "step").rpartition("step ")[2])
    until(second, f"step {step + 5}")


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def trainer(folder: Path, *callbacks: Callback, steps: int = 2, **options: Any) -> Trainer:
    data = [(torch.randn(4, 2), torch.randn(4, 1))] * 3
    given: Mapping[str, Any] = {"run_name": "x", "lock_timeout_seconds": 0.0} | options
    return Trainer(
        torch.nn.Linear(2, 1),
        torch.nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_duration=f"{steps}ba",
        callbacks=callbacks,
        runs_folder=folder / "runs",
        device="cpu",
        **given,
    )


def test_a_second_trainer_takes_over_the_folder_of_an_idle_one(tmp_path: Path) -> None:
    first = trainer(tmp_path, CheckpointSaver(save_interval="1ba"))
    first.fit()  # it is not closed, as in a notebook
    second = trainer(tmp_path, CheckpointSaver(save_interval="1ba"), steps=4, resume="auto")
    second.fit()
    with pytest.raises(RunLockLostError, match="another run of this process"):
        first.save_checkpoint()
    second.save_checkpoint()
    second.close()


def test_a_trainer_inside_the_training_of_another_is_rejected(tmp_path: Path) -> None:
    class Nested(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            trainer(tmp_path, lock_timeout_seconds=60)

    with pytest.raises(RunInUseError, match="another run of this process"):
        trainer(tmp_path, Nested()).fit()


def test_an_attached_loop_holds_the_lock(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    options: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "callbacks": [],
        "run_name": "x",
        "runs_folder": tmp_path / "runs",
        "lock_timeout_seconds": 0,
    }
    with attach(**options), pytest.raises(RunInUseError), attach(**options):
        pass
    with attach(**options):
        pass
    assert list(tmp_path.iterdir()) == []


def test_evaluating_and_saving_elsewhere_needs_no_lock(tmp_path: Path) -> None:
    with trainer(tmp_path, CheckpointSaver(save_interval="1ba")) as first:
        first.fit()
    lock = RunLock(tmp_path / "runs" / "x", is_busy=lambda: True)
    lock.acquire(0)
    reader = Trainer(
        torch.nn.Linear(2, 1),
        torch.nn.functional.mse_loss,
        eval_dataloader=[(torch.randn(4, 2), torch.randn(4, 1))],
        run_name="x",
        runs_folder=tmp_path / "runs",
        resume="auto",
    )
    reader.evaluate()
    reader.save_checkpoint(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="another run of this process"):
        reader.save_checkpoint()  # writes to the run's folder
    lock.release()


@pytest.mark.parametrize("name", ["x", None])
def test_a_run_that_writes_nothing_leaves_nothing(tmp_path: Path, name: str | None) -> None:
    with trainer(tmp_path, run_name=name) as run:
        run.fit()
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_a_given_name_is_locked_while_it_writes(tmp_path: Path) -> None:
    locks: list[list[str]] = []

    class Looks(Callback):
        def on_train_end(self, ctx: Context) -> None:
            locks.append([path.name for path in (tmp_path / "runs").iterdir() if path.name.endswith(".lock")])

    with trainer(tmp_path, CheckpointSaver(save_interval="1ba"), Looks(), run_name=None) as run:
        run.fit()
    assert locks == [[f".{run.run.name}.lock"]]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.run.name]


# --- which folder is a run's ---


class Notes(Callback):
    """A user's logger that creates the run folder at `on_run_start`, before set-up is complete."""

    def on_run_start(self, ctx: Context) -> None:
        assert ctx.run.folder is not None
        ctx.run.folder.mkdir(parents=True, exist_ok=True)
        (ctx.run.folder / "notes.txt").write_text("begun")


def test_a_folder_that_only_a_logger_created_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="precision"):
        trainer(tmp_path, Notes(), precision="bf17")
    with trainer(tmp_path, Notes()) as run:
        run.fit()
    assert sorted(path.name for path in (tmp_path / "runs" / "x").iterdir()) == ["notes.txt", "run.json"]
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer(tmp_path, Notes())


def test_a_logger_that_writes_only_at_the_end_marks_the_run(tmp_path: Path) -> None:
    class Late(Callback):
        def on_run_end(self, ctx: Context) -> None:
            Notes.on_run_start(self, ctx)  # type: ignore[arg-type]

    with trainer(tmp_path, Late()) as run:
        run.fit()
    assert (tmp_path / "runs" / "x" / "run.json").exists()


def test_a_run_that_never_trained_can_be_started_again_but_one_that_trained_cannot(tmp_path: Path) -> None:
    trainer(tmp_path, loggers=[JSONLLogger()]).close()
    with trainer(tmp_path, loggers=[JSONLLogger()]) as run:
        run.fit()
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer(tmp_path)
