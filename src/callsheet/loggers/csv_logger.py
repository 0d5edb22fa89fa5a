"""The run's records as a table for a spreadsheet."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from callsheet.context import Context, MetricsRecord
from callsheet.loggers.file_names import folder_of, replace_file
from callsheet.loggers.logger import Logger
from callsheet.loggers.resumption import records_before

_FIELDS = ("step", "time", *(field.name for field in fields(MetricsRecord) if field.name not in ("step", "values")))


class CSVLogger(Logger):
    """Write `metrics.csv` in the run's folder: one row a record.

    First come the columns `step`, `time` (seconds since 1970) and the other fields of `MetricsRecord`, then one for each metric, in the order
    in which they appeared; where a record does not tell a metric its cell is empty. A metric that appears later makes the table wider,
    for which the file is replaced as a whole. Numbers read back as they were, `nan` and `inf` too. A metric that is called like one of
    the first columns stands under `metric/<name>`.

    A resumed run leaves out the rows of the future that did not happen. A killed process loses nothing that was told, and tears at most
    the last row, which the resume takes away. With a `name` of its own it writes to the folder of that name in the run's.

    Raises:
        ConfigError: when a run begins, it has no folder.
    """

    writes_to_run_folder = True

    def __init__(self) -> None:
        self._path: Path | None = None  # until the run may write
        self._file: io.FileIO | None = None
        self._columns: dict[str, None] = {}  # in their order
        self._rows = 0
        self._resumed_rows: int | None = None  # as the checkpoint says

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Forget what an earlier run's checkpoint said."""
        self._resumed_rows = None

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Begin, or go on where the checkpoint was saved."""
        self._close()
        path = folder_of(self, ctx) / "metrics.csv"
        columns, rows = _read(path)
        kept = records_before(ctx, [int(row[0]) for row in rows], self._resumed_rows)
        self._rewrite(path, columns, rows[:kept])
        self._path, self._rows = path, kept

    def on_log(self, ctx: Context) -> None:
        """One row."""
        if self._path is None:
            return
        cells: dict[str, Any] = {name: getattr(ctx.record, name, "") for name in _FIELDS} | {"time": time.time()}
        cells |= {f"metric/{name}" if name in _FIELDS else name: value for name, value in ctx.record.values.items()}
        if new := [name for name in cells if name not in self._columns]:
            columns, rows = _read(self._path)
            self._rewrite(self._path, [*columns, *new], rows)
        self._append(_text([[cells.get(name, "") for name in self._columns]]))
        self._rows += 1

    def on_run_end(self, ctx: Context) -> None:
        """Close the file."""
        self._close()

    def state_dict(self) -> Mapping[str, Any]:
        """How many rows come before this checkpoint."""
        return {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._resumed_rows = state["rows"]

    def _rewrite(self, path: Path, columns: list[str], rows: Sequence[Sequence[Any]]) -> None:
        """Replace the file by one with these columns, of which older rows may lack the last."""
        self._close_file()
        replace_file(path, _text([columns, *([*row, *[""] * (len(columns) - len(row))] for row in rows)]))
        self._columns = dict.fromkeys(columns)

    def _append(self, row: bytes) -> None:
        """Write one row, or nothing."""
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
    """The columns and rows of a table that we wrote; the first of them where there is none. A torn row is left out."""
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        content = ""
    whole = io.StringIO(content[: content.rfind("\n") + 1], newline="")
    columns, *rows = list(csv.reader(whole)) or [[]]
    if columns[: len(_FIELDS)] != list(_FIELDS):
        return list(_FIELDS), []
    return columns, [row for row in rows if len(row) == len(columns) and row[0].isdecimal()]


def _text(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
