"""`Process` with a manager and no trainer: how child processes end, forks, and what cannot be sent."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from callsheet import Callback, CallbackManager, Context, Process, RunInfo


class Lingers(Callback):
    """Its process takes a while to end."""

    def __init__(self, *, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds

    def on_train_step_end(self, ctx: Context) -> None:
        atexit.register(time.sleep, self.seconds)


class Counts(Callback):
    """Counts the steps that it receives in its process."""

    lane = "process"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps.append(ctx.step)

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps, "pid": os.getpid()} if self.steps else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = list(state["steps"])


class DiesAfterFork(Callback):
    """Forks a process, which keeps the connection open, and ends its own process, perhaps within a message."""

    def __init__(self, *, path: str, is_within_message: bool) -> None:
        self.path, self.is_within_message = path, is_within_message

    def on_train_step_end(self, ctx: Context) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
        Path(self.path).write_text(str(child))
        if self.is_within_message:
            os.write(int(sys.argv[1]), b"\0")  # the first byte of a message; `argv[1]` is the descriptor of the connection
        os._exit(7)


class WaitsForFile(Callback):
    """Writes a file, and waits until another file exists."""

    def __init__(self, *, path: str) -> None:
        self.path = path

    def on_train_step_end(self, ctx: Context) -> None:
        Path(self.path, "begun").touch()
        while not Path(self.path, "release").exists():
            time.sleep(0.01)
        ctx.log_table("steps", ["step"], [[ctx.step]])


class WritesInTask(Callback):
    """Starts an asyncio task, which writes a file, and does not await it."""

    def __init__(self, *, path: str) -> None:
        self.path = path

    async def on_train_step_end(self, ctx: Context) -> None:
        self.task = asyncio.create_task(self.write())

    async def write(self) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        Path(self.path).write_text("written")


class LogsInTask(WritesInTask):
    """Starts an asyncio task, which logs a value after the run has closed the connection, and then writes a file."""

    async def on_train_step_end(self, ctx: Context) -> None:
        self.ctx = ctx
        await super().on_train_step_end(ctx)

    async def write(self) -> None:
        for _ in range(100):  # the handler returns at once, so the rest runs at the end of the process
            await asyncio.sleep(0)
        self.ctx.log({"late": 1.0})
        await super().write()


class WritesAtEnd(Counts):
    """Writes a file when its process ends regularly."""

    def __init__(self, *, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_step_end(self, ctx: Context) -> None:
        super().on_train_step_end(ctx)
        if ctx.step == 1:
            atexit.register(Path(self.path).write_text, "ended")


class RaisesInState(Counts):
    """`state_dict` raises after the second step."""

    def state_dict(self) -> Mapping[str, Any]:
        if len(self.steps) > 2:
            raise OSError("no connection")
        return super().state_dict()


class Strange(Exception):
    """An error whose text is computed from its argument, so that it cannot be rebuilt from the text."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"{code}: {hint}")


class FarWitness(Callback):
    """Counts events and keeps an exception, in its process."""

    snapshot_fields = ("user_state", "exception")

    def __init__(self) -> None:
        self.steps = self.pid = 0
        self.seen: list[Any] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps += 1
        self.pid = os.getpid()

    def on_exception(self, ctx: Context) -> None:
        error = ctx.exception
        self.seen.append([type(error).__name__, str(error), list(getattr(error, "__notes__", []))])

    def state_dict(self) -> Mapping[str, Any]:
        return {"steps": self.steps, "pid": self.pid, "seen": self.seen}


def opened(*callbacks: Callback) -> tuple[CallbackManager, Context]:
    manager = CallbackManager(callbacks)
    ctx = Context(RunInfo("by hand"))
    manager.open(ctx)
    return manager, ctx


def fire_steps(manager: CallbackManager, ctx: Context, steps: range) -> None:
    for ctx.step in steps:
        manager.fire("on_train_step_end", ctx)


@pytest.mark.test_all
def test_close_waits_for_all_processes_at_the_same_time() -> None:
    manager, ctx = opened(*(Process(Lingers(name=f"lingers-{number}", seconds=3.0), deadline=60) for number in range(4)))
    fire_steps(manager, ctx, range(1, 2))
    manager.drain(ctx)
    began = time.monotonic()
    manager.close()
    assert 2 < time.monotonic() - began < 11  # and not four times three seconds


@pytest.mark.test_all
def test_processes_that_do_not_end_are_killed_after_one_common_timeout() -> None:
    far = [Process(Lingers(name=f"lingers-{number}", seconds=60.0), deadline=60) for number in range(3)]
    manager, ctx = opened(*far)
    fire_steps(manager, ctx, range(1, 2))
    manager.drain(ctx)
    pids = [each.pid for each in far]
    began = time.monotonic()
    manager.close()
    assert time.monotonic() - began < 12  # five seconds in total
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.test_all
def test_a_process_waits_at_its_end_for_tasks_that_a_handler_has_started(tmp_path: Path) -> None:
    manager, ctx = opened(Process(WritesInTask(path=str(tmp_path / "file")), deadline=60))
    fire_steps(manager, ctx, range(1, 2))
    manager.close()
    assert (tmp_path / "file").read_text() == "written"


