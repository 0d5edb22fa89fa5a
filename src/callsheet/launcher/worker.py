"""The worker process of one rank: reads the callbacks and arguments of a launch, calls the function, and writes the result or error."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from callsheet.launcher.failures import report_of
from callsheet.transport.data import encode
from callsheet.transport.payload import KEY_VARIABLE, PAYLOAD_VARIABLE, Unpacked, open_payload
from callsheet.transport.sealed import Key, seal, write_private

PID_FILE_PREFIX = "pid-"
"""The prefix of the names of files that list the running workers. Each worker creates one file, whose name ends with its process id."""

_LOOK_SECONDS = 0.5


def result_name(rank: int, attempt: int) -> str:
    """Return the name of the file in which a rank writes its result or error."""
    return f"result-{attempt}-{rank}"


def main() -> None:
    """Run the launched function on one rank. The exit code of the process says whether the function failed."""
    folder = Path(os.environ[PAYLOAD_VARIABLE]).parent
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"{PID_FILE_PREFIX}{os.getpid()}").touch(mode=0o600)
    key = Key.read(os.environ.get(KEY_VARIABLE, ""))  # read the key before `open_payload` removes it from the environment
    code, content = _answer(folder, rank)
    if folder.exists():  # if the folder is gone, no process waits for the result
        write_private(folder / result_name(rank, attempt), seal(key, "result", content))
    sys.exit(code)


def _answer(folder: Path, rank: int) -> tuple[int, bytes]:
    """Read the payload and call the launched function. Return the exit code, and the encoded result or error."""
    try:
        unpacked = open_payload(os.environ, is_ours=True)  # `open_payload` imports the script and creates the callbacks
    except BaseException as error:  # catch SystemExit too, because the script must not exit before the function is called
        return _encode_failure(error, rank)
    _Watch(folder, unpacked.launcher, unpacked.extra["grace_seconds"]).start()
    return _call_function(unpacked, rank)


def _call_function(unpacked: Unpacked, rank: int) -> tuple[int, bytes]:
    """Call the launched function. Return the exit code, and the encoded result or error."""
    call: dict[str, Any] = unpacked.extra
    try:
        if call["takes_callbacks"]:
            result = call["function"](*call["arguments"], callbacks=unpacked.callbacks)
        else:
            result = call["function"](*call["arguments"])
        return 0, encode({"rank": rank, "result": result}, allow_pickle=call["allow_pickle"], what=f"the result of rank {rank}")
    except SystemExit as error:
        if error.code in (None, 0):
            return 0, encode({"rank": rank, "result": None}, allow_pickle=False)
        return _encode_failure(error, rank, error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        return _encode_failure(error, rank)


def _encode_failure(error: BaseException, rank: int, code: int = 1) -> tuple[int, bytes]:
    """Return the exit code, and the encoded description of `error`.

    The launching process reads the description unless it got a signal. Then it ignores the KeyboardInterrupts of the ranks.
    """
    if isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    return code, encode({"rank": rank, "report": report_of(error)}, allow_pickle=False)


class _Watch(threading.Thread):
    """A thread that ends this worker process if the launching process has ended or has removed the launch's folder.

    The worker first gets SIGTERM, so that it can save a checkpoint.

    Torch's launcher does not ensure this: without the thread, the workers of a killed launcher would continue.
    """

    def __init__(self, folder: Path, launcher: int, grace: float) -> None:
        super().__init__(name="callsheet-launcher-watch", daemon=True)
        self._folder, self._launcher, self._grace = folder, launcher, grace
        self._never_set = threading.Event()

    def run(self) -> None:
        """Wait until the launching process has ended or the launch's folder is gone. Then end this process."""
        parent = os.getppid()
        while os.getppid() == parent and _is_there(self._launcher) and self._folder.exists():
            self._never_set.wait(_LOOK_SECONDS)
        # Remove the folder here too, because the launching process may have been killed before it removed the folder.
        shutil.rmtree(self._folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
        self._never_set.wait(self._grace)
        if os.getpgrp() == os.getpid():  # each worker has its own session, so `killpg` kills only this worker's processes
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # the launching process has ended; its id may belong to another user's process now
        return False
    return True
