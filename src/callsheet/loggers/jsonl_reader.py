"""Reads what a `JSONLLogger` wrote, also while it writes."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from callsheet.context import MetricsRecord

METRICS = "metrics.jsonl"


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file that are whole; none where there is no such file. A line that a killed process tore is passed by.

    Raises:
        OSError: the file cannot be read, or is not a regular file, such as a named pipe, which could be waited for without end.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file; remove it")
        file = open(path, "rb")  # noqa: SIM115 - closed below, where it is there
    except FileNotFoundError:
        return
    with file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):  # torn, or being written, or nobody's
                continue
            if isinstance(line, dict):
                yield line


def read_metrics(folder: str | os.PathLike[str]) -> list[MetricsRecord]:
    """The records in a run's folder, in the order in which they were logged; none where there is no `metrics.jsonl`.

    Where the run was resumed, the records of the future that did not happen are left out, so that the curve goes on without doubles.
    Torn lines are passed by. May be called while the run goes on.
    """
    records: list[MetricsRecord] = []
    for line in read_lines(Path(folder) / METRICS):
        try:
            if "resumed_from_step" in line:
                del records[int(line["records"]) :]
            else:
                records.append(_record(line))
        except (KeyError, TypeError, ValueError, AttributeError):  # no line of ours
            continue
    return records


def _record(line: dict[str, Any]) -> MetricsRecord:
    told = {
        field.name: line[field.name] for field in fields(MetricsRecord) if field.name in line
    }  # another version may tell fewer
    return MetricsRecord(**{**told, "values": {name: float(value) for name, value in line["values"].items()}})
