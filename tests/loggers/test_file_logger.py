from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import callsheet
from callsheet import Callback, Context, RunInfo, Trainer
from callsheet.errors import ConfigError
from callsheet.loggers import ConsoleLogger, FileLogger
from callsheet.testing import run_ranks

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 4
START = r"--- \S+  run run  rank 0 of 1  pid \d+ on \S+"


class Acts(Callback):
    """Calls the given functions at the ends of steps."""

    def __init__(self, **acts: Any) -> None:
        self.acts = acts

    def on_train_step_end(self, ctx: Context) -> None:
        if act := self.acts.get(f"at_{ctx.step}"):
            act(ctx)


class PrintsAtEvents(Callback):
    """Prints at events from the start to the end of the run."""

    phase = "report"

    def on_event(self, ctx: Context) -> None:
        if ctx.event in ("on_run_start", "on_train_step_end", "on_run_end"):
            print(f"{ctx.event} {ctx.step}", file=sys.stderr if ctx.step % 2 else sys.stdout)


def fit(folder: Path, *callbacks: Callback, loggers: Any = None, **options: Any) -> None:
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        callbacks=callbacks,
        loggers=loggers if loggers is not None else [FileLogger()],
        runs_folder=folder,
        device="cpu",
        **{"max_duration": "1ep", "run_name": "run", **options},
    ) as trainer:
        trainer.fit()


def lines(folder: Path, rank: int = 0) -> list[str]:
    return (folder / "logs" / f"rank-{rank}.log").read_text().splitlines()


def test_output_is_in_the_file_and_on_the_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stdout, stderr = sys.stdout, sys.stderr
    fit(tmp_path, PrintsAtEvents())
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    recorded = ["on_run_start 0", *(f"on_train_step_end {step}" for step in (1, 2, 3, 4)), "on_run_end 4"]
    start, *rest = lines(tmp_path / "run")
    assert re.fullmatch(START + " ---", start)
    assert rest == recorded
    out, err = capsys.readouterr()
    assert out.splitlines() == [recorded[0], recorded[2], recorded[4], recorded[5]]
    assert err.splitlines() == [recorded[1], recorded[3]]


def test_output_of_other_loggers_is_captured_completely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, loggers=[FileLogger(), ConsoleLogger()])
    assert lines(tmp_path / "run")[-1].startswith("run finished: epoch 1  step 4")


def test_records_of_logging_are_captured(tmp_path: Path) -> None:
    kept = io.StringIO()
    before, sys.stderr = sys.stderr, kept
    handler = logging.StreamHandler()  # it keeps the stream that it finds
    logging.getLogger().addHandler(handler)
    try:
        fit(tmp_path, Acts(at_2=lambda ctx: logging.getLogger("mine").warning("careful")))
    finally:
        sys.stderr = before
        logging.getLogger().removeHandler(handler)
    assert lines(tmp_path / "run")[1:] == ["careful"]
    assert kept.getvalue() == "careful\n"
    assert handler.stream is kept


def test_an_exception_is_in_the_file_and_the_streams_are_restored(tmp_path: Path) -> None:
    def fail(ctx: Context) -> None:
        raise ValueError("a bad step")

    stdout, stderr = sys.stdout, sys.stderr
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Acts(at_2=fail))
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    text = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "Traceback" in text
    assert "in fail\n" in text
    assert "ValueError: a bad step\nraised by callback Acts" in text


def test_a_resume_appends_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def leave(ctx: Context) -> None:
        ctx.control.save("asked for")
        ctx.control.stop("asked for")

    logger = FileLogger()
    fit(tmp_path, PrintsAtEvents(), Acts(at_2=leave), loggers=[logger])
    fit(tmp_path, PrintsAtEvents(), resume="auto", loggers=[logger])
    recorded = lines(tmp_path / "run")
    starts = [index for index, line in enumerate(recorded) if line.startswith("---")]
    assert len(starts) == 2
    assert recorded[: starts[1]][1:] == ["on_run_start 0", "on_train_step_end 1", "on_train_step_end 2", "on_run_end 2"]
    assert re.fullmatch(START + "  resumed from step 2 ---", recorded[starts[1]])
    assert recorded[starts[1] + 1 :] == ["on_run_start 0", "on_train_step_end 3", "on_train_step_end 4", "on_run_end 4"]


