"""Runs scripts without callsheet, for comparison. Importing torch takes most of the time of a short script, so it is imported once."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

PROGRAM = """
import json, os, sys, types, torch, torch._dynamo

for line in sys.stdin:
    script, *arguments, folder, out, err = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    for name, number in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_RDWR), number)
    sys.argv, sys.path[0] = [script, *arguments], folder
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    exec(compile(open(script).read(), script, "exec"), vars(main))
    break
"""
"""Forks for each line of its input. The forked process runs a script, and ends as if it had been started with the script."""


@cache
def _server() -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(server.communicate)  # which closes its input, so that it ends
    return server


def executed_alone(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the folder, like `python script *arguments`."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        server.stdin.write(json.dumps([script, *arguments, str(folder), out.name, err.name]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        texts = [Path(file.name).read_text() for file in (out, err)]
    return subprocess.CompletedProcess([script, *arguments], status, *texts)
