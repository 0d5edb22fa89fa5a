"""The preflight check: before a payload is sent, a fresh interpreter decodes it, and the result is compared with the original.

So the sender gets an error about a mistake at once, and need not search for it in the log of one of many workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from callsheet.core.callback import label_of
from callsheet.core.parent_process import end_with_parent
from callsheet.transport.fingerprint import IGNORE_ATTRIBUTE, differences, fingerprint
from callsheet.transport.names import with_script_names
from callsheet.transport.sealed import TransportError, read_private, write_private

START_SCRIPT = Path(__file__).with_name("start.py")
TIMEOUT_SECONDS = 300.0
"""The longest time that the check may take to import the script and the callbacks' modules."""

_ANSWER_FILE = "preflight"
_MAX_DIFFERENCES = 20  # the maximum number of differences in the error message
_MAX_OUTPUT_LINES = 15  # the maximum number of lines of output in the error message


def command(module: str) -> list[str]:
    """Return the command line that runs the function `main` of a module of callsheet in a fresh interpreter."""
    return [sys.executable, "-P", str(START_SCRIPT), module]


def check_arrival(values: Mapping[str, Any], variables: Mapping[str, str]) -> None:
    """Decode the payload in a new interpreter with the environment `variables`, and compare the result with the original.

    Raises:
        TransportError: the payload cannot be rebuilt, or differs; the message names what differs and says what to do.
    """
    here = fingerprint(values)
    folder = Path(variables["CALLSHEET_PAYLOAD"]).parent
    answered, output = folder / _ANSWER_FILE, folder / "preflight.log"
    try:
        # Use a file instead of a pipe: a process that a callback's constructor starts might keep a pipe open, and `run` would wait.
        with open(output, "wb") as log:
            done = subprocess.run(
                command(__name__),
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise TransportError(
            f"the preflight check did not end within {TIMEOUT_SECONDS:g} seconds; does importing the script or a callback's module start work? "
            "Put it under `if __name__ == '__main__'`"
        ) from None
    if not answered.exists():
        raise TransportError(
            f"the preflight check in a fresh interpreter exited with code {done.returncode} before anything was rebuilt; its last output:\n"
            f"{_last_lines(output.read_text(errors='replace'))}"
        )
    answer = json.loads(read_private(answered))
    if "error" in answer:
        raise TransportError(f"the payload cannot be rebuilt in a fresh interpreter: {answer['error']}")
    if found := differences(here, answer["fingerprint"]):
        for i, callback in enumerate(values["callbacks"]):
            found = [line.replace(f"callbacks[{i}]", f"callbacks[{i}] ({label_of(callback)})", 1) for line in found]
        more = f"\n  and {len(found) - _MAX_DIFFERENCES} more" if len(found) > _MAX_DIFFERENCES else ""
        raise TransportError(
            "rebuilt in a fresh interpreter (there), the payload differs from the original (here):\n  "
            + "\n  ".join(found[:_MAX_DIFFERENCES])
            + f"{more}\nOnly constructor arguments and state_dict are sent. Create what each process needs of its own "
            f"in on_run_start, or name the attribute in the class's {IGNORE_ATTRIBUTE}"
        )


def main() -> None:
    """In the new interpreter, decode the payload, and send its fingerprint to the process that started the check."""
    from callsheet.transport.payload import open_payload  # imported only here, because `payload` imports `preflight`

    # End this process if the process that started the check ends, because no process then waits for the result.
    end_with_parent()
    path = Path(os.environ["CALLSHEET_PAYLOAD"])
    answer: dict[str, Any]
    try:
        unpacked = open_payload(os.environ, is_ours=True)
        answer = {"fingerprint": fingerprint({"callbacks": unpacked.callbacks, **unpacked.extra})}
    except (Exception, SystemExit) as error:  # report the error: the process that started the check will raise it
        answer = {"error": _describe_error(error)}
    write_private(path.with_name(_ANSWER_FILE), json.dumps(answer).encode())
    sys.stdout.flush()
    os._exit(0)  # end without waiting for threads that the callbacks have started


def _describe_error(error: BaseException) -> str:
    """Return the error as text, with the line that raised it if the line is outside callsheet."""
    lines = traceback.format_exception_only(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    if frames and Path(frames[-1].filename).parent != Path(__file__).parent:
        lines.append(f"  at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}")
    return with_script_names("".join(lines).strip())


def _last_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines()[-_MAX_OUTPUT_LINES:]) or "  (nothing)"