def test_a_run_that_does_not_start_writes_nothing(tmp_path: Path) -> None:
    fit(tmp_path, loggers=[])
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "run.json").touch()
    stdout, stderr = sys.stdout, sys.stderr
    with pytest.raises(ConfigError, match="already holds a run"):
        fit(tmp_path, PrintsAtEvents())
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    assert not (tmp_path / "run" / "logs").exists()


def test_the_size_limit_is_kept(tmp_path: Path) -> None:
    fit(tmp_path, Acts(at_2=lambda ctx: print(*range(300), sep="\n")), loggers=[FileLogger(max_bytes=700)])
    assert (tmp_path / "run" / "logs" / "rank-0.log").stat().st_size <= 700
    assert (tmp_path / "run" / "logs" / "rank-0.log.1").stat().st_size <= 700


def test_two_loggers_need_two_names(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    stdout = sys.stdout
    other, third = FileLogger(), FileLogger()
    other.name = "other"
    fit(tmp_path, PrintsAtEvents(), loggers=[FileLogger(), other, third])
    assert lines(tmp_path / "run")[1:] == lines(tmp_path / "run" / "other")[1:]
    assert "is already written by another FileLogger; give this one its own name" in caplog.text
    assert sys.stdout is stdout


def test_two_concurrent_runs_may_end_in_any_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stdout, stderr = sys.stdout, sys.stderr
    first, second = FileLogger(), FileLogger()
    contexts = [Context(RunInfo(name, tmp_path / name)) for name in ("one", "two")]
    for logger, ctx in zip((first, second), contexts, strict=True):
        ctx.checkpoint = None
        if logger is first:  # a hand-written loop may not fire it
            logger.on_run_start(ctx)
        logger.on_checkpoint_load_end(ctx)
    print("both")
    first.on_run_end(contexts[0])
    print("the second")
    second.on_run_end(contexts[1])
    second.on_run_end(contexts[1])
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    assert lines(tmp_path / "one")[1:] == ["both"]
    assert lines(tmp_path / "two")[1:] == ["both", "the second"]


def test_a_failing_disk_is_reported_and_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no disk here that is always full")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "rank-0.log").symlink_to("/dev/full")
    fit(tmp_path, PrintsAtEvents(), resume="auto", log_interval="1ba")
    recorded = [record.getMessage() for record in caplog.records if "FileLogger" in record.getMessage()]
    assert len(recorded) == 1
    assert "No space" in recorded[0]


@pytest.mark.parametrize(
    ("options", "message"), [({"capture": "fds"}, "did you mean 'fd'"), ({"max_bytes": 0}, "max_bytes=0: give more than 0")]
)
def test_rejects_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FileLogger(**options)


def on_a_rank(folder: str) -> None:
    rank = os.environ["RANK"]
    fit(Path(folder), Acts(at_2=lambda ctx: print(f"from rank {rank}")))


def test_every_rank_has_its_file(tmp_path: Path) -> None:
    run_ranks(on_a_rank, 2, str(tmp_path))
    for rank in (0, 1):
        start, *recorded = lines(tmp_path / "run", rank)
        assert f"rank {rank} of 2" in start
        assert recorded == [f"from rank {rank}"]


BAR = """
import sys, torch
from callsheet import Callback, Trainer
from callsheet.loggers import FileLogger, ProgressBarLogger

class Talks(Callback):
    def on_train_step_end(self, ctx):
        if ctx.step == 20:
            print("printed later", file=sys.stderr)

data = [(torch.ones(2, 2), torch.ones(2, 1))] * 2000
with Trainer(
    torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data, data[:1], callbacks=[Talks()],
    loggers=[FileLogger(), ProgressBarLogger()], max_duration="2000ba", runs_folder=sys.argv[1], run_name="run", device="cpu",
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
) as trainer:
    trainer.fit()
assert type(sys.stderr).__name__ == "TextIOWrapper"
"""


@pytest.mark.slow
def test_a_bar_on_a_terminal_is_one_line_of_the_file(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    parent_end, child_end = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(callsheet.__file__).parents[1]), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", BAR, str(tmp_path)], env=env, stdout=subprocess.DEVNULL, stderr=child_end)
    os.close(child_end)
    seen = b""
    try:
        while part := os.read(parent_end, 4096):
            seen += part
    except OSError:  # raised on Linux when the other end is closed
        pass
    os.close(parent_end)
    assert process.wait() == 0, seen.decode()
    assert seen.decode().count("━") > 24  # it was drawn several times
    _, printed, *others = lines(tmp_path / "run")
    assert printed == "printed later"
    assert sum("━" in line for line in others) == 1
    assert any(line.startswith("evaluation at step 2000: validation/loss") for line in others)
    assert others[-1].startswith("run finished: epoch 1  step 2000")
    assert not any("\x1b" in line for line in others)


# --- file descriptors ---

SCRIPT = """
import faulthandler, os, subprocess, sys, torch
from callsheet import Callback, Trainer
from callsheet.loggers import FileLogger

def say(text):
    "In one piece, where several processes write."
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        if index == 3 and torch.utils.data.get_worker_info() is not None:
            say("from a worker")
        return torch.ones(2), torch.ones(1)

class Talks(Callback):
    def on_run_start(self, ctx): say("early")
    def on_train_step_end(self, ctx):
        if ctx.step == 1:
            say("python")
            os.write(2, "from höher up\\n".encode())
            subprocess.run([sys.executable, "-c", "import os; os.write(1, b'from a child\\\\n')"])
            ctypes.CDLL(None).puts(b"from c")
        if ctx.step == 2 and how == "crash":
            print("last words", flush=True)
            faulthandler.enable()
            ctypes.string_at(0)
        if ctx.step == 2 and how == "many":
            for number in range(20000):
                print(f"line {number} " + "x" * 50)
    def on_run_end(self, ctx): say("late")

import ctypes
folder, how = sys.argv[1:]
if how == "nested":
    class Outer(FileLogger):
        name = "outer"
    loggers = [Outer(capture="fd"), FileLogger(capture="fd")]
else:
    loggers = [FileLogger(capture="fd")]
before = [(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in (1, 2)]
for name in ("run", "again"):
    with Trainer(
        torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, torch.utils.data.DataLoader(Data(), num_workers=2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), callbacks=[Talks()], loggers=loggers,
        max_duration="2ba", runs_folder=folder, run_name=name, device="cpu",
    ) as trainer:
        trainer.fit()
    assert before == [(os.fstat(fd).st_dev, os.fstat(fd).st_ino) for fd in (1, 2)]
print("after")
"""


def run_script(how: str, folder: Path) -> tuple[str, int]:
    """Run the script, and return its standard output and error in one text, and its exit status."""
    env = {**os.environ, "PYTHONPATH": str(Path(callsheet.__file__).parents[1])}
    with open(folder / "seen", "wb") as seen:
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder), how], env=env, stdout=seen, stderr=seen, check=False)
    return (folder / "seen").read_text(), done.returncode


