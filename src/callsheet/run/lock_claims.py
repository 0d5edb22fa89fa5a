"""The claims of processes to a run's folder: the files in the lock of the folder, which `run_lock` creates and deletes."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

STALE_SECONDS = 60.0
"""After this many seconds without a new heartbeat, the claim of a process on another machine is ignored."""

own_tokens: set[str] = set()
"""The tokens of the claims that this process has written into lock files."""


@dataclass(frozen=True)
class Claim:
    """The content of a lock file: which process claims the run's folder, since when, and the time of the process's last heartbeat."""

    token: str
    machine: str
    machine_id: str
    pid: int
    process_started: str
    since: float
    beat: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since)
        is_today = since.date() == datetime.now().date()
        return f"process {self.pid} on machine {self.machine} since {since:{'%H:%M' if is_today else '%Y-%m-%d %H:%M'}}"

    @property
    def is_alive(self) -> bool:
        """Whether the process that made this claim is known to run.

        For a process of this machine, the operating system is asked. A process of another machine counts as running if its last
        heartbeat is at most `STALE_SECONDS` old by this machine's clock.
        """
        if self.machine_id == machine_id():
            return not self.is_of_dead_process
        return abs(time.time() - self.beat) <= STALE_SECONDS

    @property
    def is_of_dead_process(self) -> bool:
        """Whether this claim belongs to a process of this machine that has ended.

        False for other machines, whose processes cannot be seen.
        """
        if self.machine_id != machine_id():
            return False
        # A token that is not in `own_tokens` is from an earlier process with this pid, or this process wrote it before an `exec`.
        if self.pid == os.getpid():
            return self.token not in own_tokens
        return process_started(self.pid) != self.process_started


def claim_of(folder: str | os.PathLike[str]) -> Claim | None:
    """Return the claim that holds the lock of the run in `folder`; None if there is no claim or the claim cannot be read.

    A claim is the content of a lock file. This function writes nothing.
    """
    try:
        path = lock_folder_of(Path(os.path.abspath(folder)))
        numbers = [int(name) for name in os.listdir(path) if name.isdecimal()]
        return parse_claim((path / str(max(numbers))).read_bytes()) if numbers else None
    except (OSError, ValueError):
        return None


def lock_folder_of(folder: Path) -> Path:
    """Return the folder that holds a run's lock files, one for each claim."""
    return Path(os.path.realpath(folder.parent)) / f".{folder.name}.lock"


@functools.cache
def machine_id() -> str:
    """Return an id of this machine or, if this process runs in a container with separate process ids, of the container.

    The host name is not enough, because containers may have the same name.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        # Two containers of one machine share the boot id but have separate process ids, so add the namespace of the process ids.
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def process_started(pid: int) -> str:
    """Return the start time of a process of this machine as text, in a unit that depends on the system.

    Return an empty string if there is no such process. Outside Linux, where the time is not available, the result is the same for
    every living process, so a process that has ended looks alive if its id was reused.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except OSError:  # the process exists and belongs to another user
            pass
        return "alive"
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]  # a zombie process writes no more, so it counts as ended


def new_claim() -> Claim:
    """Return a claim of this process, which begins now."""
    now, pid = time.time(), os.getpid()
    return Claim(secrets.token_hex(8), socket.gethostname(), machine_id(), pid, process_started(pid), since=now, beat=now)


def create_lock_file(path: Path, folders: list[Path]) -> int | None:
    """Create a lock file and the folders above it, and return the file's descriptor. Return None if the file already exists."""
    for _ in range(100):
        missing = path.parent
        new: list[Path] = []
        while not missing.exists():
            new.insert(0, missing)
            missing = missing.parent
        for folder in new:
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                if folder != path.parent:
                    folders.append(folder)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        except FileNotFoundError:  # another run that has just ended has removed the folder, so try again
            continue
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def read_claims(path: Path) -> dict[int, bytes]:
    """Return the content of every lock file in a folder, by the lock file's number."""
    with contextlib.suppress(OSError):
        os.utime(path)  # on NFS, `utime` makes the machine read the folder from the server and not from its cache
    found: dict[int, bytes] = {}
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return {}
    for name in names:
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError):
                found[int(name)] = (path / name).read_bytes()
    return found


def parse_claim(content: bytes) -> Claim | None:
    """Return the claim in a lock file. Return None if the file is only half written, or was not written by callsheet."""
    try:
        return Claim(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
