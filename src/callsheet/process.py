"""`Process(callback)`: a callback in a process of its own, for code that holds the interpreter, or may crash."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from callsheet.background import END_SECONDS, Background
from callsheet.callback import Callback, CallbackSpec, import_path
from callsheet.errors import CallsheetError, ConfigError, text_of
from callsheet.lifecycle import FIELDS
from callsheet.snapshot import Snapshot

logger = logging.getLogger("callsheet")

_START_SECONDS = 120.0  # for a process to import the callback's module and make it; it is killed when it does not
_ANSWER_SECONDS = 1.0  # for one that is not at work; it is killed when it does not answer

_started: weakref.WeakSet[Process] = weakref.WeakSet()  # in this process


class ProcessDied(CallsheetError, RuntimeError):
    """The process of a callback ended by itself; it is started again for the next event, with the state it had last given."""


class RemoteError(CallsheetError, RuntimeError):
    """A callback raised in its process; the message is its traceback."""


class Process(Background):
    """Run a callback in a process of its own: what it computes, and what it crashes, is not training's.

    Like `Background`, with the snapshots sent on by the lane's thread. The callback is made anew over there, from its constructor's
    arguments and its state; what it keeps besides stays here and there apart. The process starts at the first event, is a child that
    ends with this one, and gets no Ctrl-C.

    Args:
        callback: which; its class is importable by its name.
        queue: see `Background`.
        overflow: see `Background`.
        deadline: see `Background`.

    Raises:
        ConfigError: the callback cannot be made anew in another process; the message says why.
        NotACallbackError: `callback` is none, or in a lane already.
    """

    lane = "process"

    def __init__(self, callback: Callback, *, queue: int = 1024, overflow: str = "block", deadline: float = 10.0) -> None:
        super().__init__(callback, queue=queue, overflow=overflow, deadline=deadline)
        kind = type(callback)
        if kind.__module__ in ("__main__", "__mp_main__") or "<locals>" in kind.__qualname__:
            raise ConfigError(
                f"{kind.__qualname__} is defined in {'a function' if '<locals>' in kind.__qualname__ else 'the script itself'}, where "
                "another process does not find it; put the class into a module"
            )
        if import_path(f"{kind.__module__}.{kind.__qualname__}") is not kind:
            raise ConfigError(f"{kind.__module__}.{kind.__qualname__} is another class than that of this callback")
        try:
            pickle.dumps(CallbackSpec.of(callback))
        except Exception as error:
            raise ConfigError(f"{kind.__qualname__} cannot be made anew in another process: {error}") from None
        self._lock = threading.Lock()
        self._is_over = False
        self._child: subprocess.Popen[bytes] | None = None
        self._ending: subprocess.Popen[bytes] | None = None  # the child that was told to
        self._connection: Connection | None = None
        self._theirs: socket.socket | None = None  # the other end, until the child has it
        self._state: Mapping[str, Any] | None = None  # the last that is known of

    def tell(self, method: str, snapshot: Snapshot, payload: Mapping[str, Any]) -> None:
        """On the lane's thread: have `method(ctx, **payload)` called over there, and wait until that is done."""
        fields = {name: _sendable(getattr(snapshot, name)) for name in FIELDS if name != "control" and snapshot.has(name)}
        self._ask(("tell", method, fields, dict(payload), snapshot.control_told()), snapshot)

    def state_dict(self) -> Mapping[str, Any]:
        """The callback's, over there; where it does not answer within its deadline, the last that is known."""
        if self._child is not None and type(self.callback).state_dict is not Callback.state_dict:
            try:
                self._state = self._ask(("state_dict",), seconds=self.lane_options.deadline)
            except (ProcessDied, RemoteError, TimeoutError) as error:
                logger.error("the state of %s is an earlier one: %s", self.name, error)
        return self._state if self._state is not None else self.callback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give it back, here and over there."""
        self._state = state
        self.callback.load_state_dict(state)
        if self._child is not None:
            self._ask(("load_state_dict", state), seconds=self.lane_options.deadline)

    def begin(self) -> None:
        """A run begins: the process may be started."""
        self._is_over = False

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        child = self._child
        return child.pid if child is not None else None

    def end(self, *, at_once: bool = False) -> None:
        """Have the process end, by closing its line, or `at_once`, where it has not returned. `join` waits for it."""
        self._is_over = True
        self._ending, self._child = self._child, None
        if not at_once:
            self._close_line()
        elif self._ending is not None:
            self._ending.kill()  # its lane still reads from the line, and finds it dead

    def join(self, seconds: float) -> None:
        """The process was told to end: it is gone when this returns, killed after so long."""
        child, self._ending = self._ending, None
        _wait(child, seconds)

    def _hang_up(self, *, at_once: bool = False) -> None:
        child, self._child = self._child, None
        if child is not None and at_once:
            child.kill()
        self._close_line()
        _wait(child, END_SECONDS)

    def _close_line(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError), socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.shutdown(socket.SHUT_RDWR)  # for whoever was forked meanwhile holds it open as well
            connection.close()

    def _disown(self) -> None:
        """In a forked child: the process and the line are the parent's."""
        if self._child is not None:
            self._child.returncode = 0  # not for us to wait for
        for end in (self._connection, self._theirs):
            if end is not None:
                end.close()
        self._child = self._ending = self._connection = self._theirs = None
        self._is_over = True

    def _ask(self, message: tuple[Any, ...], snapshot: Snapshot | None = None, *, seconds: float | None = None) -> Any:
        """Have something done over there; with `seconds`, only if the lane is not asking too, and for so long."""
        packed = pickle.dumps(message)  # what cannot be sent is no reason to end the process
        if not self._lock.acquire(timeout=-1 if seconds is None else min(seconds, self.patience)):
            raise TimeoutError("it has been at work on something else all the while")
        if seconds is not None:
            seconds = min(seconds, max(self.patience, _ANSWER_SECONDS))
        try:
            return self._asked(packed, snapshot, seconds)
        except RemoteError:
            raise
        except TimeoutError:
            self._hang_up(at_once=True)
            raise
        except (EOFError, OSError):
            child = self._child
            self._hang_up()
            ended = f"exit code {child.returncode}" if child is not None else "killed at the run's end"
            raise ProcessDied(f"the process of {self.name} died, {ended}") from None
        except BaseException:  # an answer may be under way, which the next question would take for its own
            self._hang_up(at_once=True)
            raise
        finally:
            self._lock.release()

    def _asked(self, message: bytes, snapshot: Snapshot | None, seconds: float | None) -> Any:
        connection = self._connection or self._start()
        connection.send_bytes(message)
        while True:
            if seconds is not None and not connection.poll(seconds):
                raise TimeoutError(f"no answer within {seconds:g} s")
            what, value = pickle.loads(connection.recv_bytes())
            if what == "said" and snapshot is not None:
                snapshot.say(value)
            elif what == "done":
                return value
            elif what == "failed":
                raise RemoteError(value)

    def _start(self) -> Connection:
        if self._is_over:
            raise EOFError
        _started.add(self)
        ours, self._theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with self._theirs as theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "callsheet.lane_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the run's own process
            )
        self._theirs = None
        if self._is_over:  # by now
            raise EOFError
        spec = CallbackSpec.of(self.callback)
        state = self._state if self._state is not None else spec.state
        self._connection.send_bytes(pickle.dumps((spec.class_path, spec.init_args, self.name, dict(state))))
        if not self._connection.poll(_START_SECONDS):
            raise TimeoutError(f"the process of {self.name} has not started within {_START_SECONDS:g} s")
        what, value = pickle.loads(self._connection.recv_bytes())
        if what == "failed":
            self._hang_up()
            raise RemoteError(value)
        return self._connection


def _wait(child: subprocess.Popen[bytes] | None, seconds: float) -> None:
    """Until it has ended, which it does after so long at the latest."""
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
    """`value` as it can be pickled: an exception always, since one that cannot be made over there arrives as a stand-in."""
    return _Packed(value) if isinstance(value, BaseException) else value


class _Packed:
    """An exception that is unpickled as itself, or else as a RuntimeError under the same name, with its text and its notes."""

    def __init__(self, error: BaseException) -> None:
        try:
            self._pickled = pickle.dumps(error)
        except Exception:  # of a class in a function, or with something in it that stays here
            self._pickled = b""
        self._name = type(error).__name__
        self._text = text_of(error)
        self._notes = tuple(map(str, getattr(error, "__notes__", ())))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._pickled, self._name, self._text, self._notes)


def _unpacked(pickled: bytes, name: str, text: str, notes: tuple[str, ...]) -> BaseException:
    try:
        made = pickle.loads(pickled)
        if isinstance(made, BaseException):
            return made
    except Exception:  # whatever its class makes of it over here: a stand-in it is
        pass
    error: RuntimeError = type(name, (RuntimeError,), {})(text)
    for note in notes:
        error.add_note(note)
    return error
