"""An SQLite index of the runs in a folder, so that listing runs does not read all of them again.

The index is only a cache of the runs' folders. A run is read again when the size or time of one of its files has changed. An
index that is damaged, missing or of another version is built again. If the index cannot be written, it is kept in memory.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from callsheet.report.compare.settings import settings as settings_of
from callsheet.report.run_folder import RUNNING, RunFolder, RunReader
from callsheet.run.run_marker import MARKER

logger = logging.getLogger("callsheet")

INDEX = ".index.sqlite"
_SCHEMA_VERSION = 4
_APPLICATION_ID = 0x63737831  # the `application_id` in the SQLite file, by which callsheet recognizes its index files
_LOCK_TIMEOUT_SECONDS = 10.0  # how long to wait while another process writes the index
_RUN_FILES = (MARKER, "metrics.jsonl", "events.jsonl", "config.yaml", "call_sheet.txt", "checkpoints")
_DAMAGE_ERRORS = ("SQLITE_CORRUPT", "SQLITE_NOTADB")

_SCHEMA = f"""
DROP TABLE IF EXISTS runs;
DROP TABLE IF EXISTS metrics;
DROP TABLE IF EXISTS settings;
CREATE TABLE runs (
    name TEXT PRIMARY KEY, version TEXT, outcome TEXT, steps INTEGER, seconds REAL, started REAL, last_write REAL,
    device TEXT, world_size INTEGER, best_checkpoint TEXT, reason TEXT,
    tags TEXT, note TEXT, is_archived INTEGER
);
CREATE TABLE metrics (
    run TEXT, name TEXT, last REAL, last_step INTEGER, lowest REAL, lowest_step INTEGER, highest REAL, highest_step INTEGER,
    PRIMARY KEY (run, name)
) WITHOUT ROWID;
CREATE TABLE settings (
    run TEXT, name TEXT, value TEXT,
    PRIMARY KEY (run, name)
) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_SCHEMA_VERSION};
"""


@dataclass(slots=True)
class MetricRow:
    """One metric of a run: its last, lowest and highest value, each with its step. A missing value is NaN."""

    last: float = math.nan
    last_step: int = 0
    lowest: float = math.nan
    lowest_step: int = 0
    highest: float = math.nan
    highest_step: int = 0

    def add(self, value: float, step: int) -> None:
        """Add the next value of the metric. Values must be added in the order in which they were logged."""
        self.last, self.last_step = value, step
        if math.isfinite(value):
            if not self.lowest <= value:
                self.lowest, self.lowest_step = value, step
            if not self.highest >= value:
                self.highest, self.highest_step = value, step


@dataclass(frozen=True, slots=True)
class RunRow:
    """The entry of one run in the index.

    `name` is the name of the run's folder, and `seconds` is the time of training. `started` and `last_write` are in seconds since
    1970, and NaN if unknown. `reason` says why the run ended. `best_checkpoint` is the path of the last checkpoint that was the
    best so far, or empty. `tags` are separated by spaces. `settings` are those of the run's configuration, as text by dotted name.
    """

    name: str
    outcome: str
    steps: int
    seconds: float
    started: float
    last_write: float
    device: str
    world_size: int
    best_checkpoint: str
    reason: str = ""
    tags: str = ""
    note: str = ""
    is_archived: bool = False
    metrics: dict[str, MetricRow] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs in a folder, the newest first. If the index could not be stored, `note` says why; otherwise `note` is empty."""

    rows: list[RunRow]
    note: str = ""


def is_run(folder: Path) -> bool:
    """Return whether the folder contains files that only a run writes."""
    return any((folder / mark).exists() for mark in _RUN_FILES)


def run_names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names of the runs in `folder`, or an empty list if the folder cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and _is_text(entry.name) and entry.is_dir() and is_run(Path(entry))
            )
    except OSError:
        return []


def _is_text(name: str) -> bool:
    """Return whether a folder's name is valid Unicode. If it is not, log a warning, because SQLite cannot store it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        logger.warning("the folder %r is left out, because its name is not valid UTF-8; rename it", name)
        return False
    return True


def runs_in(
    folder: str | os.PathLike[str], *, metrics: Iterable[str] | None = None, settings: Iterable[str] | None = None
) -> Runs:
    """Return all runs in `folder`. `metrics` and `settings` are the names of the values to read for each run; None means all.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    wanted = _Wanted(*(None if names is None else sorted(set(names)) for names in (metrics, settings)))
    try:
        try:
            return Runs(_read_with_index(path, wanted))
        except sqlite3.DatabaseError as error:
            if not isinstance(error, _Damaged) and not getattr(error, "sqlite_errorname", "").startswith(_DAMAGE_ERRORS):
                raise
            logger.debug("%s is damaged (%s); it is rebuilt", path / INDEX, error)
            _remove(path / INDEX)
            return Runs(_read_with_index(path, wanted))
    except (sqlite3.Error, OSError) as error:
        note = f"no index is kept in {path}: {error}"
        try:
            with closing(_in_memory(path / INDEX)) as index:
                return Runs(_refresh_index(index, path, wanted), note)
        except sqlite3.DatabaseError as damage:
            logger.debug("%s is damaged (%s); all runs are read again", path / INDEX, damage)
            with closing(_empty_in_memory()) as index:
                return Runs(_refresh_index(index, path, wanted), note)


