"""`SignalWatch` with real signals, sent to this process or to a program that the test starts."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from callsheet.errors import ConfigError
from callsheet.run.signals import GRACE_SECONDS, SignalWatch

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="signals of POSIX")

PATIENCE = 30.0


@pytest.fixture(autouse=True)
def _restored_handlers() -> Iterator[None]:
    """Restore the signal handlers after each test."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    earlier = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


def send(number: signal.Signals) -> None:
    """Send a signal to this process. Python runs the handler before the next line."""
    signal.raise_signal(number)


def program(code: str, *, patience: float = PATIENCE) -> "subprocess.CompletedProcess[str]":
    head = "import os, signal, sys, threading, time\nfrom callsheet.run.signals import SignalWatch\n"
    return subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, check=False, timeout=patience)


def test_a_new_watch_has_received_no_signal() -> None:
    with SignalWatch(["SIGUSR1"]) as watch:
        assert watch.received is None
        assert watch.arrived_at is None
        assert watch.seconds_left == math.inf


@pytest.mark.parametrize("given", ["SIGUSR1", signal.SIGUSR1, int(signal.SIGUSR1)])
def test_a_received_signal_is_recorded_with_its_time(given: str | int) -> None:
    before = time.monotonic()
    with SignalWatch([given], grace=10.0) as watch:
        send(signal.SIGUSR1)
        after = time.monotonic()
        assert watch.received is signal.SIGUSR1
        assert watch.arrived_at is not None
        assert before <= watch.arrived_at <= after
        assert 0 < watch.seconds_left <= 10.0
    assert watch.received is signal.SIGUSR1


def test_a_signal_sent_with_os_kill_is_recorded() -> None:
    with SignalWatch(["SIGUSR1"]) as watch:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watch.received is signal.SIGUSR1


def test_only_the_first_signal_is_recorded() -> None:
    with SignalWatch(["SIGUSR1", "SIGUSR2"]) as watch:
        send(signal.SIGUSR2)
        first = watch.arrived_at
        send(signal.SIGUSR1)
        assert watch.received is signal.SIGUSR2
        assert watch.arrived_at == first


def test_by_default_sigterm_is_watched_and_does_not_end_the_process() -> None:
    with SignalWatch() as watch:
        send(signal.SIGTERM)
        assert watch.received is signal.SIGTERM
    assert watch.grace == GRACE_SECONDS


def test_a_watched_sigint_does_not_raise_keyboard_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with SignalWatch(["SIGINT"]) as watch:
        send(signal.SIGINT)
        assert watch.received is signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_an_earlier_handler_is_called_too_and_restored() -> None:
    was_received: list[int] = []

    def earlier(number: int, frame: FrameType | None) -> None:
        was_received.append(number)

    signal.signal(signal.SIGUSR1, earlier)
    with SignalWatch(["SIGUSR1"]) as watch:
        assert signal.getsignal(signal.SIGUSR1) is not earlier
        send(signal.SIGUSR1)
        assert watch.received is signal.SIGUSR1
    assert was_received == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is earlier
    send(signal.SIGUSR1)
    assert len(was_received) == 2


@pytest.mark.parametrize("earlier", [signal.SIG_DFL, signal.SIG_IGN])
def test_default_and_ignore_handlers_are_restored(earlier: signal.Handlers) -> None:
    signal.signal(signal.SIGUSR1, earlier)
    with SignalWatch(["SIGUSR1"]) as watch:
        send(signal.SIGUSR1)
        assert watch.received is signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is earlier


def test_nested_watches_both_record_the_signal() -> None:
    with SignalWatch(["SIGUSR1"]) as outer:
        with SignalWatch(["SIGUSR1"]) as inner:
            send(signal.SIGUSR1)
            assert inner.received is signal.SIGUSR1
        assert outer.received is signal.SIGUSR1
        assert outer.arrived_at is not None


def test_handlers_are_restored_after_an_exception() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with pytest.raises(ValueError, match="x"), SignalWatch(["SIGUSR1"]):
        raise ValueError("x")
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert signal.set_wakeup_fd(-1) == -1


def test_a_watch_leaves_no_thread_and_no_file_descriptor() -> None:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        with SignalWatch(["SIGUSR1"]):
            assert len(set(threading.enumerate()) - threads) == 1
    assert set(threading.enumerate()) <= threads
    assert (len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0) == descriptors


def test_outside_the_main_thread_a_watch_does_nothing() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    found: list[Any] = []

    def watch() -> None:
        with SignalWatch(["SIGUSR1"]) as watch:
            found.append((signal.getsignal(signal.SIGUSR1), watch.received, watch.seconds_left))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert found == [(before, None, math.inf)]


