"""Runs scripts alone and under `callsheet exec`. Importing torch takes most of the time of a short script, so it is imported once."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

PROGRAM = """
import json, os, runpy, sys, types, torch, torch._dynamo


def run(folder, script, arguments, exec_words, out, err, environment):
    os.chdir(folder)
    os.environ.update(environment)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    for name, number in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_APPEND), number)
    sys.argv, sys.path[0] = [script, *arguments], folder
    if exec_words is not None:
        sys.argv[:0] = ["callsheet.exec", *exec_words]
        return runpy.run_module("callsheet.exec", run_name="__main__", alter_sys=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    exec(compile(open(script).read(), script, "exec"), vars(main))


for line in sys.stdin:
    *where, environments = json.loads(line)
    children = []
    for environment in environments:
        child = os.fork()
        if not child:
            break
        children.append(child)
    if not child:
        run(*where, environment)
        break
    print(max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children), flush=True)
"""
"""Forks for each line of its input. A forked process runs a script, and ends as if it had been started with the script."""


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(server.communicate)  # which closes its input, so that it ends
    return server


def _ranks(count: int) -> list[dict[str, str]]:
    """Return the environment of each rank, as torchrun sets it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": "0"}
    return [shared | size | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def executed_alone(
    folder: Path, script: str, *arguments: str, ranks: int = 1, exec_words: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script of the folder like `python script *arguments`, or with torchrun on several ranks. Signals count as exit codes.

    With `exec_words`, it runs under `callsheet exec` with these options.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    environments = _ranks(ranks) if ranks > 1 else [{}]
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        server.stdin.write(json.dumps([str(folder), script, arguments, exec_words, out.name, err.name, environments]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        texts = [Path(file.name).read_text() for file in (out, err)]
    return subprocess.CompletedProcess([script, *arguments], status, *texts)
