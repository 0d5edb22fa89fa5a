"""`callsheet watch`: show the page of a running run in the browser."""

from __future__ import annotations

import os
import sys
import threading
import time
import webbrowser
from pathlib import Path

from callsheet.cli.named_run import RUNS, nearest, run_folder
from callsheet.core import optional as extras
from callsheet.report.index import is_run
from callsheet.report.watch import WatchServer

_LOOK_SECONDS = 0.5


def watch(run: str, *, port: int = 0, opens_browser: bool = True) -> int:
    """Serve the page until Ctrl-C, and return the exit status. If the run does not exist yet, wait for it.

    Raises:
        ConfigError: the port is not available, or the folder is not that of a run.
        MissingPackage: plotly, which draws the page, is not installed.
    """
    extras.load("plotly", extra="report", wanted_by="callsheet watch")
    try:
        folder = _waited_for(run)
        with WatchServer(folder, port) as server:
            print(f"watching {folder}: {server.url}\nCtrl-C stops watching; the run continues", flush=True)
            if opens_browser and _has_screen():
                address = server.ticket_url()
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
            server.serve_forever()
    except KeyboardInterrupt:
        print("\nno longer watching", flush=True)
    return 0


def _waited_for(run: str) -> Path:
    """Wait until the folder has a run, and return it."""
    place = RUNS / run if Path(run).name == run and not is_run(Path(run)) else Path(run)
    if not is_run(place):
        if place.is_dir() and any(place.iterdir()):
            return run_folder(run)  # raises an error with a clear message
        print(f"there is no run in {place} yet{nearest(run)}\nwaiting for it; Ctrl-C ends this", flush=True)
    while not is_run(place):
        time.sleep(_LOOK_SECONDS)
    return place


def _has_screen() -> bool:
    """Return whether the user would see a browser that is opened here.

    Without a screen, a text browser would block the terminal.
    """
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) and "SSH_CONNECTION" not in os.environ