class _Wanted(NamedTuple):
    """The names of the metrics and settings to read from the index; None means all of them."""

    metrics: list[str] | None
    settings: list[str] | None


def _read_with_index(folder: Path, wanted: _Wanted) -> list[RunRow]:
    with closing(_open_index(folder / INDEX)) as index:
        return _refresh_index(index, folder, wanted)


def _refresh_index(index: sqlite3.Connection, folder: Path, wanted: _Wanted) -> list[RunRow]:
    """Read the runs that have changed, write them to the index, and return the index's rows of all runs."""
    known = {name: (version, outcome) for name, version, outcome in index.execute("SELECT name, version, outcome FROM runs")}
    names = set(run_names(folder))
    changed: list[tuple[str, RunRow]] = []
    for name in sorted(names):
        reader = RunReader(folder / name)
        # Get the version before reading. If the run writes during the reading, this version is outdated, so the next call reads again.
        version = reader.version()
        # If a run was running, read it again even if it has written nothing, because its process may have died.
        if name not in known or known[name][0] != version or known[name][1] == RUNNING:
            try:
                changed.append((version, _row(name, reader.read())))
            except FileNotFoundError:  # the run was deleted after it was listed
                names.discard(name)
    gone = known.keys() - names
    if changed or gone:
        index.execute("BEGIN IMMEDIATE")
        for name in {*gone, *(row.name for _, row in changed)}:
            index.execute("DELETE FROM runs WHERE name = ?", (name,))
            index.execute("DELETE FROM metrics WHERE run = ?", (name,))
            index.execute("DELETE FROM settings WHERE run = ?", (name,))
        for version, row in changed:
            _insert(index, row, version)
        index.execute("COMMIT")
    return list(_rows(index, wanted))


def _row(name: str, run: RunFolder) -> RunRow:
    metrics: dict[str, MetricRow] = {}
    for record in run.records:
        for metric, value in record.values.items():
            if (known := metrics.get(metric)) is None:
                known = metrics[metric] = MetricRow()
            known.add(value, record.step)
    start = run.start_event()
    size = start.get("world_size")
    best = [str(saved.get("path", "")) for saved in run.checkpoints if saved.get("kind") == "best" and not saved.get("is_undone")]
    described = settings_of(run)
    return RunRow(
        name=name,
        outcome=run.outcome,
        steps=run.last_step,
        seconds=run.seconds,
        started=run.started,
        last_write=run.last_write,
        device=str(start.get("device") or ""),
        world_size=size if isinstance(size, int) and size > 0 else 1,
        best_checkpoint=best[-1] if best else "",
        reason=run.reason,
        tags=" ".join(run.notes.tags),
        note=run.notes.note,
        is_archived=run.notes.is_archived,
        metrics=metrics,
        settings=described["settings"] | described["callbacks"],
    )


# --- access to the SQLite file ---

_RUN_COLUMNS = tuple(each.name for each in fields(RunRow) if each.name not in ("metrics", "settings"))
_METRIC_COLUMNS = tuple(each.name for each in fields(MetricRow))


def _insert(index: sqlite3.Connection, row: RunRow, version: str) -> None:
    marks = ", ".join("?" * (len(_RUN_COLUMNS) + 1))
    values = [_storable(getattr(row, column)) for column in _RUN_COLUMNS]
    index.execute(f"INSERT INTO runs ({', '.join(_RUN_COLUMNS)}, version) VALUES ({marks})", (*values, version))
    index.executemany(
        f"INSERT INTO metrics (run, name, {', '.join(_METRIC_COLUMNS)}) VALUES ({', '.join('?' * (len(_METRIC_COLUMNS) + 2))})",
        ((row.name, _storable(name), *(_storable(getattr(metric, column)) for column in _METRIC_COLUMNS)) for name, metric in row.metrics.items()),
    )  # fmt: skip
    index.executemany(
        "INSERT OR IGNORE INTO settings (run, name, value) VALUES (?, ?, ?)",
        ((row.name, _storable(name), _storable(value)) for name, value in row.settings.items()),
    )


