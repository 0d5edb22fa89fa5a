"""Ensures that only one run writes to a run's folder. Rank 0 acquires a lock, and informs all ranks whether it has the lock."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from callsheet.core.control import Control
from callsheet.core.run_state import RunInfo
from callsheet.core.wrappers import NOT_WRITABLE_ERRNOS
from callsheet.errors import ConfigError, RunInUseError
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.run_lock import RunLock
from callsheet.run.run_marker import mark_run

logger = logging.getLogger("callsheet")

_WAIT_SLICE_SECONDS = 1.0


class RunGuard:
    """Holds the lock of a run's folder, and writes the marker file by which a folder is recognized as a run's.

    A run with a name that the user chose acquires the lock before it does anything else. A run whose name was made from the time,
    or that only evaluates, acquires it when it first writes to its folder.

    Args:
        timeout: how long to wait for the lock.
        is_busy: whether the run is doing anything; if not, another run of this process may take over its folder.
    """

    def __init__(
        self, groups: ProcessGroups, run: RunInfo, control: Control, *, timeout: float, is_busy: Callable[[], bool]
    ) -> None:
        self._groups = groups
        self._run = run
        self._timeout = timeout
        self._has_begun = False
        self._is_unguarded = False  # True if the lock's file cannot be created
        self._is_unwritable = False  # True if the run's folder is not writable

        def request_boundary() -> None:  # the lock's thread calls this when the lock is lost; the loop reacts after its next step
            run.has_lost_folder = control.is_boundary_requested = control.pending = True

        self._lock: RunLock | None = None  # the lock of the run's folder, on rank 0 only
        if run.is_world_process_zero and run.folder is not None:
            self._lock = RunLock(run.folder, is_busy=is_busy, on_loss=request_boundary)

    def acquire(self) -> None:
        """Acquire the lock of the run's folder before anything is written to the folder. This is a collective.

        Raises:
            RunInUseError: another process trains in the run's folder, and has not ended in time. Raised on all ranks.
        """
        deadline = time.monotonic() + self._timeout
        while (rejection := self._groups.of_rank_zero(self._attempt(deadline))) is None:
            pass  # try again; each attempt is short, because the other ranks wait for rank 0 in a collective, which has a timeout
        if rejection:
            raise RunInUseError(rejection)

    def _attempt(self, deadline: float) -> str | None:
        """Try for a short time to acquire the lock.

        Return an empty string if this run holds the lock, the reason if the run cannot get it, or None to keep waiting.
        """
        if self._lock is None:
            return ""
        until = min(deadline, time.monotonic() + min(_WAIT_SLICE_SECONDS, self._groups.timeout / 4))
        try:
            while (owner := self._lock.attempt()) is not None:
                now = time.monotonic()
                if now >= deadline or owner.is_in_this_thread:
                    return self._lock.rejection(owner)
                self._lock.log_waiting(owner, self._timeout)
                if now >= until:
                    return None
                time.sleep(0.1)
        except OSError as error:
            self._cannot_lock(error)
        return ""

    def check(self, *, acquires: bool = False) -> None:
        """On rank 0, raise an error if the lock of the run's folder was lost. This must be called before each write.

        With `acquires`, first acquire the lock if this run has not.

        Raises:
            RunLockLostError: another process has taken over the folder.
            RunInUseError: `acquires` is True, and another run holds the lock.
        """
        lock = self._lock
        if lock is None:
            return
        if acquires and not lock.was_acquired and not self._is_unguarded:
            try:
                lock.acquire(0)
            except OSError as error:
                self._cannot_lock(error)
        lock.check()

    def raise_if_lost(self) -> None:
        """On rank 0, raise an error if the lock of the run's folder is already known to be lost.

        This does not read the disk.
        """
        if self._lock is not None and self._lock.is_lost:
            self._lock.check()

    def begin(self) -> None:
        """On rank 0, record that training begins, and mark the folder as the folder of a run (with a file `run.json`)."""
        self._has_begun = True
        self.mark()

    def mark(self) -> None:
        """Acquire the lock of the run's folder and write the marker file, if training has begun and the folder exists."""
        folder = self._run.folder
        if self._lock is None or folder is None or not self._has_begun or self._is_unwritable or not folder.is_dir():
            return
        self.check(acquires=True)
        try:
            mark_run(folder, self._run.name)
        except OSError as error:
            logger.warning("cannot mark %s as a run's: %s", folder, error.strerror or error)

    def end(self) -> None:
        """Release the lock at the end of the run."""
        if self._lock is None:
            return
        try:
            if self._lock.is_held:
                self.mark()  # the run's folder may not have existed when training began, so mark it now
        finally:
            self._lock.release()

    def _cannot_lock(self, error: OSError) -> None:
        if not self._is_unguarded:
            self._is_unguarded = True
            # If the folder is not writable, runs cannot disturb each other there, so a warning is not needed.
            self._is_unwritable = self._run.folder is not None and bool(why_not_writable(self._run.folder))
            if self._is_unwritable:
                return
            logger.warning(
                "cannot create a lock beside %s (%s): a second process that trains in this folder would not be rejected",
                self._run.folder,
                error.strerror or error,
            )


def why_not_writable(folder: Path) -> str:
    """Return why this process cannot create files in `folder`, or an empty string if it can.

    If the folder does not exist, the nearest existing folder above it is checked instead.
    """
    for place in (folder, *folder.parents):
        try:
            with tempfile.TemporaryFile(dir=place):
                return ""
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{place}: {error.strerror}" if error.errno in NOT_WRITABLE_ERRNOS else ""
    return ""


def check_lock_timeout(seconds: float) -> float:
    """Return `seconds`, after checking that it is a valid time to wait for a lock.

    Raises:
        ConfigError: `seconds` is not a valid time.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise ConfigError(f"lock_timeout_seconds={seconds!r}: give a finite number of seconds, or 0 not to wait")
    return seconds


__all__ = ["RunGuard", "check_lock_timeout", "why_not_writable"]
