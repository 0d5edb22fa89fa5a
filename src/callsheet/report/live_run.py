"""Provides the data of a run's page while the run is still running, and sends requests to the run."""

from __future__ import annotations

import json
import logging
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from callsheet.callbacks.support.listeners import listeners_in
from callsheet.callbacks.support.trigger_file import TRIGGER_WORDS, leave_request, withdraw_request
from callsheet.core.callback import one_of
from callsheet.errors import ConfigError, RequestRejected
from callsheet.report.lines import text_of
from callsheet.report.run_folder import ENDED, LOST, RUNNING, RunFolder, RunReader
from callsheet.report.run_page import Live, data, page

logger = logging.getLogger("callsheet")

_MAX_CORE_SHARE = 0.1  # the largest fraction of one core's time that reading may take
_MAX_TRIGGER_BYTES = 2**20
_PENDING_WARN_SECONDS = 30.0  # after this many seconds, the page says that a request is still pending


class ReadingBudget:
    """Delays reading so that it takes at most a tenth of one core's time, because training may need the core."""

    def __init__(self) -> None:
        self.not_before = 0.0

    @property
    def is_spent(self) -> bool:
        """Whether the run's files must not be read yet, because reading them has taken too much of the core's time."""
        return time.monotonic() < self.not_before

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Measure the processor time of a `with` block, and delay the next reading accordingly."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.not_before = max(self.not_before, time.monotonic()) + (time.thread_time() - began) / _MAX_CORE_SHARE


class LiveRun:
    """Provides the data of one run for a live page. The run's folder is read again when it has changed. Threads may share this object.

    `ask` writes a request to the trigger file of the job's `SaveOnTrigger`. If the run ends before it has read the request, the
    request is removed, so that a resumed run does not find it.

    Args:
        folder: the run's folder.
        budget: limits the time of reading; None: this run has its own.

    Raises:
        FileNotFoundError: there is no such folder.
    """

    def __init__(self, folder: Path, budget: ReadingBudget | None = None) -> None:
        self.folder = folder
        self.budget = budget or ReadingBudget()
        self._reader = RunReader(folder)
        self._lock = threading.Lock()
        # Requests that the run has not read yet: for each line, the trigger file that contains it, and when it was written.
        self._pending: dict[str, tuple[Path, float]] = {}
        self._run = self._reader.read()
        self._read_version = self._run.version
        self._body, self._body_version = b"", ""

    def news(self, since: str) -> bytes | None:
        """Return the current data as JSON, or None if the page is up to date. `since` is the version of the data that the page has."""
        with self._lock:
            disabled_reason = self._refresh()
            if self._run.version == since:
                return None
            if self._run.version != self._body_version:
                with self.budget.spend():
                    self._body = json.dumps({**data(self._run), "disabled_reason": disabled_reason}, allow_nan=False).encode()
                self._body_version = self._run.version
            return self._body

    def page(self, token: str, nonce: str) -> bytes:
        """Return the live page as HTML. The arguments are described in `Live`."""
        with self._lock:
            disabled_reason = self._refresh()
            return page(self._run, live=Live(token, disabled_reason=disabled_reason, nonce=nonce)).encode()

    def ask(self, act: str) -> str:
        """Send a request (`save`, `evaluate` or `stop`) to the running job, and return a message to show on the page.

        Raises:
            ConfigError: `act` is not one of these requests.
            RequestRejected: the run accepts no requests; the message says why.
            OSError: the request cannot be written.
        """
        one_of("act", act, TRIGGER_WORDS)
        with self._lock:
            if disabled_reason := self._refresh():
                raise RequestRejected(disabled_reason)
            trigger = trigger_of(self._run)
            line = leave_request(trigger, act, "asked for in the browser")
            self._pending[line] = (trigger, time.monotonic())
        logger.info("callsheet watch: requested %s", act)
        return f"{act}: requested through {trigger}; the run reads it at the end of a step"

    def content(self) -> tuple[RunFolder, bool]:
        """Read the folder if it has changed, however long that takes. Return its content, and whether the folder exists.

        The content is the same object until the folder is read again.
        """
        with self._lock:
            is_there = self._read_new()
            self._update_disabled_reason(is_there)
            return self._run, is_there

    def _refresh(self) -> str:
        """Read the folder's new content, unless `budget` says that reading must wait.

        Return why the run accepts no requests, or an empty string if it accepts them.
        """
        if self.budget.is_spent:
            is_there = self.folder.is_dir()
        else:
            with self.budget.spend():
                is_there = self._read_new()
        return self._update_disabled_reason(is_there)

    def _update_disabled_reason(self, is_there: bool) -> str:
        """Return why the run accepts no requests, or an empty string. If the reason has changed, also change the page's version.

        Remove requests that the run had not read when it ended.
        """
        disabled_reason = self._disabled_reason() if is_there else f"the folder {self.folder} is gone"
        self._run.version = f"{self._read_version}-{zlib.crc32(disabled_reason.encode()):x}"
        return disabled_reason

    def _read_new(self) -> bool:
        """Read the run's folder if it has changed. Return whether the folder exists."""
        if not self.folder.is_dir():
            return False
        if self._reader.version() != self._read_version:
            try:
                self._run = self._reader.read()
            except FileNotFoundError:  # the folder was renamed after the check
                return False
            self._read_version = self._run.version
        return True

    def _disabled_reason(self) -> str:
        if reason := why_not(self._run):
            self._withdraw()
            return reason
        self._pending = {line: written for line, written in self._pending.items() if line in _lines_of(written[0])}
        for trigger, since in self._pending.values():
            if time.monotonic() - since > _PENDING_WARN_SECONDS:
                return f"a request is still pending in {trigger}: the run reads that file at the end of a step, and has not done so yet"
        return ""

    def _withdraw(self) -> None:
        """Remove the requests that the run has not read, because the run has ended."""
        for line, (trigger, _) in self._pending.items():
            try:
                withdraw_request(trigger, line)
            except (OSError, ConfigError) as error:
                logger.warning(
                    "callsheet watch: the request %r may still be pending for the next run in %s: %s", line, self.folder, error
                )
        self._pending.clear()


