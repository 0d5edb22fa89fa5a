"""Finds the folder of a run by its name."""

from __future__ import annotations

from pathlib import Path

from callsheet.errors import ConfigError, did_you_mean
from callsheet.report.index import is_run, run_names

RUNS = Path("runs")
"""The default folder of runs."""


def run_folder(run: str) -> Path:
    """Return the folder that `run` names: its path, or the run of that name in `runs/`.

    Raises:
        ConfigError: there is no such folder, or it has no run; the message names the closest one.
    """
    places = [Path(run)] if Path(run).name != run else [RUNS / run, Path(run)]
    for place in places:
        if is_run(place):
            return place
    if there := next((place for place in places if place.is_dir()), None):
        raise ConfigError(
            _one_inside(there)
            or f"{there} holds no run; the records of one are written by the logger JSONLLogger (add it to `loggers`, from callsheet.loggers)"
        )
    raise ConfigError(f"there is no run {run!r}{nearest(run)} (a run's folder, or its name in {RUNS}/)")


def nearest(run: str) -> str:
    """Return `; did you mean 'x'?` for the run in the same folder whose name is closest to that of `run`."""
    path = Path(run)
    beside = path.parent if path.name != run else RUNS
    return did_you_mean(path.name, run_names(beside))


def _one_inside(folder: Path) -> str:
    names = run_names(folder)
    return f"{folder} holds no run; there are runs in it, such as {folder / names[0]}" if names else ""
