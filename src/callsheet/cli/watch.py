"""`callsheet watch`: show the live page of one run, or of several runs, in the browser."""

from __future__ import annotations

import glob
import os
import sys
import threading
import time
import webbrowser
from collections.abc import Iterable, Sequence
from pathlib import Path

from callsheet.cli.compare import choose_runs
from callsheet.cli.named_run import nearest, run_folder
from callsheet.core import optional as extras
from callsheet.core.working import working
from callsheet.errors import ConfigError
from callsheet.report.index import is_run, run_names
from callsheet.report.live_comparison import LiveComparison
from callsheet.report.live_run import LiveRun
from callsheet.report.watch import WatchServer

_LOOK_SECONDS = 0.5


def watch(
    given: Sequence[str],
    *,
    folder: str = "runs",
    last: int | None = None,
    group_by: str | None = None,
    port: int = 0,
    opens_browser: bool = True,
) -> int:
    """Serve the live page of runs until Ctrl-C, and return the exit status. If no run exists yet, wait for one.

    Serve the page of one run if `given` is the name or the folder of one, and otherwise the page that compares several.

    Raises:
        ConfigError: the port is not available, a folder is not that of a run, or no run is chosen.
        MissingPackage: plotly, which draws the page, is not installed.
    """
    extras.load("plotly", extra="report", wanted_by="callsheet watch")
    is_single = len(given) == 1 and last is None and group_by is None and not _holds_runs(given[0], Path(folder))
    try:
        watched: LiveRun | LiveComparison
        if is_single:
            watched = LiveRun(_wait_for_folder(given[0], Path(folder)))
            what, rest = str(watched.folder), "the run continues"
        else:
            watched = _comparison(given, Path(folder), last, group_by)
            what, rest = f"{len(watched.runs)} run{'s' if len(watched.runs) != 1 else ''}", "the runs continue"
        with WatchServer(watched, port) as server:
            print(f"watching {what}: {server.url}\nCtrl-C stops watching; {rest}", flush=True)
            if opens_browser and _has_screen():
                address = server.ticket_url()
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
            server.serve_forever()
    except KeyboardInterrupt:
        print("\nno longer watching", flush=True)
    return 0


def _wait_for_folder(run: str, folder: Path) -> Path:
    """Wait until the run's folder exists, and return the folder's path."""
    place = folder / run if Path(run).name == run and not is_run(Path(run)) else Path(run)
    if not is_run(place):
        if place.is_dir() and any(place.iterdir()):
            return run_folder(str(place))  # for a place that is not a run's folder, `run_folder` raises an error that says so
        print(f"there is no run in {place} yet{nearest(run, folder)}\nwaiting for it; Ctrl-C ends this", flush=True)
    while not is_run(place):
        time.sleep(_LOOK_SECONDS)
    return place


def _comparison(given: Sequence[str], folder: Path, last: int | None, group_by: str | None) -> LiveComparison:
    """Wait until at least one of the given runs exists, and return a comparison of all given runs that exist."""
    if not given and last is None:
        raise ConfigError("give a run, several runs, a pattern such as 'lr-*', or --last 5")
    there = _naming_existing_runs(given, folder)
    for word in given:
        if word not in there:
            print(f"there is no run {word!r} yet{nearest(word, folder)}\nit is added when it begins", flush=True)
    while given and not there:
        time.sleep(_LOOK_SECONDS)
        there = _naming_existing_runs(given, folder)
    new = NewRuns(given or [str(folder)], folder)
    shown = choose_runs(there, folder=folder, last=last, least=1)
    with working(f"reading {len(shown)} runs", is_shown=sys.stderr.isatty()):
        watched = LiveComparison(shown, group_by=group_by, find_new=new.find, looks_for=new.looks_for)
    if watched.notice:
        print(watched.notice, flush=True)
    return watched


class NewRuns:
    """Finds runs that have begun since this object was made, among the runs, folders and patterns in `words`."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._folder = folder
        known = _naming_existing_runs(words, folder)
        self.looks_for = [word for word in words if word not in known or _holds_runs(word, folder)]
        self._seen: set[Path] = set()
        self.find()

    def find(self) -> list[Path]:
        """Return the folders of the runs that have begun since the last call."""
        found = [each for each in _runs_of(self.looks_for, self._folder) if each not in self._seen]
        self._seen.update(found)
        return found


def _holds_runs(word: str, folder: Path) -> bool:
    """Return whether an argument is a pattern or a folder of runs, and so can name several runs."""
    is_name = Path(word).name == word and is_run(folder / word)
    return glob.has_magic(word) or (not is_name and not is_run(Path(word)) and bool(run_names(word)))


def _naming_existing_runs(words: Iterable[str], folder: Path) -> list[str]:
    """Return the arguments that name at least one existing run."""
    return [word for word in words if _runs_of([word], folder)]


def _runs_of(words: Iterable[str], folder: Path) -> list[Path]:
    """Return the folders of all existing runs that the arguments name."""
    found: list[Path] = []
    for word in words:
        try:
            found += choose_runs([word], folder=folder, last=None, least=1)
        except ConfigError:  # there is no run of this name yet
            continue
    return found


def _has_screen() -> bool:
    """Return whether a browser that this process opens would appear on the user's screen.

    Without a screen, a text browser could be opened instead, which would block the terminal.
    """
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) and "SSH_CONNECTION" not in os.environ
