"""`callsheet runs`: print the runs in a folder as a table, filtered and sorted."""

from __future__ import annotations

import math
import operator
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from callsheet.core.working import working
from callsheet.errors import ConfigError, did_you_mean
from callsheet.loggers.support.json_text import json_text
from callsheet.report.index import MetricRow, RunRow, is_run, runs_in
from callsheet.report.lines import printable

LOSS_METRIC = "train/loss"
DEFAULT_METRIC = "validation/loss"
_MAX_CELL_CHARACTERS = 100  # longer cells of the table are cut to this many characters; the JSON output is complete

Value = str | float
"""The value of a column: text, or a number. Empty text and NaN mean that the run has no value."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column in the table of runs.

    Args:
        head: its heading.
        value: returns a run's value, by which runs are sorted and filtered.
        text: returns the value as it is shown.
        greatest_first: whether the greatest value comes first when runs are sorted by it.
        is_number: whether the column is aligned to the right.
    """

    head: str
    value: Callable[[RunRow], Value]
    text: Callable[[RunRow], str]
    greatest_first: bool = False
    is_number: bool = False


def _plain_column(head: str, value: Callable[[RunRow], str]) -> Column:
    return Column(head, value, value)


_COLUMNS = {
    "name": _plain_column("name", lambda row: row.name),
    "outcome": _plain_column("outcome", lambda row: row.outcome),
    "steps": Column("steps", lambda row: row.steps, lambda row: str(row.steps), True, True),
    "duration": Column("duration", lambda row: row.seconds, lambda row: _duration(row.seconds), True, True),
    "started": Column("started", lambda row: row.started, lambda row: _moment(row.started), True),
    "device": _plain_column("device", lambda row: _device(row)),
    "tags": _plain_column("tags", lambda row: row.tags),
    "note": _plain_column("note", lambda row: row.note),
    "archived": _plain_column("archived", lambda row: "yes" if row.is_archived else ""),
    "reason": _plain_column("reason", lambda row: row.reason),
    "checkpoint": _plain_column("checkpoint", lambda row: row.best_checkpoint),
}
_SHORT_NAMES = {"loss": f"last({LOSS_METRIC})", "last": "last({})", "lowest": "lowest({})", "highest": "highest({})"}
"""Short names of columns, and the column that each name selects. `{}` is the metric that `--metric` names."""
COLUMNS = (*_COLUMNS, *_SHORT_NAMES)
DEFAULT_COLUMNS = ("name", "outcome", "steps", "duration", "loss", "last", "lowest", "highest", "started", "device", "reason")
_METRIC_COLUMN_PATTERN = re.compile(r"(last|lowest|highest)\((.+)\)")