def _lines_of(trigger: Path) -> list[str]:
    # After the run has read its requests, the file no longer exists, and `text_of` returns an empty text.
    return text_of(trigger.parent, trigger.name, at_most=_MAX_TRIGGER_BYTES).splitlines()


def why_not(run: RunFolder) -> str:
    """Return a sentence that says why the run accepts no requests; empty if it accepts them.

    The answer is derived from the content of the run's folder.
    """
    if run.outcome == LOST:
        return "the run has not written anything for a long time"
    if run.outcome != RUNNING:
        return "the run has ended" if run.outcome == ENDED else f"the run has ended: {run.outcome}"
    try:
        trigger_of(run)
    except ConfigError as error:
        return str(error)
    return ""


def trigger_of(run: RunFolder) -> Path:
    """Return the first file in the run's folder from which a `SaveOnTrigger` callback of the run reads requests.

    Raises:
        ConfigError: there is no such file in the run's folder. A file elsewhere is rejected, so that the content of a folder cannot
            make this process write to another place.
    """
    listeners = listeners_in(run.path)
    # Leave out callbacks that are not on the call sheet (the run's table of handlers): they belong to a killed job.
    if run.call_sheet:
        listeners = {name: file for name, file in listeners.items() if name in run.call_sheet}
    if not listeners:
        if "SaveOnTrigger" in run.call_sheet:
            raise ConfigError("the run's SaveOnTrigger does not listen: the run is about to begin, or to end")
        raise ConfigError(
            "the run has no SaveOnTrigger to read requests; add callsheet.callbacks.SaveOnTrigger() to its callbacks"
        )
    for file in listeners.values():
        path = run.path / file
        try:
            if path.name not in ("", "..") and path.parent.resolve() == run.path.resolve():
                return path
        except (OSError, ValueError, RuntimeError):  # the name has a zero byte, or links form a loop
            continue
    raise ConfigError(
        f"the run's SaveOnTrigger reads {next(iter(listeners.values()))!r}, outside its folder: write to it by hand"
    )
