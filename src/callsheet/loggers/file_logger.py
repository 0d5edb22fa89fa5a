"""Copies the process's output to a file in the run's folder."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from callsheet.core.callback import at, one_of
from callsheet.core.context import Context
from callsheet.core.run_state import RunInfo
from callsheet.errors import ConfigError
from callsheet.loggers.logger import Logger
from callsheet.loggers.support.descriptor_capture import DESCRIPTORS, DescriptorCapture
from callsheet.loggers.support.file_names import folder_of
from callsheet.loggers.support.output_log import OutputLog
from callsheet.loggers.support.stream_tee import StreamTee

Capture = Literal["python", "fd"]
CAPTURES: tuple[Capture, ...] = get_args(Capture)

_MAX_EARLY_PIECES = 10_000  # the maximum number of pieces of output to keep in memory before the run may write to its folder
_written: set[Path | None] = set()


class FileLogger(Logger):
    """Write a copy of each rank's output to `logs/rank-<rank>.log` in the run's folder. The output still appears in its usual place.

    The copy has everything that goes through `sys.stdout` and `sys.stderr`: `print`, warnings, `logging` handlers that write to
    these streams, and progress bars. It also has the traceback of an exception that ends the run. Every start of the run adds a
    line with the run, the process and, after a resume, the step. Lines are written when they are complete. If a line is
    rewritten, as by a progress bar, only its last state is written, without colors. Output during the run's set-up is included
    unless the set-up fails. When the run ends, the streams are restored.

    `capture="fd"` copies everything that is written to the file descriptors 1 and 2, also by C libraries, data-loading workers
    and other children. It starts a second process for each rank, through which all output passes; if that process is killed,
    printing fails. Standard output is then not a terminal, so a progress bar prints lines instead. If the logger has a `name`, it
    writes to `<name>/logs/rank-<rank>.log`.

    Args:
        capture: `python` or `fd`.
        max_bytes: a file that would become larger is renamed to `rank-<rank>.log.1`, replacing an older one; None means no limit.

    Raises:
        ConfigError: an argument is invalid, or the run has no folder.
    """

    writes_to_run_folder = True
    ranks = "all"

    def __init__(self, *, capture: Capture = "python", max_bytes: int | None = 100_000_000) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"max_bytes={max_bytes}: give more than 0, or None for no limit")
        self._capture = one_of("capture", capture, CAPTURES)
        self._max_bytes = max_bytes
        self._log: OutputLog | DescriptorCapture | None = None  # the open log; None until the run may write to its folder
        self._path: Path | None = None
        self._run: RunInfo | None = None  # the current run; None while no log file is open
        self._early: deque[tuple[str, str]] = deque(maxlen=_MAX_EARLY_PIECES)
        self._tees: list[StreamTee] = []

    @at("change")  # run in the first phase, so that what other callbacks print is captured
    def on_run_start(self, ctx: Context) -> None:
        """Start to capture output in memory, because the run may not write to its folder before `on_checkpoint_load_end`."""
        self._end()
        self._capture_streams(list(DESCRIPTORS))

    @at("change")
    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Open the log file, and write the output that was captured so far."""
        try:
            log = self._open_log(folder_of(self, ctx) / "logs" / f"rank-{ctx.run.rank}.log")
        except BaseException:
            self._end()
            raise
        log.write(f"--- {_header(ctx)} ---\n")
        self._log, self._run = log, ctx.run
        while self._early:
            log.write(*self._early.popleft())

    def on_log(self, ctx: Context) -> None:
        """Raise OSError if writing to the log file has failed since the last metrics record."""
        self._drop_if_lost()
        if self._log is not None and (failure := self._log.failure()) is not None:
            failure.add_note("output printed until this is resolved is missing from the log")
            raise failure

    def on_exception(self, ctx: Context) -> None:
        """Write the exception's traceback to the log, because Python prints it only after the log is closed."""
        self._drop_if_lost()
        if self._log is not None:
            self._log.write("".join(traceback.format_exception(ctx.exception)))

    @at("restore")  # run in the last phase, so that the file contains what other callbacks print
    def on_run_end(self, ctx: Context) -> None:
        self._end()

    def _take(self, text: str, stream: str) -> None:
        self._drop_if_lost()
        if self._log is not None:
            self._log.write(text, stream)
        else:
            self._early.append((text, stream))

    def _open_log(self, path: Path) -> OutputLog | DescriptorCapture:
        if path in _written:
            raise ConfigError(f"{path} is already written by another FileLogger; give this one its own name: logger.name = '...'")
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._capture == "fd":
            self._release_streams()
            log: OutputLog | DescriptorCapture = DescriptorCapture(path, self._max_bytes)
            self._capture_streams([name for name, number in DESCRIPTORS.items() if _descriptor_of(getattr(sys, name)) != number])
        else:
            log = OutputLog(path, self._max_bytes)
            if not self._tees:  # not capturing yet, because `on_run_start` was not fired
                self._capture_streams(list(DESCRIPTORS))
        _written.add(path)
        self._path = path
        return log

    def _capture_streams(self, names: list[str]) -> None:
        self._tees = [StreamTee(name, self._take) for name in names if getattr(sys, name) is not None]

    def _release_streams(self) -> None:
        tees, self._tees = self._tees, []
        for tee in reversed(tees):
            tee.close_tee()

    def _drop_if_lost(self) -> None:
        """Stop writing to the log file if another process has taken over the run's folder."""
        if self._log is not None and self._run is not None and self._run.has_lost_folder:
            self._log.drop()

    def _end(self) -> None:
        self._drop_if_lost()
        self._run = None
        self._release_streams()
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
    except (AttributeError, OSError, ValueError):  # the stream has no file descriptor
        return None
    return number


def _header(ctx: Context) -> str:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    place = f"rank {ctx.run.rank} of {ctx.run.world_size}  pid {os.getpid()} on {socket.gethostname()}"
    resumed = f"  resumed from step {ctx.checkpoint.step}" if ctx.checkpoint is not None else ""
    return f"{now}  run {ctx.run.name}  {place}{resumed}"