@pytest.mark.test_all
def test_a_task_that_logs_after_the_run_s_end_does_the_rest_of_its_work(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manager, ctx = opened(Process(LogsInTask(path=str(tmp_path / "file")), deadline=60))
    fire_steps(manager, ctx, range(1, 2))
    manager.close()
    assert (tmp_path / "file").read_text() == "written"
    assert "Messages from the lane of LogsInTask came after the run's end, and are lost: log" in capfd.readouterr().err


@pytest.mark.test_all
def test_close_ends_the_process_although_a_third_process_holds_the_connection_open(tmp_path: Path) -> None:
    far = Process(WritesAtEnd(path=str(tmp_path / "ended")), deadline=60)
    manager, ctx = opened(far)
    fire_steps(manager, ctx, range(1, 2))
    manager.drain(ctx)
    assert far._connection is not None
    held = os.dup(far._connection._line.fileno())  # a dataloader's worker that was forked in between holds it in the same way
    manager.close()
    os.close(held)
    assert (tmp_path / "ended").read_text() == "ended"  # it noticed the end itself and was not killed


@pytest.mark.test_all
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("is_within_message", [False, True])
def test_a_process_that_dies_is_noticed_although_a_process_that_it_forked_still_runs(
    is_within_message: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager, ctx = opened(Process(DiesAfterFork(path=str(tmp_path / "pid"), is_within_message=is_within_message), deadline=60))
    fire_steps(manager, ctx, range(1, 2))
    manager.drain(ctx)
    noticed = "ProcessDied: the process of DiesAfterFork died, exit code 7" in caplog.text
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # raises if the forked process has ended
    manager.close()
    assert noticed


@pytest.mark.test_all
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_use_its_parent_s_process() -> None:
    counts = Process(Counts(), deadline=60)
    manager, ctx = opened(counts)
    fire_steps(manager, ctx, range(1, 4))
    manager.drain(ctx)
    assert counts._connection is not None
    line = counts._connection._line
    number = line.fileno()
    child = os.fork()
    if not child:  # this branch raises no assertion error: the child would run the rest of the tests
        signal.alarm(20)
        fine = counts.pid is None and line.fileno() == -1
        try:
            os.fstat(number)
            fine = False
        except OSError:
            pass
        fire_steps(manager, ctx, range(4, 6))
        manager.close()
        os._exit(0 if fine else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    fire_steps(manager, ctx, range(4, 6))
    assert manager.state_dict()["callbacks"]["Counts"]["steps"] == [1, 2, 3, 4, 5]
    manager.close()


@pytest.mark.test_all
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_forked_during_a_call_can_use_the_callback_in_a_run_of_its_own(tmp_path: Path) -> None:
    far = Process(WaitsForFile(path=str(tmp_path)), deadline=60)
    manager, ctx = opened(far)
    fire_steps(manager, ctx, range(1, 2))
    end = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    child = os.fork()
    if not child:
        code = 1
        try:
            (tmp_path / "release").touch()
            own, own_ctx = opened(far)
            fire_steps(own, own_ctx, range(1, 2))
            own.drain(own_ctx)
            code = 0 if far.pid is not None and own.cost_report(1).failures == () else 2
            own.close()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    manager.close()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.test_all
def test_a_state_that_a_process_cannot_return_is_missing_and_not_an_earlier_one(caplog: pytest.LogCaptureFixture) -> None:
    manager, ctx = opened(Process(RaisesInState(), deadline=60))
    fire_steps(manager, ctx, range(1, 3))
    assert manager.state_dict()["callbacks"]["RaisesInState"]["steps"] == [1, 2]
    fire_steps(manager, ctx, range(3, 4))
    state = manager.state_dict()
    manager.close()
    assert state["callbacks"] == {}
    assert "OSError: no connection" in state["missing"]["RaisesInState"]
    assert "The state of callback RaisesInState" in caplog.text


@pytest.mark.test_all
@pytest.mark.parametrize("is_by_class", [True, False])
def test_a_callback_removed_and_added_again_keeps_its_state(is_by_class: bool) -> None:
    counts = Counts()
    manager, ctx = opened(counts if is_by_class else Process(counts, deadline=60))
    fire_steps(manager, ctx, range(1, 4))
    manager.remove(counts)
    fire_steps(manager, ctx, range(4, 6))
    manager.add(counts if is_by_class else Process(counts, deadline=60))
    fire_steps(manager, ctx, range(6, 8))
    state = manager.state_dict()["callbacks"]["Counts"]
    manager.close()
    assert state["steps"] == [1, 2, 3, 6, 7]
    assert state["pid"] != os.getpid()


@pytest.mark.test_all
def test_a_process_that_a_nested_run_also_uses_ends_with_the_outer_run() -> None:
    far = Process(Counts(), deadline=60)
    outer, ctx = opened(far)
    fire_steps(outer, ctx, range(1, 3))
    outer.drain(ctx)
    pid = far.pid
    inner, inner_ctx = opened(far)
    fire_steps(inner, inner_ctx, range(11, 13))
    inner.close()
    assert far.pid == pid
    fire_steps(outer, ctx, range(3, 5))
    state = outer.state_dict()["callbacks"]["Counts"]
    failures = outer.cost_report(4).failures
    outer.close()
    assert state == {"steps": [1, 2, 11, 12, 3, 4], "pid": pid}
    assert failures == ()
    assert far.pid is None
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


class ObservedLock:
    """A lock that counts the threads that have tried to acquire it."""

    def __init__(self) -> None:
        self.attempts = 0
        self._lock = threading.Lock()

    def acquire(self, *, timeout: float) -> bool:
        self.attempts += 1
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()


@pytest.mark.test_all
def test_what_a_process_logs_belongs_to_the_run_that_has_called_it(tmp_path: Path) -> None:
    far = Process(WaitsForFile(path=str(tmp_path)), deadline=60)
    far._lock = lock = ObservedLock()  # type: ignore[assignment]
    logged: list[tuple[int, Any]] = []
    runs = []
    end = time.monotonic() + 60
    for number in (1, 2):
        manager = CallbackManager([far])
        ctx = Context(RunInfo("by hand"), loggers=lambda method, ctx, /, **payload: logged.append((ctx.step, payload["rows"])))
        manager.open(ctx)
        fire_steps(manager, ctx, range(number, number + 1))
        while lock.attempts < number:
            assert time.monotonic() < end
            time.sleep(0.01)
        runs.append((manager, ctx))
    (tmp_path / "release").touch()
    for manager, ctx in runs:
        manager.drain(ctx)
    for manager, _ in runs:
        manager.close()
    assert logged == [(1, [[1]]), (2, [[2]])]


# --- values that the process cannot rebuild ---


def exceptions() -> list[BaseException]:
    class Inside(Exception):
        pass

    class InMain(Exception):
        pass

    InMain.__module__ = "__main__"  # like a class that is defined in a script
    sys.modules["__main__"].InMain = InMain  # type: ignore[attr-defined]
    InMain.__qualname__ = "InMain"
    kept = ValueError("a text")
    kept.add_note("kept")
    return [Inside("a text"), InMain("a text"), Strange(3, hint="a text"), kept]


@pytest.mark.test_all
@pytest.mark.parametrize("place", range(4), ids=["of a function", "of the script", "not from its text", "of Python"])
def test_an_exception_of_any_class_reaches_the_process_which_keeps_its_state(place: int) -> None:
    manager, ctx = opened(Process(FarWitness(), deadline=60))
    fire_steps(manager, ctx, range(1, 4))
    before = manager.state_dict()["callbacks"]["FarWitness"]
    error = exceptions()[place]
    error.add_note("seen at step 3")
    ctx.exception = error
    manager.fire("on_exception", ctx)
    fire_steps(manager, ctx, range(4, 6))
    after = manager.state_dict()["callbacks"]["FarWitness"]
    failures = manager.cost_report(5).failures
    manager.close()
    assert failures == ()
    assert after["pid"] == before["pid"]
    assert after["steps"] == 5
    assert after["seen"] == [[type(error).__name__, str(error), error.__notes__]]


class Broken:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return os.strerror, ("no number",)

    def __deepcopy__(self, memo: Any) -> Broken:
        return self


class Closed:
    """An object that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not to be sent")

    def __deepcopy__(self, memo: Any) -> Closed:
        return self


@pytest.mark.parametrize(("kind", "error"), [(Broken, "TypeError"), (Closed, "not to be sent")])
def test_a_value_that_cannot_be_sent_is_one_failure_and_the_process_continues(
    kind: Any, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    manager, ctx = opened(Process(FarWitness(), deadline=60))
    fire_steps(manager, ctx, range(1, 4))
    before = manager.state_dict()["callbacks"]["FarWitness"]
    manager.user_state["thing"] = [kind()]
    fire_steps(manager, ctx, range(4, 5))
    manager.drain(ctx)
    manager.user_state.clear()
    fire_steps(manager, ctx, range(5, 6))
    after = manager.state_dict()["callbacks"]["FarWitness"]
    (failure,) = manager.cost_report(5).failures
    manager.close()
    assert failure.count == 1
    assert error in failure.last
    assert after["pid"] == before["pid"]
    assert after["steps"] == before["steps"] + 1 == 4