def _storable(value: object) -> object:
    """Return `value` in a form that SQLite can store.

    SQLite stores NaN as NULL. It rejects text with lone surrogates, and integers of more than 64 bits.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return 0
    return value


def _rows(index: sqlite3.Connection, wanted: _Wanted) -> Iterator[RunRow]:
    metrics: dict[str, dict[str, MetricRow]] = {}
    for run, name, *values in _select_rows(index, "metrics", _METRIC_COLUMNS, wanted.metrics):
        metrics.setdefault(run, {})[name] = MetricRow(**_values_by_column(_METRIC_COLUMNS, values))
    found_settings: dict[str, dict[str, str]] = {}
    for run, name, value in _select_rows(index, "settings", ("value",), wanted.settings):
        found_settings.setdefault(run, {})[name] = value
    for found in index.execute(f"SELECT {', '.join(_RUN_COLUMNS)} FROM runs ORDER BY started DESC, name"):
        row = _values_by_column(_RUN_COLUMNS, found)
        row["is_archived"] = bool(row["is_archived"])
        yield RunRow(**row, metrics=metrics.get(row["name"], {}), settings=found_settings.get(row["name"], {}))


def _select_rows(index: sqlite3.Connection, table: str, columns: Iterable[str], wanted: list[str] | None) -> sqlite3.Cursor:
    where = "" if wanted is None else f"WHERE name IN ({', '.join('?' * len(wanted))})"
    return index.execute(f"SELECT run, name, {', '.join(columns)} FROM {table} {where} ORDER BY name", wanted or ())


def _values_by_column(columns: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
    return {column: math.nan if value is None else value for column, value in zip(columns, values, strict=True)}


def _open_index(path: Path) -> sqlite3.Connection:
    """Open the index file and create its tables if needed. Raise sqlite3.Error or OSError if that is impossible."""
    _check_plain_files(path)
    index = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_SECONDS, isolation_level=None)
    index.text_factory = _text
    try:
        # Begin a write transaction: it fails at once if the file is not writable, and only one process can create the tables.
        index.execute("BEGIN IMMEDIATE")
        application, version, tables = (
            index.execute(question).fetchone()[0]
            for question in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
        if application != _APPLICATION_ID and (application or tables):
            raise sqlite3.DatabaseError(f"{path} is the database of another program")
        if (application, version) != (_APPLICATION_ID, _SCHEMA_VERSION):
            for statement in filter(str.strip, _SCHEMA.split(";")):
                index.execute(statement)
        elif not _has_tables(index):
            raise _Damaged(f"{path} is an index, but does not have its tables")
        index.execute("COMMIT")
    except BaseException:
        index.close()
        raise
    return index


class _Damaged(sqlite3.DatabaseError):
    """Raised if an index file of this version has other tables than expected, or text that is not UTF-8."""


def _has_tables(index: sqlite3.Connection) -> bool:
    with closing(sqlite3.connect(":memory:")) as right:
        right.executescript(_SCHEMA)
        question = "SELECT type, name, sql FROM sqlite_master ORDER BY type, name"
        found: bool = index.execute(question).fetchall() == right.execute(question).fetchall()
        return found


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise _Damaged(f"the index holds text that is not UTF-8: {error}") from None


def _check_plain_files(path: Path) -> None:
    """Raise OSError if a file that SQLite would open is not a regular file. Opening a named pipe or a device may block forever."""
    for file in (path, *(path.with_name(path.name + end) for end in ("-journal", "-wal", "-shm"))):
        try:
            mode = os.lstat(file).st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):
            raise OSError(f"{file} is {'a link' if stat.S_ISLNK(mode) else 'not a regular file'}; remove it")


def _in_memory(path: Path) -> sqlite3.Connection:
    """Return an index in memory, with the rows of the index file if this file can be read."""
    index = sqlite3.connect(":memory:", isolation_level=None)
    index.text_factory = _text
    try:
        _check_plain_files(path)
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)) as file:
            marks = [file.execute(f"PRAGMA {pragma}").fetchone()[0] for pragma in ("application_id", "user_version")]
            if marks == [_APPLICATION_ID, _SCHEMA_VERSION] and _has_tables(file):
                file.backup(index)
                return index
    except (sqlite3.Error, OSError) as error:
        logger.debug("%s cannot be read either (%s); all runs are read again", path, error)
    index.close()
    return _empty_in_memory()


def _empty_in_memory() -> sqlite3.Connection:
    index = sqlite3.connect(":memory:", isolation_level=None)
    index.executescript(_SCHEMA)
    return index


def _remove(path: Path) -> None:
    """Delete a damaged index file. Delete its journal first, because SQLite would apply the journal to a new index file."""
    for file in (path.with_name(f"{path.name}-journal"), path):
        file.unlink(missing_ok=True)
