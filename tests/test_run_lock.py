"""A run folder has one writer at a time, tested with real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from callsheet.errors import RunInUseError, RunLockLostError
from callsheet.run.lock_claims import claim_of
from callsheet.run.run_lock import RunLock

HOLDER = Path(__file__).parent / "lock_holder.py"


class Holder:
    """A process that acquires the lock."""

    def __init__(self, folder: Path, *, timeout: float = 0, heartbeat: float = 0.1, stale: float = 60, machine: str = "") -> None:
        words = [str(folder), str(timeout), str(heartbeat), str(stale), *([machine] if machine else [])]
        self.process = subprocess.Popen(
            [sys.executable, str(HOLDER), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.logged: list[str] = []

    def answer(self) -> str:
        """Return the next line that is not a log message."""
        assert self.process.stdout is not None
        while (line := self.process.stdout.readline()).startswith("log: "):
            self.logged.append(line)
        return line.strip()

    def send(self, word: str) -> str:
        stdin: IO[str] | None = self.process.stdin
        assert stdin is not None
        stdin.write(f"{word}\n")
        stdin.flush()
        return self.answer()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Holder]]:
    holders: list[Holder] = []

    def starts(**options: float | str) -> Holder:
        holders.append(Holder(tmp_path / "runs" / "x", **options))  # type: ignore[arg-type]
        return holders[-1]

    yield starts
    for holder in holders:
        holder.process.send_signal(signal.SIGCONT)
        holder.end()


def test_a_second_process_is_rejected_until_the_first_releases(start: Callable[..., Holder], tmp_path: Path) -> None:
    first = start()
    assert first.answer() == "acquired"
    rejected = start().answer()
    assert rejected.startswith(f"rejected: {tmp_path}/runs/x is being trained by process {first.process.pid} on machine ")
    assert rejected.endswith("Give the run another name or folder to train beside it.")
    assert first.send("check") == "owner"
    assert first.send("release") == "released"
    assert list(tmp_path.iterdir()) == []  # the folder `runs` is removed too, because only the lock needed it
    assert start().answer() == "acquired"


def test_a_waiting_process_acquires_the_lock_when_it_is_released(start: Callable[..., Holder]) -> None:
    first = start()
    assert first.answer() == "acquired"
    second = start(timeout=60)
    assert second.process.stdout is not None
    assert "waiting up to 60 s" in second.process.stdout.readline()
    assert first.send("release") == "released"
    assert second.answer() == "acquired"
    assert second.logged == []  # it logs only once that it is waiting


@pytest.mark.parametrize("is_reaped", [True, False])  # a process that was not waited for still has an entry in the system's table
def test_the_lock_of_a_killed_process_is_taken_over_at_once(start: Callable[..., Holder], is_reaped: bool) -> None:
    first = start()
    assert first.answer() == "acquired"
    first.process.kill()
    if is_reaped:
        first.process.wait()
    else:
        os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)
    second = start()
    assert second.answer() == "acquired"
    assert second.send("check") == "owner"
    (line,) = second.logged
    assert f"process {first.process.pid}" in line
    assert "is gone" in line


@pytest.mark.test_all
def test_a_suspended_holder_loses_the_lock_and_notices_it(start: Callable[..., Holder]) -> None:
    first = start()
    assert first.answer() == "acquired"
    first.process.send_signal(signal.SIGSTOP)
    second = start(timeout=60, stale=0.5)
    assert second.answer() == "acquired"
    assert "no heartbeat" in second.logged[-1]
    first.process.send_signal(signal.SIGCONT)
    assert first.answer() == "loss"  # its heartbeat noticed the loss, without a call of check()
    assert f"process {second.process.pid}" in first.send("check")
    assert first.send("release") == "released"
    assert second.send("check") == "owner"
    assert start().answer().startswith("rejected")


@pytest.mark.test_all
def test_a_holder_on_another_machine_is_judged_by_its_heartbeats(start: Callable[..., Holder]) -> None:
    first = start(machine="a")
    assert first.answer() == "acquired"
    # It is alive, although its process id does not exist there.
    assert start(machine="b", timeout=1.5, stale=1).answer().startswith("rejected")
    first.end()
    second = start(machine="b", timeout=60, stale=1)
    assert second.answer() == "acquired"
    assert "no heartbeat" in second.logged[-1]


@pytest.mark.test_all
def test_one_of_many_waiting_processes_acquires_the_lock(start: Callable[..., Holder]) -> None:
    first = start()
    assert first.answer() == "acquired"
    waiters = [start(timeout=4) for _ in range(6)]
    for waiter in waiters:
        assert waiter.process.stdout is not None
        assert "waiting" in waiter.process.stdout.readline()
    first.end()
    answers = [waiter.answer() for waiter in waiters]
    assert sorted(answer.split(":")[0] for answer in answers) == ["acquired", *["rejected"] * 5]


def test_of_many_processes_that_start_at_once_one_acquires_the_lock(start: Callable[..., Holder]) -> None:
    answers = [holder.answer() for holder in [start() for _ in range(6)]]
    assert sorted(answer.split(":")[0] for answer in answers) == ["acquired", *["rejected"] * 5]


def test_a_run_takes_the_lock_from_an_idle_run_of_its_process(tmp_path: Path) -> None:
    busy = [False]
    first, second = RunLock(tmp_path / "x", is_busy=lambda: busy[0]), RunLock(tmp_path / "x")
    first.acquire(0)
    busy[0] = True
    with pytest.raises(RunInUseError, match="another run of this process"):
        second.acquire(60)  # it is rejected at once, because it would wait for its own process
    busy[0] = False
    second.acquire(0)
    with pytest.raises(RunLockLostError, match="another run of this process"):
        first.check()
    first.release()
    second.check()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_does_not_release_the_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "x")
    lock.acquire(0)
    child = os.fork()
    if child == 0:
        lock.release()
        try:
            RunLock(tmp_path / "x").acquire(0)
        except RunInUseError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lock.check()
    lock.release()


def test_the_holder_of_a_deleted_lock_has_lost_it(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "x")
    lock.acquire(0)
    (tmp_path / ".x.lock" / "1").unlink()
    with pytest.raises(RunLockLostError):
        lock.check()
    lock.release()


def test_an_empty_claim_is_respected_until_it_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("callsheet.run.run_lock.HEARTBEAT_SECONDS", 0.1)
    (tmp_path / ".x.lock").mkdir()
    (tmp_path / ".x.lock" / "7").touch()  # the process that created it was killed before it wrote its claim
    lock = RunLock(tmp_path / "x")
    with pytest.raises(RunInUseError, match="another process"):
        lock.acquire(0)
    began = time.monotonic()
    lock.acquire(60)
    assert time.monotonic() - began >= 0.1
    lock.check()
    lock.release()


def test_reading_a_claim_creates_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    assert claim_of(folder) is None
    lock = RunLock(folder)
    lock.acquire(0)
    claim = claim_of(folder)
    assert claim is not None
    assert claim.is_alive
    lock.release()
    assert claim_of(folder) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"[1]", b"{}"])
def test_an_invalid_claim_is_ignored_by_readers_and_not_taken_over_at_once(content: bytes, tmp_path: Path) -> None:
    claims = tmp_path / ".x.lock"
    claims.mkdir()
    (claims / "1").write_bytes(content)
    assert claim_of(tmp_path / "x") is None
    with pytest.raises(RunInUseError):
        RunLock(tmp_path / "x").acquire(0)
