"""A file that asks a running job for a checkpoint, an evaluation or a stop."""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path

from callsheet.callback import Callback, label_of
from callsheet.callbacks.listeners import announce, withdraw
from callsheet.callbacks.trigger_file import LONGEST, LONGEST_WHY, WORDS, claimed_lines, printable
from callsheet.context import Context
from callsheet.errors import ConfigError, RequestRejected, did_you_mean

logger = logging.getLogger("callsheet")

_SETTLED_SECONDS = 1.0  # whoever writes it has done so by then


class SaveOnTrigger(Callback):
    """Do what a file asks for: `echo "save before the maintenance" > runs/<run>/trigger`.

    Each line is one wish: `save`, `evaluate` or `stop`, and why, if one likes. An empty file, as `touch` makes it, asks for a
    save. The file is removed when it is taken, before anything is asked for, so that each wish is made once. It is text and stays
    text: nothing in it is run or imported. What is no wish is named in a warning. A file without an end of line is left for a
    second: it may be half written.

    Rank 0 alone looks, at steps of training and evaluation; all ranks agree on what it finds, and act on it at the same step.
    While the run goes on, `listeners.json` in its folder says which file that is: `callsheet watch` reads it.

    Args:
        file: which; `trigger` in the run's folder where it is None.
        seconds: how often to look.

    Raises:
        ConfigError: an argument that cannot work, or a run without a folder where no file was given.
    """

    phase = "decide"
    ranks = "zero"

    def __init__(self, *, file: str | os.PathLike[str] | None = None, seconds: float = 1.0) -> None:
        if not seconds >= 0:
            raise ConfigError(f"seconds={seconds}: give 0 or more")
        self._file = Path(file) if file is not None else None
        self._seconds = seconds
        self._path = Path()
        self._next = 0.0

    def on_run_start(self, ctx: Context) -> None:
        """See where to look."""
        if self._file is None and ctx.run.folder is None:
            raise ConfigError("the run has no folder for the trigger; give it a file=")
        self._path = self._file or Path(ctx.run.folder or "", "trigger")

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Say where it looks; before, the run may not write into its folder."""
        if ctx.run.folder is not None:
            try:
                announce(ctx.run.folder, label_of(self), self._path)
            except OSError as error:
                logger.warning("%s: cannot tell others which file it looks at: %s", label_of(self), error)

    def on_run_end(self, ctx: Context) -> None:
        """Nobody looks any more."""
        if ctx.run.folder is not None:
            try:
                withdraw(ctx.run.folder, label_of(self))
            except OSError as error:
                logger.warning("%s: cannot tell others that it looks no longer: %s", label_of(self), error)

    def on_train_step_end(self, ctx: Context) -> None:
        """Look, if it is time."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._seconds
            for line in self._taken():
                self._ask(ctx, line)

    on_eval_step_end = on_train_step_end

    def _taken(self) -> list[str]:
        """The lines of the file, which is gone then; none where there is none, or it may still be being written."""
        try:
            status = os.lstat(self._path)
        except OSError:
            return []
        if not stat.S_ISREG(status.st_mode):
            logger.warning("%s: %s is no plain file, and is left alone", label_of(self), self._path)
            self._next += 60.0
            return []
        try:
            with open(self._path, "rb") as file:
                content = file.read(LONGEST)
            if not content.endswith(b"\n") and time.time() - status.st_mtime < _SETTLED_SECONDS:
                return []
            return claimed_lines(self._path, "taken")
        except FileNotFoundError:  # somebody changes it, and it will be there again
            return []
        except OSError as error:
            logger.warning("%s: %s cannot be taken, and asks for nothing: %s", label_of(self), self._path, error)
            self._next += 60.0
            return []

    def _ask(self, ctx: Context, line: str) -> None:
        word, _, why = printable(line).partition(" ")
        word, why = word.lower().rstrip(":"), why.strip()[:LONGEST_WHY] or f"asked for in the file {self._path.name}"
        logger.info("%s: %s: %s", label_of(self), word, why)
        try:
            if word == "save":
                ctx.control.save(why, by=label_of(self))
            elif word == "evaluate":
                ctx.control.evaluate(why)
            elif word == "stop":
                ctx.control.stop(why, resumable=True)  # a person's stop: the same command trains on
            else:
                words = ", ".join(WORDS)
                logger.warning(
                    "%s: %r is no wish%s (one of %s)", label_of(self), word[:40], did_you_mean(word[:40], WORDS), words
                )
        except RequestRejected as error:
            logger.warning("%s: %s", label_of(self), error)
