"""Runs Python programs in forks of a process that has imported torch and callsheet. Imports take most of the time of a short program.

All workers of pytest share this process, which `fork_server.py` is. A test starts the programs of the folder `programs()`, which behave
like the programs of these names in the environment of the tests, except that interpreters neither start nor import torch: `python`, `callsheet`,
`torchrun`. What they start as `sys.executable` are forks, too. Tests of what depends on the start of an interpreter, on its options or its
command line start the tests' own `sys.executable` instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from multiprocessing import spawn
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TEMPORARY = tempfile.gettempdir()  # tests may set another folder later
PROGRAM = """\
#!{interpreter} -IS
import sys
sys.path.append({here!r})
from fork_client import run
run({folder!r}, {words!r} + sys.argv[1:])
"""


def _start(folder: Path, watched: int) -> None:
    """Write the programs, and start the server. It ends soon after the process `watched`."""
    for name, words in {
        "python": [],
        "callsheet": ["-m", "callsheet"],
        "torchrun": ["-m", "torch.distributed.run"],
    }.items():
        text = PROGRAM.format(interpreter=sys.executable, here=str(HERE), folder=str(folder), words=words)
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        listening.listen(128)
        subprocess.run(
            [sys.executable, str(HERE / "fork_server.py"), str(listening.fileno()), str(watched)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=folder,
            pass_fds=[listening.fileno()],
            start_new_session=True,  # Ctrl-C reaches the programs through their clients
            check=True,
        )


@cache
def programs() -> Path:
    """Return a folder with the programs `python`, `callsheet` and `torchrun`. The first call starts the server."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    watched = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    name = hashlib.sha256(f"{run} {watched} {sys.executable}".encode()).hexdigest()[:12]
    folder = Path(TEMPORARY) / f"forks-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "socket").exists():
            _start(folder, watched)
    return folder


def python() -> str:
    """Return the path of a program like `sys.executable` that forks."""
    return str(programs() / "python")


def started(*words: str, **options: Any) -> subprocess.Popen[str]:
    """Start `python *words` with the options of `subprocess.Popen`. Unlike that of the programs, its `kill` waits for the end."""
    return _Started([python(), *words], text=True, **options)


class _Started(subprocess.Popen[str]):
    """Kills the program instead of its client, which then ends in the same way. The file locks of the program are then free."""

    def kill(self) -> None:
        file = programs() / f"program-of-{self.pid}"
        if file.exists() and self.poll() is None:
            os.kill(int(file.read_text()), signal.SIGKILL)
        else:
            super().kill()


def fork_for_multiprocessing() -> None:
    """Let the fork servers and the spawned processes of `multiprocessing` be forks, too."""
    spawn.get_executable = lambda: os.fsencode(python())  # type: ignore[assignment, return-value]  # as `set_executable` encodes it


def on_path() -> str:
    """Return a value of `PATH` with the programs that fork, for shells."""
    return os.pathsep.join([str(programs()), str(Path(sys.executable).parent), os.environ["PATH"]])


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
    command = [python(), *(["-m", "callsheet.exec", *exec_words] if exec_words is not None else []), script, *arguments]
    shared = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        processes = [
            subprocess.Popen(command, cwd=folder, env=shared | each, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            for each in (_ranks(ranks) if ranks > 1 else [{}])
        ]
        statuses = []
        for process in processes:
            try:
                statuses.append(process.wait(timeout=180))
            except subprocess.TimeoutExpired:
                for each in processes:
                    each.kill()
                statuses.append(-signal.SIGKILL)
        for file in (out, err):
            file.seek(0)
        texts = [file.read() for file in (out, err)]
    return subprocess.CompletedProcess([script, *arguments], max(map(abs, statuses)), *texts)
