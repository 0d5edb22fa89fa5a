"""The other end of a `Process` lane: `python -m callsheet.lane_process FD`, started by it and by nobody else.

What arrives is unpickled: it comes over one end of a pair of sockets that only the two processes hold.
"""

from __future__ import annotations

import inspect
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from callsheet.callback import Callback, CallbackSpec
from callsheet.snapshot import Inbox, LaneControl, LaneMessage, control_of, snapshot_of

if TYPE_CHECKING:
    import asyncio


class _Sent(Inbox):
    """What is said over here is said over there."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def put(self, said: LaneMessage) -> None:
        """Send it."""
        self._connection.send_bytes(pickle.dumps(("said", said)))


def serve(connection: Connection) -> None:
    """Make the callback, and call it until nobody asks any more."""
    callback: Callback | None = None
    runner: asyncio.Runner | None = None
    while True:
        try:
            received = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            message = pickle.loads(received)  # of a class that is not found over here: this call fails, and the next may not
            answer = None
            if callback is None:
                callback = CallbackSpec(*message).build()
            else:
                answer = _called(callback, message, _Sent(connection))
                if inspect.isawaitable(answer):
                    import asyncio

                    runner = runner or asyncio.Runner()
                    answer = runner.run(_awaited(answer))
            reply = pickle.dumps(("done", answer if message[0] == "state_dict" else None))
        except BaseException:  # SystemExit too: it is not for a callback to end this
            reply = pickle.dumps(("failed", traceback.format_exc()))
        connection.send_bytes(reply)


def _called(callback: Callback, message: tuple[Any, ...], inbox: Inbox) -> Any:
    what, *rest = message
    if what != "tell":
        return getattr(callback, what)(*rest)
    method, fields, payload, told = rest
    control = LaneControl(control_of(told), inbox, callback.name)
    return getattr(callback, method)(snapshot_of(fields, control), **payload)


async def _awaited(result: Any) -> None:
    await result


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run's process has it, and ends this one
    serve(Connection(int(sys.argv[1])))
