"""What the process prints, in a file of the run's folder."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Any

from callsheet.callback import at, one_of
from callsheet.context import Context
from callsheet.errors import ConfigError
from callsheet.loggers.descriptor_capture import DESCRIPTORS, DescriptorCapture
from callsheet.loggers.file_names import folder_of
from callsheet.loggers.logger import Logger
from callsheet.loggers.output_log import OutputLog
from callsheet.loggers.stream_tee import StreamTee

CAPTURES = ("python", "fd")

_EARLY = 10_000  # pieces of text that are kept until the run may write
_written: set[Path | None] = set()


class FileLogger(Logger):
    """Write what each rank prints to `logs/rank-<rank>.log` in the run's folder, too; it appears where it did before.

    That is what goes through `sys.stdout` and `sys.stderr`: `print`, warnings, the handlers of `logging` that write to these streams,
    bars; and the traceback of an exception that ends the run. Every start adds a line with the run, the process and the step. Lines are
    written as they end: of a line that is rewritten, as by a bar, the last state; without colours. What is printed while the run is set up
    is there too, unless the run never begins. When the run ends the streams are as they were.

    `capture="fd"` takes all that is written to the file descriptors 1 and 2: also what C libraries, data-loading workers and other
    children print. For that a second process is started for each rank, through which it all passes; where that one is killed, printing
    fails. Standard output is no terminal then, so a progress bar becomes lines. With a `name` of its own it writes to
    `<name>/logs/rank-<rank>.log`.

    Args:
        capture: `python` or `fd`.
        max_bytes: when the file would grow beyond that it becomes `rank-<rank>.log.1`, in the place of an older one; None is never.

    Raises:
        ConfigError: an argument that cannot work, or, when a run begins, it has no folder.
    """

    writes_to_run_folder = True
    ranks = "all"

    def __init__(self, *, capture: str = "python", max_bytes: int | None = 100_000_000) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"max_bytes={max_bytes}: give more than 0, or None for a file that may grow")
        self._capture = one_of("capture", capture, CAPTURES)
        self._max_bytes = max_bytes
        self._log: OutputLog | DescriptorCapture | None = None  # until the run may write
        self._path: Path | None = None
        self._early: deque[tuple[str, str]] = deque(maxlen=_EARLY)
        self._tees: list[StreamTee] = []

    @at("change")  # before the others print
    def on_run_start(self, ctx: Context) -> None:
        """Listen, and keep what is heard until the run may write."""
        self._end()
        self._listen(list(DESCRIPTORS))

    @at("change")
    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Write from here on."""
        try:
            log = self._opened(folder_of(self, ctx) / "logs" / f"rank-{ctx.run.rank}.log")
        except BaseException:
            self._end()
            raise
        log.write(f"--- {_whereabouts(ctx)} ---\n")
        self._log = log
        while self._early:
            log.write(*self._early.popleft())

    def on_log(self, ctx: Context) -> None:
        """Tell what could not be written."""
        if self._log is not None and (failure := self._log.failure()) is not None:
            failure.add_note("what is printed meanwhile is missing in the log")
            raise failure

    def on_exception(self, ctx: Context) -> None:
        """The traceback, which Python prints when the run is over."""
        if self._log is not None:
            self._log.write("".join(traceback.format_exception(ctx.exception)))

    @at("restore")  # after the others have printed
    def on_run_end(self, ctx: Context) -> None:
        """Listen no more."""
        self._end()

    def _take(self, text: str, stream: str) -> None:
        if self._log is not None:
            self._log.write(text, stream)
        else:
            self._early.append((text, stream))

    def _opened(self, path: Path) -> OutputLog | DescriptorCapture:
        if path in _written:
            raise ConfigError(f"{path} is written by another FileLogger; give this one a name of its own: logger.name = '...'")
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._capture == "fd":
            self._ignore()
            log: OutputLog | DescriptorCapture = DescriptorCapture(path, self._max_bytes)
            self._listen([name for name, number in DESCRIPTORS.items() if _descriptor_of(getattr(sys, name)) != number])
        else:
            log = OutputLog(path, self._max_bytes)
            if not self._tees:  # the run's start was not told
                self._listen(list(DESCRIPTORS))
        _written.add(path)
        self._path = path
        return log

    def _listen(self, names: list[str]) -> None:
        self._tees = [StreamTee(name, self._take) for name in names if getattr(sys, name) is not None]

    def _ignore(self) -> None:
        tees, self._tees = self._tees, []
        for tee in reversed(tees):
            tee.close_tee()

    def _end(self) -> None:
        self._ignore()
        self._early.clear()
        log, self._log = self._log, None
        if log is not None:
            _written.discard(self._path)
            log.close()
            if (failure := log.failure()) is not None:
                raise failure


def _descriptor_of(stream: Any) -> int | None:
    try:
        number: int = stream.fileno()
    except (AttributeError, OSError, ValueError):  # not a file's
        return None
    return number


def _whereabouts(ctx: Context) -> str:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    place = f"rank {ctx.run.rank} of {ctx.run.world_size}  pid {os.getpid()} on {socket.gethostname()}"
    resumed = f"  resumed from step {ctx.checkpoint.step}" if ctx.checkpoint is not None else ""
    return f"{now}  run {ctx.run.name}  {place}{resumed}"
