"""`Background` with a manager and no trainer: no accepted event is lost at the run's end, when the callback is removed, or at exit."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import callsheet
from callsheet import Background, Callback, CallbackManager, Context, RunInfo
from callsheet.core.costs import CostReport
from callsheet.loggers import Logger
from callsheet.run.lifetime import Lifetime

SOURCE = Path(callsheet.__file__).parents[1]


class Steps(Callback):
    """Records the steps that it receives."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps.append(ctx.step)


class AsyncSteps(Callback):
    """Records the steps in an async handler."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def on_train_step_end(self, ctx: Context) -> None:
        await asyncio.sleep(0.001 if ctx.step % 7 == 0 else 0)
        self.steps.append(ctx.step)


class Hangs(Callback):
    """Its handler blocks until it is released."""

    def __init__(self) -> None:
        self.release, self.begun = threading.Event(), threading.Event()

    def on_train_step_end(self, ctx: Context) -> None:
        self.begun.set()
        self.release.wait(60)


class CountsThreads(Hangs):
    """Records the steps, and how many threads were in the handler at once. Its first call blocks until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []
        self.at_once = self.most_at_once = 0

    def on_train_step_end(self, ctx: Context) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.steps.append(ctx.step)
        super().on_train_step_end(ctx)
        self.at_once -= 1


class KeepsReports(Logger):
    """Keeps the cost reports."""

    def __init__(self) -> None:
        self.reports: list[CostReport] = []

    def log_costs(self, ctx: Context, report: CostReport) -> None:
        self.reports.append(report)


@pytest.fixture
def hangs() -> Iterator[Hangs]:
    callback = Hangs()
    yield callback
    callback.release.set()


def opened(*callbacks: Callback) -> tuple[CallbackManager, Context]:
    manager = CallbackManager(callbacks)
    ctx = Context(RunInfo("by hand"))
    manager.open(ctx)
    return manager, ctx


def fire_steps(manager: CallbackManager, ctx: Context, steps: range) -> None:
    for ctx.step in steps:
        manager.fire("on_train_step_end", ctx)