PRINTED = {"early", "python", "from höher up", "from a child", "from c", "from a worker", "late"}


@pytest.mark.test_all
def test_descriptors_capture_the_output_of_c_code_and_child_processes(tmp_path: Path) -> None:
    seen, code = run_script("plainly", tmp_path)
    assert code == 0, seen
    for name in ("run", "again"):
        start, *recorded = lines(tmp_path / name)
        assert start.startswith("---")
        assert set(recorded) == PRINTED
        assert len(recorded) == len(PRINTED)
    assert sorted(seen.splitlines()) == sorted([*PRINTED, *PRINTED, "after"])


@pytest.mark.slow
def test_descriptors_of_two_loggers_are_restored(tmp_path: Path) -> None:
    seen, code = run_script("nested", tmp_path)
    assert code == 0, seen
    assert set(lines(tmp_path / "run")[1:]) == PRINTED
    assert set(lines(tmp_path / "run" / "outer")[1:]) <= PRINTED  # it ends first, while the other may still forward output
    assert sorted(seen.splitlines()) == sorted([*PRINTED, *PRINTED, "after"])


@pytest.mark.test_all
def test_descriptors_capture_the_last_output_of_a_crash(tmp_path: Path) -> None:
    seen, code = run_script("crash", tmp_path)
    assert code == -signal.SIGSEGV
    recorded = lines(tmp_path / "run")
    assert "last words" in recorded
    assert any("Segmentation fault" in line for line in recorded)
    assert "Segmentation fault" in seen


@pytest.mark.slow
def test_descriptors_lose_nothing_of_a_large_output(tmp_path: Path) -> None:
    seen, code = run_script("many", tmp_path)
    assert code == 0
    many = [f"line {number} {'x' * 50}" for number in range(20000)]
    for text, times in ((lines(tmp_path / "run"), 1), (lines(tmp_path / "again"), 1), (seen.splitlines(), 2)):
        assert [line for line in text if line.startswith("line")] == many * times
