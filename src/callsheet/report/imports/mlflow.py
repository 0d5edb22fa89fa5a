"""Reads MLflow's stores of runs: the folder `mlruns`, and SQLite databases.

Both are read without MLflow, because MLflow 3 cannot open the folder, opens a database of another version only after migrating it,
and writes to the databases that it opens.
"""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from callsheet.report.imports.imported_run import ImportedRun, as_number
from callsheet.report.imports.plain_settings import parse_text, yaml_settings
from callsheet.report.imports.source import Source
from callsheet.report.imports.sqlite_copy import copy_database, databases, tables
from callsheet.report.lines import inside, text_of

LOOKS_FOR = "the folder mlruns, or an SQLite file with MLflow's tables"

_META_FILE = "meta.yaml"
# The codes for a run's status that MLflow writes to files in the folder `mlruns`.
_STATUS_OF_CODE = {1: "RUNNING", 2: "SCHEDULED", 3: "FINISHED", 4: "FAILED", 5: "KILLED"}
_OUTCOME_OF_STATUS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "interrupted"}
_STORED_INFINITY = 1.7976931348623157e308  # MLflow's databases store infinity as this number
_MAX_FILES, _MAX_VALUE_BYTES, _MAX_LINE_CHARACTERS = 100_000, 2**16, 4096
_TABLE_COLUMNS = {
    "runs": {"run_uuid", "status", "start_time", "end_time", "lifecycle_stage"},
    "metrics": {"run_uuid", "key", "value", "is_nan", "timestamp", "step"},
    "params": {"run_uuid", "key", "value"},
    "tags": {"run_uuid", "key", "value"},
}


def find(source: Source) -> list[Path]:
    """Return MLflow's databases, and the folders of runs in `mlruns`."""
    return [*databases(source, _TABLE_COLUMNS), *_run_folders(source)]


def read(source: Source) -> Iterator[ImportedRun]:
    """Yield MLflow's runs in the order in which they started. Deleted runs are left out.

    Raises:
        ConfigError: a database cannot be read.
        MissingPackage: PyYAML, which is needed to read the folder `mlruns`, is not installed.
    """
    for path in databases(source, _TABLE_COLUMNS):
        yield from _runs_of_database(path)
    found = []
    for folder in _run_folders(source):
        try:
            facts = yaml_settings(folder, _META_FILE, extra="mlflow")
        except (OSError, ValueError) as error:
            run = ImportedRun(folder.name, folder.name)
            run.warnings.append(f"{folder / _META_FILE} cannot be read: {error}")
            facts = {}
            yield run
        if facts.get("lifecycle_stage", "active") == "active" and "run_id" in facts:
            found.append((as_number(facts.get("start_time")) or 0.0, folder, facts))
    for _, folder, facts in sorted(found, key=lambda each: each[:2]):
        yield _run_of_folder(folder, facts)


def _fill_run(
    run: ImportedRun, status: str, started: Any, ended: Any, params: Mapping[str, str], tags: Mapping[str, str]
) -> ImportedRun:
    run.name = tags.get("mlflow.runName") or run.name
    run.outcome = _OUTCOME_OF_STATUS.get(status, "")
    run.reason = "" if run.outcome == "finished" else f"MLflow's status is {status}"
    run.started, run.ended = _seconds(started), _seconds(ended)
    run.hyperparameters = {name: parse_text(value) for name, value in params.items()}
    own = {name: value for name, value in tags.items() if not name.startswith("mlflow.")}
    if own:
        run.hyperparameters["tags"] = own
    return run


def _seconds(milliseconds: Any) -> float:
    found = as_number(milliseconds)
    return found / 1000 if found else math.nan


# --- SQLite databases ---


def _runs_of_database(path: Path) -> Iterator[ImportedRun]:
    columns = tables(path)["runs"]
    with copy_database(path) as database:
        name = "name" if "name" in columns else "''"
        runs = database.execute(
            f"SELECT run_uuid, {name}, status, start_time, end_time FROM runs WHERE lifecycle_stage = 'active' ORDER BY start_time, run_uuid"
        ).fetchall()
        for run_id, title, status, started, ended in runs:
            run = ImportedRun(str(title or run_id), str(run_id))
            try:
                params, tags = (
                    {
                        str(key): str(value)
                        for key, value in database.execute(f"SELECT key, value FROM {table} WHERE run_uuid = ?", (run_id,))
                    }
                    for table in ("params", "tags")
                )
                _fill_run(run, str(status), started, ended, params, tags)
                history = "SELECT key, step, value, is_nan, timestamp FROM metrics WHERE run_uuid = ? ORDER BY timestamp, rowid"
                for key, step, value, is_nan, moment in database.execute(history, (run_id,)):
                    number = math.nan if is_nan else as_number(value)
                    if number is None:
                        run.left_out["values that are not numbers"] += 1
                    else:
                        number = math.copysign(math.inf, number) if abs(number) == _STORED_INFINITY else number
                        run.metrics.add(str(key), step, number, _seconds(moment))
            except sqlite3.Error as error:
                run.warnings.append(f"{path} is damaged, and a part of run {run_id} is left out: {error}")
            yield run


# --- the folder `mlruns` ---


def _run_folders(source: Source) -> list[Path]:
    return [
        path.parent
        for path in source.files
        if path.name == _META_FILE and ((path.parent / "metrics").is_dir() or (path.parent / "params").is_dir())
    ]


def _run_of_folder(folder: Path, facts: Mapping[str, Any]) -> ImportedRun:
    run = ImportedRun(str(facts.get("run_name") or folder.name), str(facts["run_id"]))
    params = {name: text_of(folder / "params", name, at_most=_MAX_VALUE_BYTES) for name in _names(folder / "params")}
    tags = {name: text_of(folder / "tags", name, at_most=_MAX_VALUE_BYTES) for name in _names(folder / "tags")}
    number = facts.get("status")
    status = _STATUS_OF_CODE.get(number, "") if isinstance(number, int) else str(number)
    _fill_run(run, status or "unknown", facts.get("start_time"), facts.get("end_time"), params, tags)
    for name in _names(folder / "metrics"):
        try:
            with open(folder / "metrics" / name, encoding="utf-8", errors="replace") as file:
                _add_history(run, name, file)
        except OSError as error:
            run.warnings.append(f"{folder / 'metrics' / name} cannot be read: {error}")
    return run


def _add_history(run: ImportedRun, name: str, file: TextIO) -> None:
    """Add the values in the file of one metric. A line has a time in milliseconds, the value, and the step."""
    damaged = 0
    while line := file.readline(_MAX_LINE_CHARACTERS):
        try:
            if not line.endswith("\n"):
                raise ValueError("the line is cut off")
            moment, value, step = [*line.split(), "0"][:3]  # old versions of MLflow wrote no step, so the default is 0
            run.metrics.add(name, int(step), float(value), _seconds(int(moment)))
        except ValueError:
            damaged += bool(line.strip())
    if damaged:
        run.warnings.append(f"the metric {name} of run {run.key} has damaged lines, which are left out ({damaged})")


def _names(folder: Path) -> list[str]:
    """Return the relative paths of all files below the folder. Symbolic links are not followed."""
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders.sort()
        relative = Path(place).relative_to(folder)
        found += [(relative / name).as_posix() for name in sorted(files) if inside(folder, relative / name) is not None]
        if len(found) > _MAX_FILES:
            break
    return found[:_MAX_FILES]
