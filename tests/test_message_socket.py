"""`MessageSocket`, which connects the run's process with the process of a callback: no call waits longer than it may."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from callsheet.lanes.message_socket import MessageSocket

LARGE = os.urandom(4_000_000)  # more than a socket's buffer holds

Ends = tuple[MessageSocket, socket.socket]  # the end of the run's process, and the end that the child and its own children have


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The two ends of a connection; the child process runs."""
    ours, theirs = socket.socketpair()
    end = MessageSocket(ours)
    with theirs, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as end.child:
        yield end, theirs
        end.child.kill()
    end.close()


@pytest.fixture
def dead(ends: Ends) -> Ends:
    """The two ends of a connection. The child process has ended, but the connection is still open."""
    assert ends[0].child is not None
    os.kill(ends[0].child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, ends[0].child.pid, os.WEXITED | os.WNOWAIT)
    return ends


def packed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "big") + content


def test_messages_of_any_size_arrive_in_both_directions(ends: Ends) -> None:
    ours, theirs = ends[0], MessageSocket(ends[1])
    for content in (b"", b"a", LARGE, b"b"):
        for one, other in ((ours, theirs), (theirs, ours)):
            sender = threading.Thread(target=one.send, args=(content,))
            sender.start()
            assert other.receive() == content
            sender.join()


def test_what_a_dead_child_has_sent_is_received_up_to_the_last_complete_message(dead: Ends) -> None:
    ours, theirs = dead
    theirs.sendall(packed(b"one") + packed(b"two") + packed(b"three")[:-1])
    assert [ours.receive(), ours.receive()] == [b"one", b"two"]
    with pytest.raises(EOFError):
        ours.receive()


@pytest.mark.parametrize("size", [1, 8, 9])
def test_a_child_that_dies_within_a_message_is_noticed(size: int, dead: Ends) -> None:
    dead[1].sendall(packed(b"content")[:size])
    with pytest.raises(EOFError):
        dead[0].receive()


def test_sending_to_a_dead_child_ends(dead: Ends) -> None:
    with pytest.raises(EOFError):
        dead[0].send(LARGE)


def test_a_process_that_a_dead_child_has_forked_cannot_send_without_end(dead: Ends) -> None:
    ours, theirs = dead
    is_over = threading.Event()

    def send() -> None:
        while not is_over.is_set():
            try:
                theirs.send(packed(b"again") * 100)
            except OSError:
                return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(EOFError):
            list(iter(ours.receive, None))
    finally:
        is_over.set()
        ours.shut_down()
        sender.join()


def test_a_running_child_has_until_the_deadline(ends: Ends) -> None:
    ours, theirs = ends
    with pytest.raises(TimeoutError):
        ours.receive(until=time.monotonic() + 0.05)
    theirs.sendall(packed(b"content")[:-1])
    with pytest.raises(TimeoutError):
        ours.receive(until=time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        ours.send(LARGE, until=time.monotonic() + 0.05)


@pytest.mark.parametrize("is_shut_down_here", [True, False])
def test_the_end_of_the_connection_ends_a_wait(is_shut_down_here: bool, ends: Ends) -> None:
    ours, theirs = ends
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            ours.receive()
        except (EOFError, OSError) as error:
            errors.append(error)

    waiting = threading.Thread(target=receive)
    waiting.start()
    if is_shut_down_here:
        ours.shut_down()
    else:
        theirs.close()
    waiting.join(60)
    assert len(errors) == 1


def test_a_default_timeout_of_the_script_does_not_make_the_connection_non_blocking() -> None:
    socket.setdefaulttimeout(30)
    try:
        ours, theirs = socket.socketpair()
    finally:
        socket.setdefaulttimeout(None)
    with theirs:
        assert not os.get_blocking(theirs.fileno())  # a child process gets this end with this flag
        for end in (ours, theirs):
            MessageSocket(end)
            assert os.get_blocking(end.fileno())
    ours.close()
