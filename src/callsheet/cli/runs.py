"""`callsheet runs`: print the runs in a folder as a table."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from callsheet.errors import ConfigError, did_you_mean
from callsheet.loggers.support.json_text import json_text
from callsheet.report.index import MetricRow, RunRow, Runs, runs_in

LOSS = "train/loss"
_LONGEST_REASON = 100  # characters; the JSON has all

_Key = Callable[[RunRow, str], str | float]
COLUMNS: dict[str, tuple[_Key, bool]] = {
    "name": (lambda row, _: row.name, False),
    "outcome": (lambda row, _: row.outcome, False),
    "steps": (lambda row, _: row.steps, True),
    "duration": (lambda row, _: row.seconds, True),
    "loss": (lambda row, _: _metric(row, LOSS).last, False),
    "last": (lambda row, metric: _metric(row, metric).last, False),
    "lowest": (lambda row, metric: _metric(row, metric).lowest, False),
    "highest": (lambda row, metric: _metric(row, metric).highest, True),
    "started": (lambda row, _: row.started, True),
    "device": (lambda row, _: _device(row), False),
}
"""The columns by which runs can be sorted.

Each has a function of a run and a metric, and says whether the greatest value comes first.
"""


def runs(
    folder: str, *, sort: str = "started", is_reversed: bool = False, metric: str = "validation/loss", as_json: bool = False
) -> str:
    """Return the table, or JSON with all metrics.

    The JSON is a list of objects, with times in seconds, NaN as the string `"NaN"`, and null for unknown values.

    Raises:
        ConfigError: there is no such folder, column or metric.
    """
    if sort not in COLUMNS:
        raise ConfigError(f"there is no column {sort!r}{did_you_mean(sort, COLUMNS)} (one of {', '.join(COLUMNS)})")
    try:
        found = runs_in(folder, metrics=None if as_json else {LOSS, metric})
    except FileNotFoundError as error:
        raise ConfigError(f"{error}; give the folder that contains the runs' folders") from None
    if found.note:
        print(f"callsheet: {found.note}", file=sys.stderr)
    if metric != "validation/loss" and not any(metric in row.metrics for row in found.rows):
        names = {name for row in runs_in(folder).rows for name in row.metrics}
        raise ConfigError(f"no run in {folder} has the metric {metric!r}{did_you_mean(metric, names)}")
    rows = _sorted(found, sort, metric, is_reversed)
    if as_json:
        return json_text([_plain(row, Path(folder)) for row in rows], indent=1)
    return _table(rows, metric) if rows else f"there is no run in {folder}"


def _sorted(found: Runs, column: str, metric: str, is_reversed: bool) -> list[RunRow]:
    """Sort the rows by a column. Unknown values come last in both directions. Equal rows stay sorted by age, newest first."""
    key, greatest_first = COLUMNS[column]

    def is_known(row: RunRow) -> bool:
        value = key(row, metric)
        return isinstance(value, str) or not math.isnan(value)

    known = sorted(filter(is_known, found.rows), key=lambda row: key(row, metric), reverse=greatest_first != is_reversed)
    return [*known, *(row for row in found.rows if not is_known(row))]


def _table(rows: list[RunRow], metric: str) -> str:
    heads = ("name", "outcome", "steps", "duration", LOSS, metric, "lowest", "highest", "started", "device", "reason")
    lines = [heads, *(_cells(row, metric) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
    is_number = [head in ("steps", "duration", LOSS, metric, "lowest", "highest") for head in heads]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in lines
    )


def _cells(row: RunRow, metric: str) -> tuple[str, ...]:
    values = row.metrics.get(metric)
    started = "" if math.isnan(row.started) else time.strftime("%Y-%m-%d %H:%M", time.localtime(row.started))
    numbers = [_number(row.metrics.get(LOSS), "last"), *(_number(values, what) for what in ("last", "lowest", "highest"))]
    cells = (row.name, row.outcome, str(row.steps), _duration(row.seconds), *numbers, started, _device(row), _cut(row.reason))
    return tuple(
        "".join(char if char.isprintable() else "?" for char in cell) for cell in cells
    )  # control characters would change the terminal


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


def _metric(row: RunRow, name: str) -> MetricRow:
    return row.metrics.get(name, MetricRow())


def _device(row: RunRow) -> str:
    return f"{row.device} x {row.world_size}" if row.world_size > 1 else row.device


def _number(of: MetricRow | None, what: str) -> str:
    return "" if of is None else f"{getattr(of, what):.4g}"  # `nan` is shown too, because it matters


def _duration(seconds: float) -> str:
    """Return a duration as `41s`, `12m05s`, `3h07m` or `2d04h`."""
    if not math.isfinite(seconds):
        return ""
    for size, name, small, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)}{name}{int(seconds % size // small):02}{small_name}"
    return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.1f}s"


def _plain(row: RunRow, folder: Path) -> dict[str, Any]:
    plain = {"name": row.name, "folder": str(folder / row.name), **asdict(row)}
    unknown = {name: None for name in ("seconds", "started", "last_write") if math.isnan(plain[name])}
    return plain | unknown
