"""A launched worker: takes what it was sent, calls the function, and hands back what came of it."""

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
from callsheet.transport.payload import KEY, PAYLOAD, Unpacked, open_payload
from callsheet.transport.sealed import Key, seal, write_private

PID = "pid-"
"""How the names of the files begin that say which workers run."""

_LOOK_SECONDS = 0.5


def result_name(rank: int, attempt: int) -> str:
    """The file in which a rank leaves its result, or its error."""
    return f"result-{attempt}-{rank}"


def main() -> None:
    """Run one rank. The exit code says whether it failed."""
    folder = Path(os.environ[PAYLOAD]).parent
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"{PID}{os.getpid()}").touch(mode=0o600)
    key = Key.read(os.environ.get(KEY, ""))  # which opening takes out of the environment
    code, content = _answer(folder, rank)
    if content and folder.exists():  # else nobody waits for it
        write_private(folder / result_name(rank, attempt), seal(key, "result", content))
    sys.exit(code)


def _answer(folder: Path, rank: int) -> tuple[int, bytes]:
    """Open what was sent and call the function: the exit code, and the result or the error as it is sent."""
    try:
        unpacked = open_payload(os.environ, is_ours=True)  # imports the script, and makes the callbacks
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, b""
    except BaseException as error:  # an exit as well: nothing was called yet
        return 1, encode({"rank": rank, "report": report_of(error)}, allow_pickle=False)
    _Watch(folder, unpacked.launcher, unpacked.extra["grace_seconds"]).start()
    return _called(unpacked, rank)


def _called(unpacked: Unpacked, rank: int) -> tuple[int, bytes]:
    """Call the function: as above."""
    call: dict[str, Any] = unpacked.extra
    try:
        if call["takes_callbacks"]:
            result = call["function"](*call["arguments"], callbacks=unpacked.callbacks)
        else:
            result = call["function"](*call["arguments"])
        return 0, encode({"rank": rank, "result": result}, allow_pickle=call["allow_pickle"])
    except KeyboardInterrupt:  # the launching process has it as well
        return 128 + signal.SIGINT, b""
    except SystemExit as error:
        if error.code in (None, 0):
            return 0, encode({"rank": rank, "result": None}, allow_pickle=False)
        code = error.code if isinstance(error.code, int) else 1
        return code, encode({"rank": rank, "report": report_of(error)}, allow_pickle=False)
    except BaseException as error:
        return 1, encode({"rank": rank, "report": report_of(error)}, allow_pickle=False)


class _Watch(threading.Thread):
    """Ends this worker when the process that launched it is gone, or has given it up: first with SIGTERM, so that it may save.

    Torch's launcher does not: its workers go on when it is killed.
    """

    def __init__(self, folder: Path, launcher: int, grace: float) -> None:
        super().__init__(name="callsheet-launcher-watch", daemon=True)
        self._folder, self._launcher, self._grace = folder, launcher, grace
        self._never = threading.Event()

    def run(self) -> None:
        """Look until then."""
        parent = os.getppid()
        while os.getppid() == parent and _is_there(self._launcher) and self._folder.exists():
            self._never.wait(_LOOK_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)  # who should have removed it was killed
        os.kill(os.getpid(), signal.SIGTERM)
        self._never.wait(self._grace)
        if os.getpgrp() == os.getpid():  # torch gives each worker a session of its own
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:  # it has ended, or its number is another user's by now
        return False
    return True
