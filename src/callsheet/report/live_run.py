"""A run while it goes on: what is new of it, and what may be asked of it."""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from pathlib import Path

from callsheet.callback import one_of
from callsheet.callbacks.listeners import listeners_in
from callsheet.callbacks.trigger_file import WORDS, leave_request, withdraw_request
from callsheet.errors import ConfigError, RequestRejected
from callsheet.report.lines import text_of
from callsheet.report.page import Live, data, page
from callsheet.report.run_folder import LOST, RUNNING, RunFolder, RunReader

logger = logging.getLogger("callsheet")

_SHARE = 0.1  # of a core
_LONGEST_WISHES = 2**20  # bytes
_WAITING_SECONDS = 30.0  # a wish that waits for longer is spoken of


class LiveRun:
    """A run's folder, read again when it has changed. Threads may share it.

    Reading is put off where it would take more than a tenth of a core: the job may need it. What `ask` asks for is left for the job's
    `SaveOnTrigger`, and taken back when the run ends without having seen it: a resume must not find it.

    Raises:
        FileNotFoundError: there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = RunReader(folder)
        self._lock = threading.Lock()
        self._wishes: dict[str, tuple[Path, float]] = {}  # the lines that were left and may still wait, where and since when
        self._run = self._reader.read()
        self._read_version = self._run.version
        self._body, self._body_version = b"", ""
        self._not_before = 0.0

    def news(self, since: str) -> bytes | None:
        """The page's data as JSON, or None where `since` is their version."""
        with self._lock:
            no_acts = self._look()
            if self._run.version == since:
                return None
            if self._run.version != self._body_version:
                began = time.monotonic()
                self._body = json.dumps({**data(self._run), "no_acts": no_acts}, allow_nan=False).encode()
                self._body_version = self._run.version
                self._put_off(began)
            return self._body

    def page(self, token: str, nonce: str) -> bytes:
        """The whole page; see `Live`."""
        with self._lock:
            no_acts = self._look()
            return page(self._run, live=Live(token, no_acts=no_acts, nonce=nonce)).encode()

    def ask(self, act: str) -> str:
        """Ask the job to `save`, `evaluate` or `stop`; returns what is to be told about it.

        Raises:
            ConfigError: no such act.
            RequestRejected: the run cannot be asked; the message says why.
            OSError: the wish cannot be written.
        """
        one_of("act", act, WORDS)
        with self._lock:
            if no_acts := self._look():
                raise RequestRejected(no_acts)
            trigger = trigger_of(self._run)
            line = leave_request(trigger, act, "asked for in the browser")
            self._wishes[line] = (trigger, time.monotonic())
        logger.info("callsheet watch: %s was asked for", act)
        return f"{act}: asked for in {trigger}; the run sees it at the end of a step"

    def _look(self) -> str:
        """Read what is new, if it is time to; why nothing can be asked, which is part of the version."""
        is_there = self.folder.is_dir()
        began = time.monotonic()
        if is_there and began >= self._not_before and self._reader.version() != self._read_version:
            try:
                self._run = self._reader.read()
                self._read_version = self._run.version
                self._put_off(began)
            except FileNotFoundError:  # renamed in this moment
                is_there = False
        no_acts = self._no_acts() if is_there else f"the folder {self.folder} is gone"
        self._run.version = f"{self._read_version}-{zlib.crc32(no_acts.encode()):x}"
        return no_acts

    def _put_off(self, began: float) -> None:
        now = time.monotonic()
        self._not_before = max(self._not_before, now) + (now - began) / _SHARE

    def _no_acts(self) -> str:
        if reason := why_not(self._run):
            self._withdraw()
            return reason
        self._wishes = {line: left for line, left in self._wishes.items() if line in _lines_of(left[0])}
        for trigger, since in self._wishes.values():
            if time.monotonic() - since > _WAITING_SECONDS:
                return f"what was asked for still waits in {trigger}: the run looks there at the end of a step, and has not yet"
        return ""

    def _withdraw(self) -> None:
        """The run has ended without having seen them."""
        for line, (trigger, _) in self._wishes.items():
            try:
                withdraw_request(trigger, line)
            except (OSError, ConfigError) as error:
                logger.warning("callsheet watch: %r may still wait for the next run in %s: %s", line, self.folder, error)
        self._wishes.clear()


def _lines_of(trigger: Path) -> list[str]:
    return text_of(trigger.parent, trigger.name, at_most=_LONGEST_WISHES).splitlines()  # none where they were taken


def why_not(run: RunFolder) -> str:
    """Why the run cannot be asked for anything, as a sentence; empty where it can, as far as its folder tells."""
    if run.outcome == LOST:
        return "the run has not written anything for a long time"
    if run.outcome != RUNNING:
        return f"the run has ended: {run.outcome}"
    try:
        trigger_of(run)
    except ConfigError as error:
        return str(error)
    return ""


def trigger_of(run: RunFolder) -> Path:
    """The file that the run's `SaveOnTrigger` looks at; of several the first whose file is in the run's folder.

    Raises:
        ConfigError: there is none, or it looks elsewhere. What stands in a folder may not have us write outside of it.
    """
    told = listeners_in(run.path)
    if run.call_sheet:  # one that is not in it is of an earlier job, which was killed
        told = {name: file for name, file in told.items() if name in run.call_sheet}
    if not told:
        if "SaveOnTrigger" in run.call_sheet:
            raise ConfigError("the run's SaveOnTrigger does not listen: the run is about to begin, or to end")
        raise ConfigError(
            "the run has no SaveOnTrigger, which would hear it; add callsheet.callbacks.SaveOnTrigger() to its callbacks"
        )
    for file in told.values():
        path = run.path / file
        try:
            if path.name not in ("", "..") and path.parent.resolve() == run.path.resolve():
                return path
        except (OSError, ValueError, RuntimeError):  # a zero byte, a loop of links
            continue
    raise ConfigError(f"the run's SaveOnTrigger looks at {next(iter(told.values()))!r}, outside its folder: write to it by hand")
