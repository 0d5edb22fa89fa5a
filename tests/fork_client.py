"""Runs a Python program in a fork of the server, and ends as this program ends. See `forked.py`.

The programs in the folder of the server call `run`. They start an interpreter without site-packages, which takes a tenth of a second.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGCONT)


def run(folder: str, words: list[str]) -> NoReturn:
    """Run `python *words`, and exit with its exit code or its signal. With other options than -u and -P, start an interpreter."""
    given, options = list(words), []
    while given and given[0] in ("-u", "-P"):
        options.append(given.pop(0))
    is_command = given[:1] in (["-m"], ["-c"])
    if len(given) <= is_command or (given[0].startswith("-") and not is_command):
        os.execv(sys.executable, [sys.executable, *words])
    if os.environ.get("PYTHONUNBUFFERED"):
        options.append("-u")
    if os.environ.get("PYTHONSAFEPATH"):
        options.append("-P")
    child = 0
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if child:
            os.kill(child, number)
        else:
            early.append(number)

    for each in FORWARDED:
        signal.signal(each, forward)
    kept = sorted({0, 1, 2, *(int(name) for name in os.listdir("/dev/fd") if is_open(int(name)))})
    request = {
        "words": given,
        "options": options,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "descriptors": kept,
    }
    content = json.dumps(request).encode()
    held, _ = os.pipe()  # the other end closes when this process ends
    server = socket.socket(socket.AF_UNIX)
    server.connect(str(Path(folder) / "socket"))
    socket.send_fds(server, [len(content).to_bytes(8, "big")], [held, *kept])
    server.sendall(content)
    for descriptor in (held, *kept[3:]):  # otherwise a pipe would stay open when the program closes it
        os.close(descriptor)
    answers = server.makefile()
    child = int(answers.readline())
    (Path(folder) / f"program-of-{os.getpid()}").write_text(str(child))
    for number in early:
        os.kill(child, number)
    end_like(json.loads(answers.readline()))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:  # it was that of the listing
        return False
    return True


def end_like(status: int) -> NoReturn:
    """Exit with this code, or by this signal if it is negative."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
