"""Reads the files of Lightning's `CSVLogger`: `metrics.csv` and `hparams.yaml`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

from callsheet.report.imports.imported_run import ImportedRun
from callsheet.report.imports.plain_settings import yaml_settings
from callsheet.report.imports.source import Source
from callsheet.run.run_marker import is_marked

HYPERPARAMETERS_FILE = "hparams.yaml"
"""The file in which Lightning's loggers write hyperparameters."""

LOOKS_FOR = "metrics.csv with a column step, which Lightning's CSVLogger writes"

_METRICS_FILE = "metrics.csv"
_MAX_LINE_CHARACTERS = 2**24
_SPLIT_OF_PREFIX = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}
_SPLIT_PATTERN = re.compile(rf"({'|'.join(_SPLIT_OF_PREFIX)})[_/](.+)")


def find(source: Source) -> list[Path]:
    """Return the folders of Lightning's runs: those with a `metrics.csv` that has the column `step`."""
    return [
        path.parent
        for path in source.files
        if path.name == _METRICS_FILE and "step" in _columns(path) and not is_marked(path.parent)
    ]


def read(source: Source) -> Iterator[ImportedRun]:
    """Yield one run for each `metrics.csv` of Lightning."""
    for folder in find(source):
        run = ImportedRun(run_name(folder), str(folder), reason=f"{_METRICS_FILE} does not record how the run ended")
        add_hyperparameters(run, folder, extra="train")
        names = metric_names(name for name in _columns(folder / _METRICS_FILE) if name != "step")
        try:
            with open(folder / _METRICS_FILE, newline="", encoding="utf-8", errors="replace") as file:
                _add_rows(run, csv.DictReader(_lines(file)), names)
        except (OSError, csv.Error, ValueError) as error:
            run.warnings.append(f"{folder / _METRICS_FILE} is damaged, and the rest of it is left out: {error}")
        yield run


def run_name(folder: Path) -> str:
    """Return a name for the run in `folder`. For `logs/version_0` it is `logs-version_0`."""
    return f"{folder.parent.name}-{folder.name}" if re.fullmatch(r"version_\d+", folder.name) else folder.name


def add_hyperparameters(run: ImportedRun, folder: Path, *, extra: str) -> None:
    """Add the hyperparameters in the folder's `hparams.yaml`, if there is such a file."""
    try:
        run.hyperparameters |= yaml_settings(folder, HYPERPARAMETERS_FILE, extra=extra)
    except (OSError, ValueError) as error:
        run.warnings.append(f"{folder / HYPERPARAMETERS_FILE} is left out: {error}")


def metric_names(columns: Iterable[str]) -> dict[str, str]:
    """Return the metric's name for each column of the CSV file, such as `train/loss` for `train_loss` or `train_loss_step`.

    If a metric was logged both by step and by epoch, `train/loss` has the values of the steps and `train/loss_epoch` those of the
    epochs. For validation and test, `validation/loss` has the values of the epochs and `validation/loss_step` those of the steps.
    """
    names = {column: _rename_column(column) for column in columns}
    taken = set(names.values())
    for column, name in names.items():
        end = "_step" if name.startswith("train/") else "_epoch"
        short = name.removesuffix(end)
        if _SPLIT_PATTERN.match(column) and short != name and not short.endswith("/") and short not in taken:
            names[column] = short
            taken.add(short)
    return names


def _rename_column(column: str) -> str:
    found = _SPLIT_PATTERN.fullmatch(column)
    return f"{_SPLIT_OF_PREFIX[found[1]]}/{found[2]}" if found else column


def _add_rows(run: ImportedRun, rows: csv.DictReader[str], names: dict[str, str]) -> None:
    for position, row in enumerate(rows):
        step = _number(row.get("step") or "")
        for name, text in row.items():
            if name == "step" or name not in names or not isinstance(text, str) or not text:
                continue
            value = _number(text)
            if value is None:
                run.left_out["values that are not numbers"] += 1
            else:
                run.metrics.add(names[name], position if step is None else step, value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _columns(path: Path) -> list[str]:
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            return next(csv.reader(_lines(file)), [])
    except (OSError, csv.Error, ValueError):
        return []


def _lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of an open CSV file.

    Raises:
        ValueError: a line is too long to be a line of metrics, has a zero byte, or is not complete.
    """
    while line := file.readline(_MAX_LINE_CHARACTERS):
        if len(line) == _MAX_LINE_CHARACTERS:
            raise ValueError("a line is too long")
        if "\0" in line:
            raise ValueError("a line has a zero byte")
        if not line.endswith("\n"):
            raise ValueError("its last line is cut off")
        yield line
