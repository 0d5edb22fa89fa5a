"""Imports torch and callsheet, and forks for each program that is to run. `forked.py` starts it.

The process has no threads, which a fork would lose. A fork behaves as if an interpreter had been started with its program.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import io
import json
import multiprocessing.spawn
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.launcher.api",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "callsheet.cli.main",
    "callsheet.exec.bare_loop",
    "callsheet.exec.default_observers",
    "callsheet.report.run_page",
    "callsheet.trainer",
]


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request of a client, with a pipe that closes when the client ends, and the files that the client has open."""
    head, descriptors, _, _ = socket.recv_fds(connection, 8, 100)
    missing, content = int.from_bytes(head, "big"), b""
    while len(content) < missing and (part := connection.recv(missing - len(content))):
        content += part
    return json.loads(content), descriptors


def next_program(listening: socket.socket, watched: int) -> tuple[dict[str, Any], list[int]] | None:
    """Serve until the process `watched` has ended, then return None. In a fork, return its request.

    A client whose connection closes early was killed. Its program is killed then, too, but not what it has started.
    """
    woken, wakes = socket.socketpair()
    for each in (woken, wakes):
        each.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    clients: dict[int, socket.socket] = {}  # by the process of the program
    while is_running(watched):
        ready, _, _ = select.select([listening, woken, *clients.values()], [], [], 1.0)
        if woken in ready:
            woken.recv(1000)
        for process, client in list(clients.items()):
            if client in ready:
                client.close()
                del clients[process]
                os.kill(process, signal.SIGKILL)  # it has not been waited for, so its number is not used again
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not process:
                break
            if process in clients:
                ended = clients.pop(process)
                with suppress(BrokenPipeError, ConnectionResetError):  # if the client was killed
                    ended.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                ended.close()
        if listening in ready:
            client, _ = listening.accept()
            request, descriptors = received(client)
            process = os.fork()
            if not process:
                for each in (listening, woken, wakes, client, *clients.values()):
                    each.close()
                return request, descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            clients[process] = client
            with suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(f"{process}\n".encode())
    for process in clients:
        os.kill(process, signal.SIGKILL)
    return None


def set_up(request: dict[str, Any], descriptors: list[int], installed: list[str]) -> None:
    """Make a fork like a new interpreter. `installed` is the path of modules without the variable PYTHONPATH."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    held, *opened = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 500) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(opened, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if sys.platform == "linux":  # end with the client at once; elsewhere, the server notices its end a little later
        fcntl.fcntl(held, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(held, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(held, fcntl.F_SETFL, os.O_ASYNC)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # read TMPDIR again: an import in the server may have stored the folder of another test
    sys.executable = str(FOLDER / "python")
    multiprocessing.spawn.set_executable(sys.executable)
    # Buffer as a new interpreter would do, however the server was started.
    is_unbuffered, raw = "-u" in request["options"], io.FileIO(1, "w", closefd=False)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]  # typeshed marks `__stdout__` as Final
        raw if is_unbuffered else io.BufferedWriter(raw),  # as the interpreter does with -u
        encoding=sys.stdout.encoding, errors=sys.stdout.errors, write_through=is_unbuffered, line_buffering=raw.isatty(),
    )  # fmt: skip
    # What depends on a variable, or is random in each interpreter:
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    numpy.random.seed()
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:] = [*paths, *installed]
    if "-P" not in request["options"]:
        kind = request["words"][0]
        sys.path.insert(0, {"-c": "", "-m": os.getcwd()}.get(kind, str(Path(kind).resolve().parent)))
    sys.modules["__main__"] = types.ModuleType("__main__")


def execute(kind: str, *words: str) -> None:
    """Execute a program as `python kind *words` does."""
    if kind == "-m":
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"]
    if kind == "-c":
        sys.argv = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec", dont_inherit=True), vars(main))
    else:
        sys.argv = [kind, *words]
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec", dont_inherit=True), vars(main))


def status_of(words: list[str]) -> int:
    """Execute a program, print the traceback if it fails, and return its exit code."""
    try:
        execute(*words)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(status: int) -> NoReturn:
    """End the process like an interpreter, but do not delete each object of each module, which takes half a second."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    if os.fork():  # so that the server is no child of the tests, some of which look for processes that were left
        os._exit(0)
    LISTENING, WATCHED = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    FOLDER = Path(LISTENING.getsockname()).parent
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    OWN = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    INSTALLED = [each for each in sys.path if each not in OWN]
    for name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that forks neither read nor copy these objects when they collect garbage
    if program := next_program(LISTENING, WATCHED):
        set_up(*program, INSTALLED)
        end(status_of(program[0]["words"]))
    else:
        shutil.rmtree(FOLDER, ignore_errors=True)
