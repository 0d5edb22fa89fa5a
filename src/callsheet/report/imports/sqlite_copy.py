"""Reads other tools' SQLite databases from a copy, because SQLite may write files next to a database even when it only reads it."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import lru_cache
from pathlib import Path

from callsheet.errors import ConfigError
from callsheet.report.imports.source import Source

_DATABASE_SUFFIXES = {".db", ".sqlite", ".sqlite3"}
_MAX_VALUE_BYTES = 64 * 2**20  # the maximum size of a text or blob in the database, in bytes
_MAGIC = b"SQLite format 3\x00"


def databases(source: Source, columns: Mapping[str, set[str]]) -> list[Path]:
    """Return the source's SQLite databases that have all tables and columns in `columns`."""
    candidates = [path for path in source.files if path == source.path or path.suffix in _DATABASE_SUFFIXES]
    found = []
    for path in candidates:
        there = tables(path)
        if all(wanted <= there.get(name, frozenset()) for name, wanted in columns.items()):
            found.append(path)
    return found


def tables(path: Path) -> dict[str, frozenset[str]]:
    """Return the column names of each table; an empty dict if the file is not a readable SQLite database."""
    try:
        files = [path, *_journals(path)]
        return _tables(path, tuple((file.stat().st_size, file.stat().st_mtime_ns) for file in files))
    except OSError:
        return {}


@lru_cache(maxsize=64)  # the readers of several tools ask about the same database, so the answer is cached
def _tables(path: Path, _version: tuple[tuple[int, int], ...]) -> dict[str, frozenset[str]]:
    try:
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return {}
        with copy_database(path) as database:
            names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return {
                name: frozenset(column for (column,) in database.execute("SELECT name FROM pragma_table_info(?)", (name,)))
                for name in names
            }
    except (OSError, sqlite3.Error, ConfigError):
        return {}


@contextmanager
def copy_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Provide, for a `with` block, a connection to a temporary copy of the database. Changes in its journal are included.

    Raises:
        ConfigError: the file is not a database that can be read.
    """
    with tempfile.TemporaryDirectory(prefix="callsheet-import-") as folder:
        copy = Path(folder, "copy.db")
        try:
            shutil.copyfile(path, copy)
            for journal in _journals(path):
                shutil.copyfile(journal, copy.with_name(copy.name + journal.name.removeprefix(path.name)))
            with closing(sqlite3.connect(copy)) as database:
                database.text_factory = lambda content: content.decode("utf-8", "replace")
                database.execute("PRAGMA trusted_schema = OFF")
                database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
                yield database
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"the database {path} cannot be read: {error}") from error


def _journals(path: Path) -> list[Path]:
    """Return SQLite's journal files, which hold changes that are not in the database file yet."""
    return [beside for end in ("-wal", "-journal") if (beside := path.with_name(path.name + end)).is_file()]
