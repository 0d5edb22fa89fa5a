"""Writes the run's metrics records to a CSV table."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from callsheet.core.context import Context
from callsheet.core.run_state import MetricsRecord
from callsheet.loggers.logger import Logger
from callsheet.loggers.support.file_names import folder_of, replace_file
from callsheet.loggers.support.resumption import ValidRecords, valid_records

_FIRST_COLUMNS = ("step", "time", *(field.name for field in fields(MetricsRecord) if field.name not in ("step", "values")))


class CSVLogger(Logger):
    """Write the metrics records to `metrics.csv` in the run's folder, one row for each.

    The first columns are `step`, `time` (seconds since 1970) and the other fields of `MetricsRecord`. Then comes a column for
    each metric, in the order in which they appeared. If a record does not have a metric, its cell is empty. A new metric adds a
    column; the file is then replaced atomically. Numbers keep their exact values, including `nan` and `inf`. A metric that has
    the name of one of the first columns is written to the column `metric/<name>`.

    A resumed run removes the rows after the checkpoint. A killed process loses no records; at most, its last row is incomplete,
    and the resume removes that row. If the logger has a `name`, it writes to the folder of that name in the run's folder.

    Raises:
        ConfigError: the run has no folder.
    """

    writes_to_run_folder = True

    def __init__(self) -> None:
        self._path: Path | None = None  # path of the CSV file; None until the run may write to its folder
        self._file: io.FileIO | None = None
        self._columns: dict[str, None] = {}  # the column names, in a dict that serves as an ordered set
        self._rows = 0
        self._resumed_rows: int | None = None  # number of rows when the loaded checkpoint was saved
        self._valid = ValidRecords()  # how many rows are still valid after a resume; needed until the next row is written

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Reset the row count, which may be from an earlier run with this logger."""
        self._resumed_rows = None

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Create the CSV file or, in a resumed run, remove the rows that were written after the loaded checkpoint."""
        self._close()
        path = folder_of(self, ctx) / "metrics.csv"
        columns, rows = _read(path)
        self._valid = valid_records(ctx, [int(row[0]) for row in rows], self._resumed_rows)
        self._rewrite(path, columns, rows[: self._valid.kept])
        self._path, self._rows = path, self._valid.kept

    def on_log(self, ctx: Context) -> None:
        if self._path is None or not ctx.run.may_write(self._path):
            return
        cells: dict[str, Any] = {name: getattr(ctx.record, name, "") for name in _FIRST_COLUMNS} | {"time": time.time()}
        cells |= {f"metric/{name}" if name in _FIRST_COLUMNS else name: value for name, value in ctx.record.values.items()}
        new = [name for name in cells if name not in self._columns]
        is_repeated = self._valid.are_repeated_by(ctx.record.step)
        if new or is_repeated:
            columns, rows = _read(self._path)
            rows = rows[: self._valid.before] if is_repeated else rows
            self._rewrite(self._path, [*columns, *new], rows)
            self._rows = len(rows)
        self._valid = ValidRecords()
        self._append(_text([[cells.get(name, "") for name in self._columns]]))
        self._rows += 1

    def on_run_end(self, ctx: Context) -> None:
        self._close()

    def state_dict(self) -> Mapping[str, Any]:
        """Return the number of rows so far. A resumed run keeps this many rows and removes the later rows."""
        return {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._resumed_rows = state["rows"]

    def _rewrite(self, path: Path, columns: list[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rewrite the CSV file with `columns` and `rows`. Empty cells are added to rows that have too few cells."""
        self._close_file()
        replace_file(path, _text([columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)]))
        self._columns = dict.fromkeys(columns)

    def _append(self, row: bytes) -> None:
        """Append a row to the CSV file. If writing fails, remove the incomplete row."""
        assert self._path is not None
        if self._file is None:
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by `_close_file`
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(row)
            if written != len(row):
                raise OSError(f"{self._path}: only {written} of {len(row)} bytes could be written; free space on the disk")
        except OSError:
            self._file.truncate(size)
            raise

    def _close(self) -> None:
        self._close_file()
        self._path = None

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the column names and the complete rows of the CSV file at `path`.

    If there is no file, or no CSVLogger wrote it, return the names of the first columns and no rows.
    """
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        content = ""
    whole = io.StringIO(content[: content.rfind("\n") + 1], newline="")
    columns, *rows = list(csv.reader(whole)) or [[]]
    if columns[: len(_FIRST_COLUMNS)] != list(_FIRST_COLUMNS):
        return list(_FIRST_COLUMNS), []
    return columns, [row for row in rows if len(row) == len(columns) and row[0].isdecimal()]


def _text(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
