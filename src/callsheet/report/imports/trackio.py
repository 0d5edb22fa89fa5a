"""Reads Trackio's SQLite databases. Each Trackio project has one database."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from callsheet.report.imports.imported_run import ImportedRun
from callsheet.report.imports.source import Source
from callsheet.report.imports.sqlite_copy import copy_database, databases, tables

LOOKS_FOR = "an SQLite file with Trackio's tables"

_TABLE_COLUMNS = {"metrics": {"id", "run_name", "timestamp", "step", "metrics"}, "configs": {"run_name", "config"}}


def find(source: Source) -> list[Path]:
    """Return Trackio's databases below the source."""
    return databases(source, _TABLE_COLUMNS)


def read(source: Source) -> Iterator[ImportedRun]:
    """Yield the runs of all Trackio projects, in the order in which they began to log.

    Raises:
        ConfigError: a database cannot be read.
    """
    for path in find(source):
        there = tables(path)
        with copy_database(path) as database:
            key = "run_id" if "run_id" in there["metrics"] else "run_name"  # before Trackio 0.24, runs had no ids
            runs = database.execute(f"SELECT {key}, max(run_name) FROM metrics GROUP BY {key} ORDER BY min(id)").fetchall()
            for run_key, name in runs:
                identity = str(run_key) if key == "run_id" else f"{path}/{run_key}"
                run = ImportedRun(str(name), identity, reason="Trackio does not record how a run ended")
                try:
                    _add_config(run, database, key if key in there["configs"] else "run_name", run_key)
                    _add_metrics(run, database, key, run_key)
                    if key in there.get("system_metrics", ()):
                        question = f"SELECT count(*) FROM system_metrics WHERE {key} = ?"
                        run.left_out["system metrics"] += database.execute(question, (run_key,)).fetchone()[0]
                except sqlite3.Error as error:
                    run.warnings.append(f"{path} is damaged, and a part of run {name} is left out: {error}")
                yield run


def _add_config(run: ImportedRun, database: sqlite3.Connection, key: str, run_key: str) -> None:
    for (text,) in database.execute(f"SELECT config FROM configs WHERE {key} = ?", (run_key,)):
        found = _object(text)
        if found is None:
            run.warnings.append(f"the configuration of run {run.name} is damaged, and left out")
        else:
            run.hyperparameters |= {name: value for name, value in found.items() if not name.startswith("_")}


def _add_metrics(run: ImportedRun, database: sqlite3.Connection, key: str, run_key: str) -> None:
    damaged = 0
    for step, moment, text in database.execute(
        f"SELECT step, timestamp, metrics FROM metrics WHERE {key} = ? ORDER BY id", (run_key,)
    ):
        values = _object(text)
        if values is None:
            damaged += 1
        else:
            run.add_row(values, step, _seconds(moment))
    if damaged:
        run.warnings.append(f"run {run.name} has damaged records, which are left out ({damaged})")


def _object(text: Any) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _seconds(moment: Any) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, TypeError, OverflowError, OSError):
        return math.nan
