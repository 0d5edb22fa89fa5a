"""Lets a user send requests to a running job through a file: save, evaluate or stop."""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path

from callsheet.callbacks.support.listeners import announce, withdraw
from callsheet.callbacks.support.trigger_file import (
    MAX_FILE_BYTES,
    MAX_REASON_CHARACTERS,
    TRIGGER_WORDS,
    claim_lines,
    printable,
)
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.ranks import RankGate
from callsheet.errors import ConfigError, RequestRejected, did_you_mean

logger = logging.getLogger("callsheet")

_SETTLED_SECONDS = 1.0  # a file without a final newline counts as complete if it was not changed for this long


class SaveOnTrigger(Callback):
    """Carry out requests that a user writes to a file, as in `echo "save before the maintenance" > runs/<run>/trigger`.

    Each line is one request: `save`, `evaluate` or `stop`, and optionally a reason. An empty file, as from `touch`, requests a save.
    The file is removed when it is read, before any request is made, so that each request is made once. Its text is never executed or
    imported. A line that is not a request causes a warning. A file that does not end with a newline may be half written, and is
    read only when it has not changed for a second.

    Only rank 0 reads the file, at the end of training and evaluation steps. All ranks agree on the requests, and act on them at
    the same step. While the run lasts, `listeners.json` in the run's folder contains the file's path, so that `callsheet watch`
    finds the file.

    Args:
        file: the file's path; None means `trigger` in the run's folder.
        seconds: how often to check for the file.

    Raises:
        ConfigError: an argument is invalid, or the run has no folder and no file was given.
    """

    phase = "decide"
    ranks: RankGate = "zero"
    requests = ("stop", "save", "evaluate")
    writes_to_run_folder = True

    def __init__(self, *, file: str | os.PathLike[str] | None = None, seconds: float = 1.0) -> None:
        if not seconds >= 0:
            raise ConfigError(f"seconds={seconds}: give 0 or more")
        self._file = Path(file) if file is not None else None
        self._seconds = seconds
        self._path = Path()
        self._next = 0.0

    def on_run_start(self, ctx: Context) -> None:
        """Determine the path of the trigger file, to which the user writes requests."""
        if self._file is None and ctx.run.folder is None:
            raise ConfigError("the run has no folder for the trigger; give it a file=")
        self._path = self._file or Path(ctx.run.folder or "", "trigger")

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Add the trigger file to the list `listeners.json` in the run's folder, so that `callsheet watch` can find the file.

        This is done at this event because the run may not write to its folder earlier.
        """
        if ctx.run.folder is not None:
            try:
                announce(ctx.run.folder, label_of(self), self._path)
            except OSError as error:
                logger.warning(
                    "%s: cannot write the run's list of trigger files, so callsheet watch does not find this one: %s",
                    label_of(self),
                    error,
                )

    def on_run_end(self, ctx: Context) -> None:
        """Remove the trigger file from the list in the run's folder, because the run no longer reads it."""
        if ctx.run.folder is not None and not ctx.run.has_lost_folder:
            try:
                withdraw(ctx.run.folder, label_of(self))
            except OSError as error:
                logger.warning("%s: cannot remove itself from the run's list of trigger files: %s", label_of(self), error)

    def on_train_step_end(self, ctx: Context) -> None:
        """Make the requests that are in the trigger file. Look for the file at most once every `seconds` seconds."""
        now = time.monotonic()
        # If another process has taken over the run's folder, leave the file to that process.
        if now >= self._next and ctx.run.may_write(self._path):
            self._next = now + self._seconds
            for line in self._take_lines():
                self._ask(ctx, line)

    on_eval_step_end = on_train_step_end

    def _take_lines(self) -> list[str]:
        """Remove the trigger file, and return its lines.

        Return no lines if there is no file, or if it may be incomplete.
        """
        try:
            status = os.lstat(self._path)
        except OSError:
            return []
        if not stat.S_ISREG(status.st_mode):
            logger.warning("%s: %s is not a regular file and is ignored; remove it", label_of(self), self._path)
            self._next += 60.0
            return []
        try:
            with open(self._path, "rb") as file:
                content = file.read(MAX_FILE_BYTES)
            if not content.endswith(b"\n") and time.time() - status.st_mtime < _SETTLED_SECONDS:
                return []
            return claim_lines(self._path, "taken")
        except FileNotFoundError:  # another process is replacing the file; try again later
            return []
        except OSError as error:
            logger.warning(
                "%s: %s cannot be read and removed, so its requests are ignored: %s", label_of(self), self._path, error
            )
            self._next += 60.0
            return []

    def _ask(self, ctx: Context, line: str) -> None:
        word, _, why = printable(line).partition(" ")
        word, why = word.lower().rstrip(":"), why.strip()[:MAX_REASON_CHARACTERS] or f"requested in the file {self._path.name}"
        logger.info("%s: %s: %s", label_of(self), word, why)
        try:
            if word == "save":
                ctx.control.save(why, by=label_of(self))
            elif word == "evaluate":
                ctx.control.evaluate(why)
            elif word == "stop":
                ctx.control.stop(why, resumable=True)  # after a resumable stop, the command that started the run can resume it
            else:
                words = ", ".join(TRIGGER_WORDS)
                logger.warning(
                    "%s: unknown request %r%s (one of %s)",
                    label_of(self),
                    word[:40],
                    did_you_mean(word[:40], TRIGGER_WORDS),
                    words,
                )
        except RequestRejected as error:
            logger.warning("%s: %s", label_of(self), error)
