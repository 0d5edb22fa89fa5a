"""One writer per run folder: the lock that rank 0 of a run holds from the run's start to its end.

The lock of the run in `runs/x` is the folder `runs/.x.lock`, next to the run's folder. It exists before the run has written
anything, and it stays in place when an earlier run in `runs/x` is renamed. It holds one small file for each claim, and the file's
name is a number. The claim with the highest number owns the run. The file's content names the machine, the process with its start
time, and the last heartbeat.

How a run acquires the lock:

1. List the claims. If there are none, the next number is 1. If the claim with the highest number belongs to a process that is
   gone, the next number is one more. Otherwise the run is in use.
2. Create the file of the next number with `O_EXCL`. Only one of several waiters succeeds; the others start again at step 1.
3. Read all other claims again. If one of them has changed since step 1, withdraw the new claim and start again: the old
   owner may have released its claim in the meantime, and another process may have begun with number 1.
4. Delete the older claims.

A process that makes a claim never removes or overwrites an owner's file before its own file exists. So two processes cannot both
believe that they own the run: an owner must find its own file in place, with its own content, and no file with a higher number.
`check` looks for exactly that. A file with a higher number counts only if it is still there on a second look, because
its process may be about to withdraw the claim in step 3.

On the same machine, a process is gone if no process has its id, or if the process with that id started at another time. On
another machine, a process counts as gone if its claim has not changed for `STALE_SECONDS` by the reader's own monotonic clock.
The reader does not rely on the other machine's clock alone: even if the heartbeat in the claim is older than `STALE_SECONDS` by
the wall clock, the reader must see no heartbeat for two and a half intervals.

Heartbeats are written in place, through the file descriptor with which the claim was created. So if an owner was suspended and
lost the lock, it writes to a file that nobody reads any more.

The lock needs a file system on which `O_EXCL` is atomic. This is so on local disks, and on NFS since version 3.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from callsheet.errors import RunInUseError, RunLockLostError
from callsheet.run import lock_claims
from callsheet.run.lock_claims import Claim, create_lock_file, lock_folder_of, new_claim, own_tokens, parse_claim, read_claims

logger = logging.getLogger("callsheet")

HEARTBEAT_SECONDS = 10.0
"""The interval at which the owner of a lock writes that it is alive."""

_POLL_SECONDS = 0.1
_SECOND_LOOK_SECONDS = 0.5
_RECORD_BYTES = 1024

_registry = threading.RLock()  # this lock protects `_held`
_held: dict[str, RunLock] = {}  # the locks of this process, by path


class RunLock:
    """The lock of one run's folder. Each run of this process has its own lock object.

    While a run of this process is not busy, another run of this process can take over its lock without waiting. This happens when
    a notebook makes two Trainers with the same run name, and when a recipe passes its lock to its Trainer.

    In a process that was forked from the owner's process, `check` and `release` do nothing.

    Args:
        folder: the run's folder.
        is_busy: returns whether the run that uses this lock is running now.
        on_loss: called when the lock is found to be lost, often in the thread that writes heartbeats.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        is_busy: Callable[[], bool] = lambda: False,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = Path(folder)
        self._path = lock_folder_of(self.folder)
        self._is_busy = is_busy
        self._on_loss = on_loss
        self._ownership: _Ownership | None = None
        self._lost = ""  # why the lock was lost; empty if it was not lost
        # For each lock file, its content and the time when the content last changed.
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._has_logged_waiting = False
        self._thread = 0  # the id of the thread that acquired the lock
        self._pid = os.getpid()

    @property
    def is_held(self) -> bool:
        """Whether this run held its folder's lock at the last check. Unlike `check`, this does not read the lock files again."""
        return self._ownership is not None and not self._lost

    @property
    def is_lost(self) -> bool:
        """Whether another run is known to have taken over the lock."""
        return bool(self._lost)

    @property
    def was_acquired(self) -> bool:
        """Whether this run has acquired the lock of its folder, even if it has lost the lock since."""
        return self._ownership is not None or bool(self._lost)

    def acquire(self, timeout: float) -> None:
        """Wait for the lock, at most `timeout` seconds.

        Raises:
            RunInUseError: another process, or another run of this process, trains in this folder.
            OSError: no file can be created beside the run's folder.
        """
        deadline = time.monotonic() + timeout
        while (owner := self.attempt()) is not None:
            if time.monotonic() >= deadline or owner.is_in_this_thread:
                raise RunInUseError(self.rejection(owner))
            self.log_waiting(owner, timeout)
            time.sleep(_POLL_SECONDS)

    def attempt(self) -> Owner | None:
        """Acquire the lock without waiting, and return None. If another run holds the lock, return the `Owner` instead.

        Raises:
            OSError: no file can be created beside the run's folder.
        """
        with _registry:
            holder = _held.get(str(self._path))
            if holder is self:
                return None
            if holder is not None and (ownership := holder._ownership) is not None and not holder._lost:
                if holder._is_busy():
                    return Owner(ownership.claim, is_in_this_process=True, is_in_this_thread=holder._is_in_this_thread())
                if ownership.is_intact():
                    holder._ownership = None
                    holder._lost = f"another run of this process trains in {self.folder} now"
                    holder._on_loss()
                    self._own(ownership)
                    return None
            return self._claim()

    def log_waiting(self, owner: Owner, timeout: float) -> None:
        """Log once that this process waits for the lock."""
        if not self._has_logged_waiting and timeout > 0:
            self._has_logged_waiting = True
            logger.warning(
                "%s is being trained by %s; waiting up to %g s for it to end (lock_timeout_seconds)", self.folder, owner, timeout
            )

    def rejection(self, owner: Owner) -> str:
        """Return the error message for a run that could not acquire the lock, because `owner` holds it."""
        if owner.is_in_this_process:
            return f"{self.folder} is being trained by another run of this process. End that run first, or give the run another name or folder."
        message = f"{self.folder} is being trained by {owner}. Give the run another name or folder to train beside it."
        silent = max((time.monotonic() - since for _, since in self._seen.values()), default=0.0)
        if silent > 2 * HEARTBEAT_SECONDS:
            message += (
                f" That process has written no heartbeat for {silent:.0f} s: if it is gone, start again in "
                f"{max(0.0, lock_claims.STALE_SECONDS - silent):.0f} s, or raise lock_timeout_seconds above {lock_claims.STALE_SECONDS:.0f}."
            )
        return message

    def check(self) -> None:
        """Raise an error if another run has taken over the folder. If this run never acquired the lock, do nothing.

        Raises:
            RunLockLostError: this process was suspended or disconnected for too long, and another process trains in the folder.
        """
        if os.getpid() != self._pid:
            return
        if not self._lost and self._ownership is not None and not self._ownership.is_intact():
            self._lose(self._ownership)
        if self._lost:
            raise RunLockLostError(
                f"this run has lost the lock of {self.folder} and stops writing: {self._lost}. Start it again to continue from its "
                "newest checkpoint once the other one has ended."
            )

    def release(self) -> None:
        """Release the lock of the folder. This may be called twice."""
        if os.getpid() != self._pid:
            return
        with _registry:
            ownership, self._ownership = self._ownership, None
            if _held.get(str(self._path)) is self:
                del _held[str(self._path)]
        if ownership is not None:
            ownership.end(removes=not self._lost)

    def _is_in_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def _own(self, ownership: _Ownership) -> None:
        self._ownership, self._lost = ownership, ""
        self._thread = threading.get_ident()
        ownership.on_loss = self._lose
        _held[str(self._path)] = self

    def _lose(self, ownership: _Ownership) -> None:
        if self._ownership is ownership and not self._lost:
            other = ownership.successor()
            self._lost = f"it was suspended or could not write for a while, and {other or 'another process'} took it over"
            logger.error("the lock of %s is lost: %s", self.folder, self._lost)
            self._on_loss()

    def _claim(self) -> Owner | None:
        """Try once to acquire the lock (steps 1 to 4 in the module's docstring). If another process has it, return an `Owner`."""
        claims = read_claims(self._path)
        highest = max(claims, default=0)
        if claims and not self._is_gone(highest, claims[highest]):
            return Owner(parse_claim(claims[highest]))
        number, record = highest + 1, new_claim()
        created: list[Path] = []
        descriptor = create_lock_file(self._path / str(number), created)
        if descriptor is None:  # another process that also waits for the lock has created this file first
            return Owner(None)
        ownership = _Ownership(self._path, number, record, descriptor, created)
        try:
            ownership.write()
            others = {other: content for other, content in read_claims(self._path).items() if other != number}
        except OSError:
            ownership.withdraw()
            raise
        if any(claims.get(other) != content for other, content in others.items()):
            ownership.withdraw()
            return Owner(None)
        for other in others:
            with contextlib.suppress(FileNotFoundError):
                (self._path / str(other)).unlink()
        if claims:
            old = parse_claim(claims[highest])
            level = logging.INFO if old is not None and old.is_of_dead_process else logging.WARNING
            why = "is gone" if level == logging.INFO else f"has written no heartbeat for {lock_claims.STALE_SECONDS:g} s"
            logger.log(level, "took over the lock of %s: %s %s", self.folder, old or "the process that held it", why)
        ownership.start()
        self._own(ownership)
        return None

    def _is_gone(self, number: int, content: bytes) -> bool:
        """Return whether the process that made this claim has ended, or counts as ended because its heartbeat has stopped."""
        claim, now = parse_claim(content), time.monotonic()
        if claim is not None and claim.is_of_dead_process:
            return True
        before = self._seen.get(number)
        if before is None or before[0] != content:
            self._seen = {number: (content, now)}
            return False
        silent = now - before[1]
        is_old = claim is None or time.time() - claim.beat > lock_claims.STALE_SECONDS
        return silent > lock_claims.STALE_SECONDS or (is_old and silent > min(2.5 * HEARTBEAT_SECONDS, lock_claims.STALE_SECONDS))


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock. `claim`, the content of the lock file, is None if the file cannot be read yet."""

    claim: Claim | None
    is_in_this_process: bool = False
    is_in_this_thread: bool = False

    def __str__(self) -> str:
        return str(self.claim) if self.claim is not None else "another process"


class _Ownership:
    """A lock file of this process, and the thread that writes heartbeats to it."""

    def __init__(self, path: Path, number: int, claim: Claim, descriptor: int, created: list[Path]) -> None:
        self.claim = claim
        self.on_loss: Callable[[_Ownership], None] = lambda ownership: None
        self._path = path
        self._file = path / str(number)
        self._number = number
        self._descriptor = descriptor
        self._created = created  # folders that were created for the lock file
        self._is_over = threading.Event()
        self._has_warned = False
        self._thread: threading.Thread | None = None
        own_tokens.add(claim.token)

    def write(self) -> None:
        """Write a heartbeat to the lock file."""
        record = json.dumps({**asdict(self.claim), "beat": time.time()}).encode()
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, record.ljust(_RECORD_BYTES - 1) + b"\n")
        os.fsync(self._descriptor)  # `fsync` makes the new heartbeat visible to other machines

    def start(self) -> None:
        """Start the thread that writes heartbeats."""
        self._thread = threading.Thread(target=self._run, name="callsheet-lock", daemon=True)
        self._thread.start()

    def is_intact(self) -> bool:
        """Return whether this process still owns the run's folder.

        If the lock's folder cannot be read, return True, because then another run cannot take over the run's folder either.
        """
        if self._is_in_place():
            return True
        time.sleep(_SECOND_LOOK_SECONDS)  # a process that only waits for the lock may withdraw its claim, so look again
        return self._is_in_place()

    def successor(self) -> Claim | None:
        """Return the claim of the process that has taken the lock over from this process; None if there is none."""
        try:
            claims = read_claims(self._path)
        except OSError:
            return None
        return parse_claim(claims[max(claims)]) if claims else None

    def withdraw(self) -> None:
        """Remove the lock file with which this process tried, without success, to get the lock."""
        os.close(self._descriptor)
        self._remove()

    def end(self, *, removes: bool) -> None:
        """Stop the heartbeat, and remove the lock file if `removes` is True."""
        self._is_over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(HEARTBEAT_SECONDS)
            if self._thread.is_alive():  # the thread hangs in the file system and still uses the descriptor: do not close it
                return
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            if removes and self._is_in_place():
                self._remove()

    def _remove(self) -> None:
        own_tokens.discard(self.claim.token)
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()
        with contextlib.suppress(OSError):  # `rmdir` fails if the folder holds the lock file of another process
            self._path.rmdir()
            for folder in reversed(self._created):
                folder.rmdir()

    def _is_in_place(self) -> bool:
        try:
            claims = read_claims(self._path)
        except OSError:
            return True
        found = parse_claim(claims[self._number]) if self._number in claims else None
        return max(claims, default=0) == self._number and found is not None and found.token == self.claim.token

    def _run(self) -> None:
        while not self._is_over.wait(HEARTBEAT_SECONDS):
            if not self.is_intact():
                self.on_loss(self)
                return
            try:
                self.write()
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "cannot write a heartbeat to %s (%s): after %g s another process may take over the run",
                        self._file,
                        error.strerror or error,
                        lock_claims.STALE_SECONDS,
                    )


def _after_fork() -> None:
    global _registry
    _registry = threading.RLock()
    _held.clear()
    own_tokens.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
