"""The trial: what is to be sent is rebuilt in a fresh interpreter first, and compared with the original.

A mistake is found here, in the process of whoever made it, and not after a launch, in a log of one of many workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callsheet.callback import label_of
from callsheet.transport.fingerprint import IGNORE, differences, fingerprint
from callsheet.transport.sealed import TransportError, read_private, write_private

START = Path(__file__).with_name("start.py")
SECONDS = 300.0
"""How long the script and the callbacks' modules may take to be imported."""

_ANSWER = "trial"
_MOST = 20  # differences that are told
_LAST = 15  # lines of output that are told


def command(module: str) -> list[str]:
    """The command line of a fresh interpreter that runs the `main` of one of callsheet's modules."""
    return [sys.executable, "-P", str(START), module]


def check_arrival(values: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    """Rebuild what was posted under `variables` in a fresh interpreter, and compare.

    Raises:
        TransportError: it cannot be rebuilt, or differs; the message names what, and the mend.
    """
    here = fingerprint(values)
    folder = Path(variables["CALLSHEET_PAYLOAD"]).parent
    answered, output = folder / _ANSWER, folder / "trial.log"
    try:
        with open(output, "wb") as log:  # no pipe: what a constructor starts might hold it open
            done = subprocess.run(
                command(__name__),
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise TransportError(
            f"a trial in a fresh interpreter did not end in {SECONDS:g} seconds; does importing the script or a callback's module do work? "
            "Put it under `if __name__ == '__main__'`"
        ) from None
    if not answered.exists():
        raise TransportError(
            f"a trial in a fresh interpreter ended by itself, exit code {done.returncode}, before anything was rebuilt; its last words:\n"
            f"{_last_lines(output.read_text(errors='replace'))}"
        )
    answer = json.loads(read_private(answered))
    if "error" in answer:
        raise TransportError(f"rebuilt in a fresh interpreter, as each worker will have to: {answer['error']}")
    if found := differences(here, answer["portrait"]):
        labels = [label_of(callback) for callback in values["callbacks"]]
        for i, label in enumerate(labels):
            found = [line.replace(f"callbacks[{i}]", f"callbacks[{i}] ({label})", 1) for line in found]
        more = f"\n  and {len(found) - _MOST} more" if len(found) > _MOST else ""
        raise TransportError(
            "rebuilt in a fresh interpreter (there), this is not as it is here:\n  "
            + "\n  ".join(found[:_MOST])
            + f"{more}\nWhat is to arrive has to be in the constructor's arguments or in state_dict; what each process makes for itself "
            f"belongs into on_run_start, or is named in the class's {IGNORE}"
        )


def main() -> None:
    """In the fresh interpreter: rebuild, and answer with a portrait."""
    from callsheet.transport.payload import open_payload  # it imports this module

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    path = Path(os.environ["CALLSHEET_PAYLOAD"])
    answer: dict[str, Any]
    try:
        unpacked = open_payload(os.environ, is_ours=True)
        answer = {"portrait": fingerprint({"callbacks": unpacked.callbacks, **unpacked.extra})}
    except (Exception, SystemExit) as error:
        answer = {"error": _told(error)}
    write_private(path.with_name(_ANSWER), json.dumps(answer).encode())
    sys.stdout.flush()
    os._exit(0)  # what the callbacks have started is not waited for


def _end_with(parent: int) -> None:
    """Nobody waits for the answer of a trial whose process was killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _told(error: BaseException) -> str:
    """The error, with where it came from outside of callsheet."""
    lines = traceback.format_exception_only(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    if frames and Path(frames[-1].filename).parent != Path(__file__).parent:
        lines.append(f"  at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}")
    return "".join(lines).strip()


def _last_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines()[-_LAST:]) or "  (nothing)"
