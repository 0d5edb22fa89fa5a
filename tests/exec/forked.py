"""Runs scripts alone and under `callsheet exec`. Imports take most of the time of a short script, so torch and callsheet are imported once."""

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
import gc, json, os, runpy, signal, sys, time, types, torch, torch._dynamo
import callsheet.exec.bare_loop, callsheet.exec.default_observers, callsheet.report.page

gc.collect()
gc.freeze()  # so that forked processes neither read nor copy these objects when they collect garbage


def run(folder, script, arguments, exec_words, out, err, environment):
    os.chdir(folder)
    os.environ.clear()
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
    until, running, worst = time.monotonic() + 180, set(children), 0
    while running:
        for each in list(running):
            if time.monotonic() > until:
                os.kill(each, signal.SIGKILL)
            ended, status = os.waitpid(each, os.WNOHANG)
            if ended:
                running.remove(each)
                worst = max(worst, abs(os.waitstatus_to_exitcode(status)))
        time.sleep(0.01)
    print(worst, flush=True)
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


def run_forked(
    folder: Path, script: str, *arguments: str, ranks: int = 1, exec_words: list[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script of the folder like `python script *arguments`, or with torchrun on several ranks. Signals count as exit codes.

    With `exec_words`, it runs under `callsheet exec` with these options. After three minutes, its processes are killed.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    environments = [{**os.environ, **each} for each in (_ranks(ranks) if ranks > 1 else [{}])]
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        server.stdin.write(json.dumps([str(folder), script, arguments, exec_words, out.name, err.name, environments]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        texts = [Path(file.name).read_text() for file in (out, err)]
    return subprocess.CompletedProcess([script, *arguments], status, *texts)
