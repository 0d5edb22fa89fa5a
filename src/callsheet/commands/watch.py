"""`callsheet watch`: the page of a run in the browser, while the run goes on."""

from __future__ import annotations

import os
import sys
import threading
import time
import webbrowser
from pathlib import Path

from callsheet import extras
from callsheet.commands.named_run import RUNS, nearest, run_folder
from callsheet.report.index import is_run
from callsheet.report.watch import WatchServer

_LOOK_SECONDS = 0.5


def watch(run: str, *, port: int = 0, opens_browser: bool = True) -> int:
    """Serve the page until Ctrl-C; a run that is not there yet is waited for. Returns the exit status.

    Raises:
        ConfigError: the port cannot be had, or the folder is one of something else.
        MissingPackage: plotly, which draws the page, is not installed.
    """
    extras.load("plotly", extra="report", wanted_by="callsheet watch")
    try:
        folder = _waited_for(run)
        with WatchServer(folder, port) as server:
            print(f"watching {folder}: {server.url}\nCtrl-C ends this; the run goes on by itself", flush=True)
            if opens_browser and _has_screen():
                address = server.ticket_url()
                threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()  # some return when they are closed
            server.serve_forever()
    except KeyboardInterrupt:
        print("\nno longer watching", flush=True)
    return 0


def _waited_for(run: str) -> Path:
    """The run's folder, as soon as there is a run in it."""
    place = RUNS / run if Path(run).name == run and not is_run(Path(run)) else Path(run)
    if not is_run(place):
        if place.is_dir() and any(place.iterdir()):
            return run_folder(run)  # which says what is wrong with it
        print(f"there is no run in {place} yet{nearest(run)}\nwaiting for it; Ctrl-C ends this", flush=True)
    while not is_run(place):
        time.sleep(_LOOK_SECONDS)
    return place


def _has_screen() -> bool:
    """Whether a browser that is opened here is seen by whoever called this; a text browser would take the terminal."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) and "SSH_CONNECTION" not in os.environ