_CONDITION_PATTERN = re.compile(r"\s*(.+?)\s*(<=|>=|!=|=|<|>|~)\s*(.*?)\s*")
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def runs(
    folder: str,
    *,
    where: Sequence[str] = (),
    columns: Sequence[str] = (),
    sort: str = "started",
    is_reversed: bool = False,
    metric: str = DEFAULT_METRIC,
    shows_archived: bool = False,
    as_json: bool = False,
) -> str:
    """Return a table of the runs in a folder, or JSON with all metrics and settings.

    The JSON is a list of objects, with times in seconds, NaN as the string `"NaN"`, and null for unknown values.

    Args:
        folder: contains the runs' folders.
        where: conditions such as `validation/loss < 2`; only runs that fulfill all of them are listed.
        columns: names of columns, metrics and settings; empty: the default columns.
        sort: the name of a column, metric or setting.
        is_reversed: whether to reverse the order.
        metric: the metric of the columns `last`, `lowest` and `highest`.
        shows_archived: whether to list archived runs too.
        as_json: whether to return JSON.

    Raises:
        ConfigError: there is no such folder, column or metric, or a condition cannot be read.
    """
    if is_run(Path(folder)):
        raise ConfigError(f"{folder} is a run itself; give the folder that contains the runs' folders")
    conditions = [_condition(text) for text in where]
    shows_archived = shows_archived or any(name == "archived" for name, _, _ in conditions)
    chosen = [name.strip() for name in columns if name.strip()]
    shown = chosen or list(DEFAULT_COLUMNS)
    used = [*(shown if not as_json else ()), sort, *(name for name, _, _ in conditions)]
    # `used` may also contain names of columns. They have no effect, because no metric or setting has the name of a column.
    names = {LOSS_METRIC, metric, *used, *(match[2] for name in used if (match := _METRIC_COLUMN_PATTERN.fullmatch(name)))}
    try:
        with working(f"reading the runs in {folder}", is_shown=sys.stderr.isatty()):
            found = runs_in(folder, metrics=None if as_json else names, settings=None if as_json else names)
    except FileNotFoundError as error:
        raise ConfigError(f"{error}; give the folder that contains the runs' folders") from None
    if found.note:
        print(f"callsheet: {found.note}", file=sys.stderr)
    unknown = [*used, *([metric] if metric != DEFAULT_METRIC else [])]
    _check_names(folder, found.rows, unknown)
    rows = [row for row in found.rows if shows_archived or not row.is_archived]
    hidden = len(found.rows) - len(rows)
    if hidden and not as_json:
        print(
            f"callsheet: {hidden} archived {'run is' if hidden == 1 else 'runs are'} not listed; --archived lists them",
            file=sys.stderr,
        )
    for name, compared, value in conditions:
        rows = [row for row in rows if _fulfils(_column(name, metric), row, compared, value)]
    rows = _sort(rows, _column(sort, metric), is_reversed)
    if as_json:
        return json_text([_plain(row, Path(folder)) for row in rows], indent=1)
    if not rows:
        return f"there is no run in {folder}{' that fulfils the conditions' if where and found.rows else ''}"
    if not chosen:
        shown[-1:-1] = [name for name in ("tags", "archived") if any(_COLUMNS[name].value(row) for row in rows)]
    return _table(rows, [_column(name, metric) for name in shown])


# --- finding columns by name ---


def _column(name: str, metric: str) -> Column:
    """Return the column `name`: one of `_COLUMNS`, a value such as `lowest(METRIC)`, a metric's last value, or a setting."""
    if name in _COLUMNS:
        return _COLUMNS[name]
    if name in _SHORT_NAMES:
        is_last = name in ("loss", "last")
        found = _column(_SHORT_NAMES[name].format(metric), metric)
        return Column(
            (LOSS_METRIC if name == "loss" else metric) if is_last else name, found.value, found.text, found.greatest_first, True
        )
    if match := _METRIC_COLUMN_PATTERN.fullmatch(name):
        return _metric_column(match[2], match[1], name)

    def value(row: RunRow) -> Value:
        if name in row.metrics:
            return row.metrics[name].last
        text = row.settings.get(name, "")
        number = _number_in(text)
        return text if number is None else number

    return Column(
        name, value, lambda row: _number(value(row)) if name in row.metrics else row.settings.get(name, ""), is_number=True
    )


def _metric_column(metric: str, what: str, head: str) -> Column:
    def value(row: RunRow) -> Value:
        found: float = getattr(row.metrics.get(metric, MetricRow()), what)
        return found

    return Column(head, value, lambda row: _number(value(row)) if metric in row.metrics else "", what == "highest", True)


def _check_names(folder: str, rows: Iterable[RunRow], names: Sequence[str]) -> None:
    """Raise ConfigError if one of the names is neither a column nor a metric or setting of any run."""
    plain = [match[2] if (match := _METRIC_COLUMN_PATTERN.fullmatch(name)) else name for name in names if name not in COLUMNS]
    missing = [name for name in plain if not any(name in row.metrics or name in row.settings for row in rows)]
    if missing:
        every = [*COLUMNS, *{name for row in runs_in(folder).rows for name in (*row.metrics, *row.settings)}]
        raise ConfigError(
            f"there is no column {missing[0]!r}, and no run in {folder} has such a metric or setting{did_you_mean(missing[0], every)} (the "
            f"columns are {', '.join(COLUMNS)})"
        )


# --- filtering and sorting runs ---