class StartsTasks(Callback):
    """Records the steps in asyncio tasks, which its handler does not await. A negative step is never recorded."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def on_train_step_end(self, ctx: Context) -> None:
        self.task = asyncio.create_task(self.record(ctx.step))

    async def record(self, step: int) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        if step < 0:
            await asyncio.Event().wait()
        self.steps.append(step)


# --- the end ---


@pytest.mark.parametrize("kind", [Steps, AsyncSteps])
@pytest.mark.parametrize("is_open", [True, False])
def test_fire_and_close_at_once_delivers_everything_in_order(kind: Any, is_open: bool) -> None:
    for _ in range(5):
        callback = kind()
        manager = CallbackManager([Background(callback)])
        ctx = Context(RunInfo("by hand"))
        if is_open:
            manager.open(ctx)
        fire_steps(manager, ctx, range(1, 51))
        manager.close()
        assert callback.steps == list(range(1, 51))


@pytest.mark.test_all
def test_each_lane_has_its_own_deadline(hangs: Hangs, caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_step_end(self, ctx: Context) -> None:
            time.sleep(0.4)
            self.steps.append(ctx.step)

    slow, idle = Slow(), Background(Callback(), deadline=60)
    manager, ctx = opened(Background(hangs, deadline=0.2), Background(slow, deadline=20), idle)
    fire_steps(manager, ctx, range(1, 4))
    began = time.monotonic()
    manager.close()
    assert time.monotonic() - began < 10
    assert slow.steps == [1, 2, 3]  # its own deadline is longer than the one that has passed
    assert caplog.text.count("a lane has not delivered all events") == 1
    assert "a lane has not delivered all events: Hangs: 2 waiting, and one has not returned" in caplog.text


def test_a_hung_lane_delays_the_end_by_its_own_deadline_and_not_by_a_longer_one(hangs: Hangs) -> None:
    manager, ctx = opened(Background(hangs, deadline=0.5), Background(Steps(), deadline=60))
    fire_steps(manager, ctx, range(1, 4))
    lifetime = Lifetime(manager, ctx)
    lifetime.start()
    began = time.monotonic()
    lifetime.end()
    assert 0.5 <= time.monotonic() - began < 10  # its deadline is for the whole end, not for each part of it


def test_a_second_run_waits_for_the_handler_in_which_the_first_run_has_left_its_callback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callback = CountsThreads()
    manager, ctx = opened(Background(callback, deadline=0.2))
    fire_steps(manager, ctx, range(1, 2))
    assert callback.begun.wait(60)
    manager.close()
    manager, ctx = opened(Background(callback, deadline=60))
    fire_steps(manager, ctx, range(11, 14))
    end = time.monotonic() + 60
    while "A handler of callback CountsThreads that an earlier run has called" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert callback.steps == [1]
    callback.release.set()
    manager.close()
    assert callback.steps == [1, 11, 12, 13]
    assert callback.most_at_once == 1


def test_a_handler_can_start_a_run_with_its_own_callback_whose_handler_does_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class StartsRuns(Steps):
        def on_train_step_end(self, ctx: Context) -> None:
            super().on_train_step_end(ctx)
            if ctx.step in (2, 12):
                own, own_ctx = opened(wrapper)
                fire_steps(own, own_ctx, range(ctx.step + 9, ctx.step + 12))
                own.close()

    callback = StartsRuns()
    wrapper = Background(callback, deadline=60)
    manager, ctx = opened(wrapper)
    fire_steps(manager, ctx, range(1, 4))
    manager.close()
    assert callback.steps == [1, 2, 11, 12, 21, 22, 23, 13, 3]
    assert caplog.text == ""


def test_the_end_of_a_run_waits_for_tasks_that_a_handler_has_started(caplog: pytest.LogCaptureFixture) -> None:
    callback = StartsTasks()
    manager, ctx = opened(Background(callback, deadline=60))
    fire_steps(manager, ctx, range(1, 6))
    manager.close()
    assert callback.steps == [1, 2, 3, 4, 5]
    assert caplog.text == ""


def test_tasks_that_do_not_end_are_named_and_cancelled_at_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    callback = StartsTasks()
    manager, ctx = opened(Background(callback, deadline=0.5, overflow="latest"))
    fire_steps(manager, ctx, range(-1, 0))
    manager.close()
    assert "asyncio tasks of callback StartsTasks are not done after" in caplog.text
    assert "and are cancelled: StartsTasks.record. Await them" in caplog.text
    end = time.monotonic() + 60
    while not callback.task.done():
        assert time.monotonic() < end
        time.sleep(0.001)
    assert callback.task.cancelled()


def test_undelivered_events_are_in_the_failures_at_the_end_of_the_run(hangs: Hangs) -> None:
    class AtEnd(Callback):
        failures: tuple[Any, ...] = ()

        def on_run_end(self, ctx: Context) -> None:
            self.failures = ctx.run.failures

    keeps_reports, inline, other = KeepsReports(), AtEnd(), AtEnd()
    other.name = "other"
    manager = CallbackManager([Background(hangs, deadline=0.2), keeps_reports, inline, Background(other)])
    ctx = Context(RunInfo("by hand"))
    lifetime = Lifetime(manager, ctx)
    lifetime.start()
    fire_steps(manager, ctx, range(1, 5))
    assert hangs.begun.wait(10)
    lifetime.end()
    for failures in (inline.failures, other.failures, keeps_reports.reports[-1].failures):
        assert [(each.callback, each.count, each.undelivered) for each in failures] == [("Hangs", 0, 4)]
    after = manager.cost_report(4).failures  # the end was not delivered either, but `Hangs` does not listen to it
    assert [(each.callback, each.undelivered) for each in after] == [("Hangs", 4)]
    again = Context(RunInfo("another"))
    hangs.release.set()
    manager.open(again)
    assert manager.cost_report(0).failures == ()
    manager.close()


def test_loggers_in_a_lane_receive_nothing_after_the_end(caplog: pytest.LogCaptureFixture) -> None:
    class Tables(Logger):
        lane = "background"

        def __init__(self) -> None:
            self.tables: list[str] = []

        def log_table(self, ctx: Context, name: str, columns: Any, rows: Any) -> None:
            self.tables.append(name)

    tables = Tables()
    manager, ctx = opened(tables)
    manager.notify_loggers("log_table", ctx, name="in time", columns=[], rows=[])
    manager.close()
    manager.notify_loggers("log_table", ctx, name="too late", columns=[], rows=[])
    assert manager._table.lanes is not None
    assert list(manager._table.lanes) == []
    assert "Tables does not receive log_table: its lane ended with the run" in caplog.text
    manager.open(ctx)
    manager.notify_loggers("log_table", ctx, name="again", columns=[], rows=[])
    manager.close()
    assert tables.tables == ["in time", "again"]


# --- removed, and added again ---


@pytest.mark.parametrize("is_wrapped_again", [False, True])
def test_a_callback_removed_and_added_again_receives_all_events_in_order_on_one_thread(is_wrapped_again: bool) -> None:
    class Slow(Steps):
        at_once = most_at_once = 0

        def on_train_step_end(self, ctx: Context) -> None:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            time.sleep(0.005)
            super().on_train_step_end(ctx)
            self.at_once -= 1

    slow = Slow()
    lane = Background(slow)
    manager, ctx = opened(lane)
    fire_steps(manager, ctx, range(1, 11))
    assert manager.remove(slow) == 1
    fire_steps(manager, ctx, range(11, 21))
    manager.add(Background(slow) if is_wrapped_again else lane)
    fire_steps(manager, ctx, range(21, 31))
    manager.close()
    assert slow.steps == [*range(1, 11), *range(21, 31)]
    assert slow.most_at_once == 1


def test_a_removed_callback_receives_all_events_fired_before_its_removal() -> None:
    steps = Steps()
    manager, ctx = opened(Background(steps))
    fire_steps(manager, ctx, range(1, 11))
    manager.remove(steps)
    manager.close()
    assert steps.steps == list(range(1, 11))


def test_failures_of_a_removed_callback_stay_in_the_cost_report() -> None:
    class Fails(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            raise ValueError("broken")

    fails = Fails()
    manager, ctx = opened(Background(fails))
    fire_steps(manager, ctx, range(1, 3))
    manager.remove(fails)
    manager.drain(ctx)
    assert [(each.callback, each.count) for each in manager.cost_report(2).failures] == [("Fails", 2)]
    manager.close()


# --- the program's exit ---

BARE = """
import sys, time
from callsheet import Background, Callback, CallbackManager, Context, RunInfo

