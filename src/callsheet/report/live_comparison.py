"""Provides the data of a page that compares several runs, of which some may still be running."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from callsheet.errors import ConfigError
from callsheet.report.compare.comparison import Comparison
from callsheet.report.compare.page import data, live_comparison_page
from callsheet.report.live_run import LiveRun, ReadingBudget
from callsheet.report.run_folder import RunFolder
from callsheet.report.run_page import Live


class LiveComparison:
    """Provides the data of several runs for a live page that compares them. Threads may share this object.

    A run's folder is read when it has changed. All runs share one `ReadingBudget`. A run keeps its number, which is its place in
    `runs`: new runs are added at the end, and a run whose folder is gone stays, with what was read before. `notice` says why the
    runs cannot be grouped yet; it is empty if they can.

    Args:
        folders: the folders of the runs, the baseline first; at least one.
        group_by: as in `Comparison`. Until a run has the setting, each run is a group.
        find_new: returns the folders of runs that began since the last call.
        looks_for: the patterns and folders in which `find_new` looks. The page shows them.

    Raises:
        FileNotFoundError: one of the folders is gone.
    """

    def __init__(
        self,
        folders: Iterable[Path],
        *,
        group_by: str | None = None,
        find_new: Callable[[], Iterable[Path]] = list,
        looks_for: Sequence[str] = (),
    ) -> None:
        self.budget = ReadingBudget()
        self.runs = [LiveRun(folder, self.budget) for folder in folders]
        self.notice = ""
        self._group_by = group_by
        self._find_new, self._looks_for = find_new, list(looks_for)
        self._lock = threading.Lock()
        self._state: list[tuple[int, bool]] = []
        self._comparison: Comparison | None = None
        self._content: dict[str, Any] = {}
        self._body = b""
        self._number = 0  # the version number of `_content`
        self._read()

    def news(self, since: str) -> bytes | None:
        """Return the page's current data as JSON, or None if they have not changed since the version that the page has (`since`)."""
        with self._lock:
            self._refresh()
            if self._content["version"] == since:
                return None
            if not self._body:
                with self.budget.spend():
                    self._body = json.dumps(self._content, allow_nan=False).encode()
            return self._body

    def page(self, token: str, nonce: str) -> bytes:
        """Return the live page as HTML. The arguments are described in `Live`."""
        with self._lock:
            self._refresh()
            content = self._content
        return live_comparison_page(content, Live(token, nonce=nonce)).encode()

    def _refresh(self) -> None:
        if not self.budget.is_spent:
            with self.budget.spend():
                self._read()

    def _read(self) -> None:
        """Read all runs that have changed, and compare the runs again if any has changed."""
        known = {run.folder for run in self.runs}
        for folder in self._find_new():
            if folder in known:
                continue
            with suppress(FileNotFoundError):  # the folder may have been deleted since it was found
                self.runs.append(LiveRun(folder, self.budget))
        found = [run.content() for run in self.runs]
        # If a run has changed, `content` returns a new object. Its id is new too, because `self._comparison` keeps the old object.
        state = [(id(run), is_there) for run, is_there in found]
        if state != self._state:
            self._state = state
            self._compare([run for run, _ in found], [is_there for _, is_there in found])

    def _compare(self, runs: Sequence[RunFolder], are_there: Sequence[bool]) -> None:
        try:
            self._comparison = Comparison(runs, group_by=self._group_by, before=self._comparison)
            self.notice = ""
        except ConfigError as error:  # no run has recorded yet the setting by which to group, so do not group the runs
            self._comparison = Comparison(runs, before=self._comparison)
            self.notice = f"{error}; the runs are not grouped"
        self._number += 1
        self._content = {
            **data(self._comparison),
            "version": str(self._number),
            "are_there": list(are_there),
            "looks_for": self._looks_for,
            "notice": self.notice,
        }
        self._body = b""