def test_the_arrival_time_is_recorded_while_the_main_thread_runs_c_code(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    ran = program(f"""
import ctypes
seen = []
def look():  # the main thread is in C, and cannot run its handler, until this has written
    tick = threading.Event()
    while watch.arrived_at is None:
        tick.wait(0.001)
    seen.append(watch.received)
    with open({str(gate)!r}, "w") as opened:
        opened.write("continue\\n")
with SignalWatch(["SIGUSR1"]) as watch:
    threading.Thread(target=look).start()
    ctypes.CDLL(None).system(f"kill -USR1 {{os.getpid()}}; read line < {gate}".encode())
print(seen, watch.received.name)
""")
    assert ran.stdout == "[None] SIGUSR1\n", ran.stderr


@pytest.mark.parametrize("given", ["SIGNOTHING", "TERM", 0, 10_000])
def test_a_signal_that_does_not_exist_is_rejected(given: str | int) -> None:
    with pytest.raises(ConfigError, match=r"this system has no signal .*; write its name, such as 'SIGTERM' or 'SIGUSR1'"):
        SignalWatch([given])


def test_another_library_s_wakeup_descriptor_is_kept() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    try:
        with SignalWatch(["SIGUSR1"]) as watch:
            send(signal.SIGUSR1)
            assert watch.received is signal.SIGUSR1
            assert watch.arrived_at is not None
        assert os.read(read, 10) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(-1) == write
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)


def test_a_wakeup_descriptor_that_another_library_sets_later_is_kept() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        with SignalWatch(["SIGUSR1"]):
            signal.set_wakeup_fd(write)
        assert signal.set_wakeup_fd(-1) == write
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)


def test_signal_handlers_of_an_asyncio_loop_work_inside_a_watch() -> None:
    async def main() -> bool:
        recorded = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, recorded.set)
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.wait_for(recorded.wait(), PATIENCE)
        return True

    with SignalWatch(["SIGUSR1"]) as watch:
        assert asyncio.run(main())
        send(signal.SIGUSR1)
        assert watch.received is signal.SIGUSR1


def test_a_signal_given_twice_is_watched_once() -> None:
    ran = program(
        'with SignalWatch(["SIGUSR1", int(signal.SIGUSR1)]) as watch:\n'
        "    signal.raise_signal(signal.SIGUSR1)\n"
        "print(watch.received.name, signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)"
    )
    assert ran.stdout == "SIGUSR1 True\n", ran.stderr


def test_a_signal_that_cannot_be_caught_is_rejected_before_any_handler_is_set() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in ("SIGKILL", signal.SIGSTOP):
        with pytest.raises(ConfigError, match=r"SIG(KILL|STOP) cannot be handled by any program"):
            SignalWatch(["SIGUSR1", number])
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


FORKS = """
signal.alarm(20)  # if all else fails
r, w = os.pipe()
with SignalWatch(["SIGTERM"]) as watch:
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os.close(1), os.close(2)  # their readers wait only for the parent
        os.write(w, b"x")
        signal.pause()
        os._exit(7)
    os.read(r, 1)
"""


def test_a_watch_ends_although_a_forked_child_runs() -> None:
    ran = program(FORKS + "    signal.alarm(2)\nos.kill(child, signal.SIGKILL)\nprint('ended')")
    assert ran.stdout == "ended\n", ran.returncode


def test_a_forked_child_can_be_terminated() -> None:
    ran = program(
        FORKS
        + "    os.kill(child, signal.SIGTERM)\n    status = os.waitpid(child, 0)[1]\nprint(os.waitstatus_to_exitcode(status))"
    )
    assert ran.stdout == f"{-signal.SIGTERM}\n", ran.stderr


def test_a_forked_child_has_the_handlers_from_before_all_nested_watches() -> None:
    ran = program("""
from contextlib import ExitStack
def earlier(number, frame): ...
signal.signal(signal.SIGUSR1, earlier)
with ExitStack() as stack:
    watches = [stack.enter_context(SignalWatch(["SIGUSR1", "SIGUSR2"])) for _ in range(8)]
    child = os.fork()
    if child == 0:
        one, two = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2)
        os._exit(0 if one is earlier and two is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    signal.raise_signal(signal.SIGUSR1)  # the parent still watches
print({watch.received.name for watch in watches}, signal.getsignal(signal.SIGUSR1) is earlier)
""")
    assert ran.stdout == "0\n{'SIGUSR1'} True\n", ran.stderr


def test_a_signal_to_a_forked_child_is_not_recorded_in_the_parent() -> None:
    ran = program(FORKS + "    os.kill(child, signal.SIGTERM)\n    os.waitpid(child, 0)\nprint(watch.received, watch.arrived_at)")
    assert ran.stdout == "None None\n", ran.stderr