class Writes(Callback):
    def on_train_step_end(self, ctx):
        time.sleep(0.001)
        with open(sys.argv[1], "a") as file:
            file.write(f"{ctx.step}\\n")

class Awaits(Writes):
    async def on_train_step_end(self, ctx):
        Writes.on_train_step_end(self, ctx)

def train():
    manager = CallbackManager([Background(Awaits() if "async" in sys.argv else Writes())])
    ctx = Context(RunInfo("by hand"))
    for ctx.step in range(1, 51):
        manager.fire("on_train_step_end", ctx)

if "late" in sys.argv:
    import atexit, callsheet.lanes.queue
    atexit.register(train)
else:
    train()
if "error" in sys.argv:
    raise KeyboardInterrupt
"""


def interpreters() -> list[str]:
    """Return this interpreter and the others that are installed: since 3.12, no thread can start while the interpreter shuts down."""
    found = [sys.executable]
    for name in ("python3.12", "python3.13", "python3.14"):
        path = shutil.which(name)
        if path is not None and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            found.append(path)
    return found


@pytest.mark.parametrize("words", ["", "async", "error", "late", "late async"])
def test_a_manager_that_is_not_closed_is_drained_when_the_program_ends(words: str, tmp_path: Path) -> None:
    for interpreter in interpreters():
        received = tmp_path / "received.txt"
        received.unlink(missing_ok=True)
        ran = subprocess.run(
            [interpreter, "-c", BARE, str(received), *words.split()],
            env={"PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert ran.returncode == 0 or "KeyboardInterrupt" in ran.stderr, ran.stderr
        assert received.read_text().split() == [str(step) for step in range(1, 51)], (interpreter, ran.stderr)


def test_undelivered_events_at_exit_are_logged_and_delay_the_exit_by_the_deadline(tmp_path: Path) -> None:
    code = BARE.replace("time.sleep(0.001)", "time.sleep(60)").replace("Writes())", "Writes(), deadline=0.5)")
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "received.txt")],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert time.monotonic() - began < 30
    assert "The program ends, and a lane has not delivered all events: Writes: 49 waiting, and one has not returned" in ran.stderr


@pytest.mark.test_all
def test_a_manager_without_references_is_drained() -> None:
    steps = Steps()

    def train() -> None:
        manager = CallbackManager([Background(steps)])
        fire_steps(manager, Context(RunInfo("by hand")), range(1, 51))

    train()
    gc.collect()
    end = time.monotonic() + 20
    while len(steps.steps) < 50:
        assert time.monotonic() < end, steps.steps
        time.sleep(0.01)
    assert steps.steps == list(range(1, 51))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="callsheet")


# --- saving its state, and what it logs at the run's end ---


class Stateful(Steps):
    """Records the steps, and saves them in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}


