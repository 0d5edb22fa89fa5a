"""The program of the process in which a callback runs: `python -m callsheet.lanes.process_worker FD` (FD: a socket's descriptor).

The program unpickles what it receives. That is safe, because only the run's process and this process can use the pair of sockets.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from callsheet.core.background import END_SECONDS
from callsheet.core.callback import Callback, label_of
from callsheet.core.parent_process import end_with_parent
from callsheet.core.spec import CallbackSpec
from callsheet.lanes.message_socket import MessageSocket
from callsheet.lanes.snapshot import Inbox, LaneControl, LaneMessage, control_of, snapshot_of

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("callsheet")

# How long this process waits, at its end, for asyncio tasks that handlers have started: a little less than until it is killed.
_TASKS_SECONDS = 0.8 * END_SECONDS


class _Sender:
    """Sends messages to the process of the run, from any thread. A lock lets only one thread send at a time."""

    def __init__(self, connection: MessageSocket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, content: bytes) -> None:
        with self._lock:
            self._connection.send(content)


class _RemoteInbox(Inbox):
    """Receives the messages of the callback in this process, such as logged values, and sends them to the process of the run."""

    def __init__(self, sender: _Sender) -> None:
        super().__init__()
        self._sender = sender
        self._has_ended = False  # whether the run has ended, and with it the connection

    def put(self, message: LaneMessage) -> None:
        packed = pickle.dumps(("message", message))
        try:
            self._sender.send(packed)
        except OSError:  # an asyncio task that still runs may do the rest of its work
            if not self._has_ended:
                self._has_ended = True
                logger.error("Messages from the lane of %s came after the run's end, and are lost: %s", message.by, message.what)


def serve(connection: MessageSocket) -> None:
    """Construct the callback and carry out the calls that arrive on the connection, until the connection is closed."""
    callback: Callback | None = None
    runner: asyncio.Runner | None = None
    sender, process = _Sender(connection), os.getpid()
    while True:
        try:
            received = connection.receive()
        except (EOFError, OSError):
            break
        try:
            message = pickle.loads(received)  # an error here, such as a class that cannot be imported, fails only this call
            answer = None
            if callback is None:
                callback = CallbackSpec(*message).build()
            else:
                answer = _call_method(callback, message, _RemoteInbox(sender))
                if inspect.isawaitable(answer):
                    import asyncio

                    runner = runner or asyncio.Runner()
                    answer = runner.run(_await_result(answer))
            reply = pickle.dumps(("done", answer if message[0] == "state_dict" else None))
        except BaseException as error:  # catches SystemExit too, because a callback must not end this process
            # If the callback has forked, this may be the child. End the child, because only the original process may answer.
            if os.getpid() != process:
                os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)
            reply = pickle.dumps(("failed", traceback.format_exc()))
        if os.getpid() != process:
            os._exit(0)
        sender.send(reply)
    if callback is not None and runner is not None:
        from callsheet.lanes.tasks import finish_tasks

        runner.run(finish_tasks(_TASKS_SECONDS, f"callback {label_of(callback)}"))
        runner.close()


def _call_method(callback: Callback, message: tuple[Any, ...], inbox: Inbox) -> Any:
    what, *rest = message
    if what != "call":
        return getattr(callback, what)(*rest)
    method, fields, payload, values = rest
    control = LaneControl(control_of(values), inbox, callback.name)
    return getattr(callback, method)(snapshot_of(fields, control), **payload)


async def _await_result(result: Any) -> None:
    await result


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's process handles Ctrl-C and ends this process
    # End this process with the run's process, even while a handler runs. `serve` notices a closed connection only between two calls.
    end_with_parent()
    descriptor = int(sys.argv[1])
    # Processes that the callback starts must not inherit the connection, because they would keep it open.
    os.set_inheritable(descriptor, False)
    serve(MessageSocket(socket.socket(fileno=descriptor)))
