"""`Process(callback)`: runs a callback in a separate process, for code that holds Python's interpreter lock (GIL) or may crash."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from math import inf
from typing import Any, cast

from callsheet.core.background import END_SECONDS, Background
from callsheet.core.callback import Callback
from callsheet.core.lane_options import Overflow
from callsheet.core.lifecycle import FIELDS
from callsheet.core.spec import CallbackSpec, import_path
from callsheet.errors import CallsheetError, ConfigError, text_of
from callsheet.lanes.message_socket import MessageSocket
from callsheet.lanes.snapshot import LaneControl, Snapshot

logger = logging.getLogger("callsheet")

_START_SECONDS = 120.0  # how long a process may take to import the callback's module and build the callback
_ANSWER_SECONDS = 1.0  # how long an idle process may take to answer, before the process is killed

_started: weakref.WeakSet[Process] = weakref.WeakSet()  # the `Process` wrappers that have started a child process


class ProcessDied(CallsheetError, RuntimeError):
    """The process of a callback died. For the next event, a new process is started with the last known state of the callback."""


class RemoteError(CallsheetError, RuntimeError):
    """A callback raised an error in its process; the message is the traceback."""


class Process(Background):
    """Run a callback in a separate process, so that the callback can neither slow down nor crash training.

    `Process` works like `Background`; the lane's thread sends the snapshots to the process. The process builds the callback again from
    the constructor's arguments and the state; attributes that were set otherwise are not sent. The callback's process starts at the
    first event, ends when the training process ends, and ignores Ctrl-C.

    Args:
        callback: the callback; its class must be importable by its name.
        queue: see `Background`.
        overflow: see `Background`.
        deadline: see `Background`.

    Raises:
        ConfigError: the callback cannot be built in another process; the message says why.
        NotACallbackError: `callback` is not a callback, or is in a lane already.
    """

    lane = "process"

    def __init__(self, callback: Callback, *, queue: int = 1024, overflow: Overflow = "block", deadline: float = 10.0) -> None:
        super().__init__(callback, queue=queue, overflow=overflow, deadline=deadline)
        kind = type(callback)
        if kind.__module__ in ("__main__", "__mp_main__") or "<locals>" in kind.__qualname__:
            raise ConfigError(
                f"{kind.__qualname__} is defined in {'a function' if '<locals>' in kind.__qualname__ else 'the script itself'}, where "
                "another process cannot find it; move the class into a module"
            )
        if import_path(f"{kind.__module__}.{kind.__qualname__}") is not kind:
            raise ConfigError(
                f"{kind.__module__}.{kind.__qualname__} is not the class of this callback, which another process needs"
            )
        try:
            pickle.dumps(CallbackSpec.of(callback))
        except Exception as error:  # an argument of the callback may raise any error when it is pickled
            raise ConfigError(f"{kind.__qualname__} cannot be built in another process: {error}") from None
        self._lock = threading.Lock()
        self._users: set[object] = set()  # the lanes of the runs in progress: more than one if a run is nested in another run
        self._child: subprocess.Popen[bytes] | None = None
        self._ending: subprocess.Popen[bytes] | None = None  # the child process that was asked to end
        self._connection: MessageSocket | None = None
        self._theirs: socket.socket | None = None  # the child's end of the connection, until the child process has started
        self._state: Mapping[str, Any] | None = None  # the last known state of the callback
        # The `LaneControl` of the last call. It receives all messages of the process, even those between two calls: a thread of the
        # callback may send a message at any time.
        self._control: LaneControl | None = None

    def call(self, method: str, snapshot: Snapshot, payload: Mapping[str, Any]) -> None:
        """Call a method of the callback in the callback's process, and wait for the method's end. Called on the lane's thread.

        Args:
            method: the name of the method, such as `on_log`.
            snapshot: the fields that the method receives in place of the context. What the callback logs and requests goes back
                through the snapshot's control.
            payload: the other arguments of the method, by name.
        """
        fields = {name: _sendable(getattr(snapshot, name)) for name in FIELDS if name != "control" and snapshot.has(name)}
        control = cast("LaneControl", snapshot.control)
        self._ask(("call", method, fields, dict(payload), control.values()), control=control)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the current state of the callback, as read from the callback's process.

        If the process has died or does not run, return the last known state, with which the next process begins.

        Raises:
            RemoteError: the callback's `state_dict` raised.
            TimeoutError: the process did not answer within its deadline.
        """
        if self._child is not None and type(self.callback).state_dict is not Callback.state_dict:
            try:
                self._state = self._ask(("state_dict",), seconds=self.lane_options.deadline)
            except ProcessDied as error:
                logger.error("the state of %s is an earlier one: %s", self.name, error)
        return self._state if self._state is not None else self.callback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state into both copies of the callback: the copy in this process, and the copy in the callback's process."""
        self._state = state
        self.callback.load_state_dict(state)
        if self._child is not None:
            self._ask(("load_state_dict", state), seconds=self.lane_options.deadline)

    def begin(self, user: object) -> None:
        """Register a lane that uses the callback's process. The process starts only while a lane is registered.

        Args:
            user: the lane of a run that begins.
        """
        self._users.add(user)

    @property
    def pid(self) -> int | None:
        """The id of the callback's process; None if the process does not run."""
        child = self._child
        return child.pid if child is not None else None

    def end(self, user: object, *, at_once: bool = False) -> None:
        """Make the callback's process exit, unless another run still uses it. This method does not wait for the exit; `join` does.

        Args:
            user: the lane of the run that ends.
            at_once: whether to kill the process. Otherwise the connection is closed, after which the process exits.
        """
        self._users.discard(user)
        if self._users:
            return
        self._ending, self._child = self._child, None
        if not at_once:
            self._close_line()
        elif self._ending is not None:
            self._ending.kill()  # leave the connection open: the lane's thread reads from it to notice the process's end

    def join(self, seconds: float) -> None:
        """Wait for the callback's process to exit after `end` was called, and kill the process if it does not exit in time.

        Args:
            seconds: how long to wait before the process is killed.
        """
        child, self._ending = self._ending, None
        _wait(child, seconds)

    def _end_child(self, *, at_once: bool = False) -> None:
        child, self._child = self._child, None
        if child is not None and at_once:
            child.kill()
        self._close_line()
        _wait(child, END_SECONDS)

    def _close_line(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.shut_down()

    def _disown(self) -> None:
        """In a forked child, forget the callback's process and its connection, because both belong to the parent."""
        if self._child is not None:
            # Only the parent can wait for the process. Set a return code, so that Popen does not warn that it still runs.
            self._child.returncode = 0
        for end in (self._connection, self._theirs):
            if end is not None:
                end.close()
        self._child = self._ending = self._connection = self._theirs = None
        self._users.clear()
        self._lock = threading.Lock()  # the thread that may hold the lock runs only in the parent

    def _ask(self, message: tuple[Any, ...], *, control: LaneControl | None = None, seconds: float | None = None) -> Any:
        """Send a message to the callback's process and return the answer.

        With `seconds`, wait at most that long, including the time until another call of the lane has ended.
        """
        # Pickle before the `try`, because a message that cannot be pickled must not end the callback's process.
        packed = pickle.dumps(message)
        if not self._lock.acquire(timeout=-1 if seconds is None else min(seconds, self.patience)):
            raise TimeoutError("the process was busy with another call all the time")
        if seconds is not None:
            seconds = min(seconds, max(self.patience, _ANSWER_SECONDS))
        try:
            self._control = control or self._control
            return self._exchange(packed, seconds)
        except RemoteError:
            raise
        except TimeoutError:
            self._end_child(at_once=True)
            raise
        except (EOFError, OSError):
            child = self._child
            self._end_child()
            ended = f"exit code {child.returncode}" if child is not None else "killed at the run's end"
            raise ProcessDied(f"the process of {self.name} died, {ended}") from None
        except BaseException:  # end the process, because a late answer would be mistaken for the answer to the next message
            self._end_child(at_once=True)
            raise
        finally:
            self._lock.release()

    def _exchange(self, message: bytes, seconds: float | None) -> Any:
        connection, child = self._connection, self._child
        if connection is None or child is None:
            connection = self._start()
        elif child.poll() is not None:
            raise EOFError
        until = inf if seconds is None else time.monotonic() + seconds
        try:
            connection.send(message, until=until)
            while True:
                what, value = pickle.loads(connection.receive(until=until))
                if what == "message" and self._control is not None:
                    self._control.forward(value)
                elif what == "done":
                    return value
                elif what == "failed":
                    raise RemoteError(value)
        except TimeoutError:
            if seconds is None:  # unpickling the answer has raised this error
                raise
            raise TimeoutError(f"no answer within {seconds:g} s") from None

    def _start(self) -> MessageSocket:
        if not self._users:
            raise EOFError
        self._close_line()  # the connection to a process that was killed at an earlier run's end may still be open
        _started.add(self)
        ours, self._theirs = socket.socketpair()
        self._connection = connection = MessageSocket(ours)
        with self._theirs as theirs:
            self._child = connection.child = subprocess.Popen(
                [sys.executable, "-m", "callsheet.lanes.process_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                process_group=0,  # a new process group, so that Ctrl-C reaches only the run's process
            )
        self._theirs = None
        if not self._users:  # `end` was called while the process was being started
            raise EOFError
        spec = CallbackSpec.of(self.callback)
        state = self._state if self._state is not None else spec.state
        until = time.monotonic() + _START_SECONDS
        try:
            connection.send(pickle.dumps((spec.class_path, spec.init_args, self.name, dict(state))), until=until)
            what, value = pickle.loads(connection.receive(until=until))
        except TimeoutError:
            raise TimeoutError(f"the process of {self.name} has not started within {_START_SECONDS:g} s") from None
        if what == "failed":
            self._end_child()
            raise RemoteError(value)
        return connection


def _wait(child: subprocess.Popen[bytes] | None, seconds: float) -> None:
    """Wait until the child process has exited, and kill it after `seconds`."""
    if child is not None:
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _disown_all() -> None:
    for process in list(_started):
        process._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


def _sendable(value: Any) -> Any:
    """Return `value` in a form that can be pickled and sent to the callback's process.

    An exception that cannot be rebuilt in the other process arrives as a RuntimeError.
    """
    return _Packed(value) if isinstance(value, BaseException) else value


class _Packed:
    """An exception in a form that can be pickled.

    The exception is unpickled as itself if possible, and otherwise as a RuntimeError with its class name, its text and its notes.
    """

    def __init__(self, error: BaseException) -> None:
        try:
            self._pickled = pickle.dumps(error)
        except Exception:  # the class of the error is local to a function, or an attribute cannot be pickled
            self._pickled = b""
        self._name = type(error).__name__
        self._text = text_of(error)
        self._notes = tuple(map(str, getattr(error, "__notes__", ())))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_error, (self._pickled, self._name, self._text, self._notes)


def _unpack_error(pickled: bytes, name: str, text: str, notes: tuple[str, ...]) -> BaseException:
    try:
        made = pickle.loads(pickled)
        if isinstance(made, BaseException):
            return made
    except Exception:  # unpickling runs code of the exception's class, which may fail with any error
        pass
    error: RuntimeError = type(name, (RuntimeError,), {})(text)
    for note in notes:
        error.add_note(note)
    return error