class HangsWithState(Hangs):
    """Its handler blocks, and it has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun.is_set()}


def test_saving_a_state_waits_as_long_as_the_deadline_of_its_lane(caplog: pytest.LogCaptureFixture) -> None:
    hangs, steps = HangsWithState(), Stateful()
    manager, ctx = opened(Background(hangs, deadline=0.3), Background(steps, deadline=30))
    fire_steps(manager, ctx, range(1, 4))
    began = time.monotonic()
    state = manager.state_dict()
    seconds = time.monotonic() - began
    hangs.release.set()
    manager.close()
    assert 0.3 <= seconds < 10
    assert state["callbacks"]["Stateful"] == {"steps": [1, 2, 3]}
    assert "The state of HangsWithState is out of date" in caplog.text


def test_after_a_signal_saving_a_state_waits_for_a_third_of_the_time_left() -> None:
    hangs = HangsWithState()
    manager, ctx = opened(Background(hangs, deadline=30))
    fire_steps(manager, ctx, range(1, 4))
    manager.limit_lane_waits(1.5)
    began = time.monotonic()
    manager.state_dict()
    seconds = time.monotonic() - began
    hangs.release.set()
    manager.close()
    assert 0.4 <= seconds < 10


class LogsAtTheEnd(Callback):
    """Logs a file and a table at the end of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_run_end(self, ctx: Context) -> None:
        time.sleep(0.2)  # the others were called long ago
        path = self.folder / "summary.txt"
        path.write_text("all of it")
        ctx.log_file("summary.txt", path)
        ctx.log_table("last", ["a"], [[1]])


class Closes(Logger):
    """Records what is logged, and the end of the run."""

    def __init__(self) -> None:
        self.took: list[str] = []

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        self.took.append(path.read_text())

    def log_table(self, ctx: Context, name: str, columns: Any, rows: Any) -> None:
        self.took.append(name)

    def on_run_end(self, ctx: Context) -> None:
        self.took.append("closed")


@pytest.mark.parametrize("is_in_lane", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_what_a_lane_logs_at_the_run_s_end_reaches_the_loggers_before_they_close(
    *, is_in_lane: bool, is_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closes, words = Closes(), Background(LogsAtTheEnd(tmp_path))
    taking = Background(closes) if is_in_lane else closes
    manager = CallbackManager([taking, words] if is_first else [words, taking])
    ctx = Context(RunInfo("by hand"), loggers=manager.notify_loggers)
    lifetime = Lifetime(manager, ctx)
    lifetime.start()
    lifetime.end()
    assert closes.took == ["all of it", "last", "closed"]
    assert caplog.text == ""


def test_messages_that_come_too_late_for_the_loggers_are_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(LogsAtTheEnd):
        phase = "report"

        def log_table(self, ctx: Context, name: str, columns: Any, rows: Any) -> None:
            """Have a method of a logger, so that the manager calls this callback together with the loggers."""

    manager = CallbackManager([Background(Late(tmp_path)), Closes()])
    lifetime = Lifetime(manager, Context(RunInfo("by hand"), loggers=manager.notify_loggers))
    lifetime.start()
    lifetime.end()
    assert "Messages from the lane of Late came at the run's end, too late for the loggers: log_file, 1 times" in caplog.text
    assert "log_table, 1 times" in caplog.text