def _condition(text: str) -> tuple[str, str, str]:
    match = _CONDITION_PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--where {text!r} is no condition; give NAME, one of < <= > >= = != ~, and a value, such as 'validation/loss < 2', "
            "'optimizer.lr = 0.001' or 'name ~ lr-'"
        )
    return match[1], match[2], match[3]


def _fulfils(column: Column, row: RunRow, compared: str, wanted: str) -> bool:
    """Return whether the run fulfills a condition of `--where`.

    A run whose value is unknown can fulfill only conditions on tags. `~` searches the text that the column shows, and the exact
    number.
    """
    value = column.value(row)
    if compared == "~":
        texts = (column.text(row), str(value) if _is_known(value) else "")
        return any(wanted.lower() in text.lower() for text in texts)
    if column is _COLUMNS["tags"] and compared in ("=", "!="):
        return (wanted in row.tags.split()) == (compared == "=")
    if column is _COLUMNS["archived"]:
        value = value or "no"
    if compared in ("=", "!="):
        return _is_known(value) and _is_equal(column, row, value, wanted) == (compared == "=")
    number = _number_of(column, wanted)
    if number is None:
        raise ConfigError(f"--where {column.head} {compared} {wanted!r}: give {_expected_value(column)}")
    return not isinstance(value, str) and not math.isnan(value) and _COMPARISONS[compared](value, number)


def _is_equal(column: Column, row: RunRow, value: Value, wanted: str) -> bool:
    if isinstance(value, str):
        return value.lower() == wanted.lower()
    return value == _number_of(column, wanted) or (column is _COLUMNS["started"] and column.text(row).startswith(wanted))


def _is_known(value: Value) -> bool:
    """Return whether a run's value is known: it is neither an empty text nor NaN."""
    return value != "" and value == value


def _number_of(column: Column, text: str) -> float | None:
    """Convert text to a number for comparison with the column, such as a date for `started`, or `90s` or `2m` for `duration`."""
    if column is _COLUMNS["started"]:
        return _date(text)
    unit = _SECONDS_PER_UNIT.get(text[-1:]) if column is _COLUMNS["duration"] else None
    number = _number_in(text if unit is None else text[:-1])
    return number if number is None or unit is None else number * unit


def _expected_value(column: Column) -> str:
    return "a date or time, such as 2026-11-30" if column is _COLUMNS["started"] else "a number"


def _number_in(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _date(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _sort(rows: Sequence[RunRow], column: Column, is_reversed: bool) -> list[RunRow]:
    """Sort the rows by a column. In ascending order, numbers come before text. Rows without a value always come last."""

    def key(row: RunRow) -> tuple[bool, Value]:
        value = column.value(row)
        return isinstance(value, str), value

    known = sorted((row for row in rows if _is_known(column.value(row))), key=key, reverse=column.greatest_first != is_reversed)
    return [*known, *(row for row in rows if not _is_known(column.value(row)))]


# --- formatting as text ---


def _table(rows: Sequence[RunRow], columns: Sequence[Column]) -> str:
    lines = [[column.head for column in columns], *([_cell(column.text(row)) for column in columns] for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(text: str) -> str:
    short = text if len(text) <= _MAX_CELL_CHARACTERS else f"{text[: _MAX_CELL_CHARACTERS - 3]}..."
    return printable(short)


def _device(row: RunRow) -> str:
    return f"{row.device} x {row.world_size}" if row.world_size > 1 else row.device


def _moment(started: float) -> str:
    return "" if math.isnan(started) else time.strftime("%Y-%m-%d %H:%M", time.localtime(started))


def _number(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"  # `nan` is shown too, because a NaN metric matters


def _duration(seconds: float) -> str:
    """Return a duration as text, such as `41s`, `12m05s`, `3h07m` or `2d04h`."""
    if not math.isfinite(seconds):
        return ""
    for size, name, small, small_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)}{name}{int(seconds % size // small):02}{small_name}"
    return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.1f}s"


def _plain(row: RunRow, folder: Path) -> dict[str, Any]:
    plain = {"name": row.name, "folder": str(folder / row.name), **asdict(row), "tags": row.tags.split()}
    unknown = {name: None for name in ("seconds", "started", "last_write") if math.isnan(plain[name])}
    return plain | unknown
