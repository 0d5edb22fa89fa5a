"""Finds the folders of runs by their names."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from callsheet.errors import ConfigError, did_you_mean
from callsheet.report.index import is_run, run_names
from callsheet.report.notes import read_notes

RUNS_FOLDER = Path("runs")
"""The default folder of runs."""


def run_folder(run: str, folder: Path = RUNS_FOLDER) -> Path:
    """Return the folder of the run that `run` names: a path, or the name of a run in `folder`.

    Raises:
        ConfigError: there is no such folder (the message suggests a similar name), or the folder is not that of a run.
    """
    places = [Path(run)] if Path(run).name != run else [folder / run, Path(run)]
    for place in places:
        if is_run(place):
            return place
    if there := next((place for place in places if place.is_dir()), None):
        raise ConfigError(
            _one_inside(there)
            or f"{there} holds no run; the records of one are written by the logger JSONLLogger (add it to `loggers`, from callsheet.loggers)"
        )
    raise ConfigError(f"there is no run {run!r}{nearest(run, folder)} (a run's folder, or its name in {folder}/)")


def runs_named(word: str, folder: Path, *, with_archived: bool = False) -> Iterator[Path]:
    """Yield the folders of the runs that `word` names. `word` is the name of a run in `folder`, a path, a folder of runs, or a pattern.

    If `word` is a folder of runs or a pattern, archived runs are yielded only if `with_archived` is True.

    Raises:
        ConfigError: there is no such run.
    """
    if glob.has_magic(word):
        patterns = [word] if Path(word).name != word else [str(folder / word)]
        matched = [Path(path) for pattern in patterns for path in sorted(glob.glob(pattern)) if is_run(Path(path))]
        if not matched:
            raise ConfigError(f"no run matches {word!r}{nearest(word, folder)}")
    elif Path(word).name == word and is_run(folder / word):
        yield folder / word
        return
    elif not is_run(Path(word)) and (inside := run_names(word)):
        matched = [Path(word) / name for name in inside]
    else:
        yield run_folder(word, folder)
        return
    listed = [path for path in matched if with_archived or not read_notes(path).is_archived]
    if not listed:
        raise ConfigError(f"all runs of {word!r} are archived; name one, or run callsheet mark {word!r} --unarchive")
    yield from listed


def nearest(run: str, folder: Path = RUNS_FOLDER) -> str:
    """Return a hint such as `; did you mean 'x'?` with the existing run whose name is closest to `run`, or an empty text."""
    path = Path(run)
    beside = path.parent if path.name != run else folder
    return did_you_mean(path.name, run_names(beside))


def _one_inside(folder: Path) -> str:
    names = run_names(folder)
    return f"{folder} holds no run; there are runs in it, such as {folder / names[0]}" if names else ""
