"""Reads the files of a `JSONLLogger`, which may still be writing them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from callsheet.core.run_state import MetricsRecord

METRICS = "metrics.jsonl"


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a JSONL file. If there is no such file, yield nothing.

    Lines that a killed process left incomplete are skipped.

    Raises:
        OSError: the file cannot be read, or is not a regular file (reading a named pipe could block forever).
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(f"{os.fspath(path)} is not a regular file; remove it")
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return
    with file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):  # skip a line that is incomplete or that callsheet did not write
                continue
            if isinstance(line, dict):
                yield line


def read_metrics(folder: str | os.PathLike[str]) -> list[MetricsRecord]:
    """Return the metrics records of a run, in the order in which they were logged.

    If the run was resumed, records that were logged after the checkpoint and before the resume are left out, so that no step
    appears twice. Incomplete lines are skipped. May be called while the run writes.

    Args:
        folder: the folder of the run, in which a `JSONLLogger` writes `metrics.jsonl`. Without this file, the result is an empty
            list.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    records: list[MetricsRecord] = []
    for line in read_lines(Path(folder) / METRICS):
        try:
            if "resumed_from_step" in line:
                del records[int(line["records"]) :]
            else:
                records.append(_record(line))
        except (KeyError, TypeError, ValueError, AttributeError):  # skip a line that callsheet did not write
            continue
    return records


def _record(line: dict[str, Any]) -> MetricsRecord:
    # The line may be from another version of callsheet, with other fields, so read only the fields that this version knows.
    known = {field.name: line[field.name] for field in fields(MetricsRecord) if field.name in line}
    return MetricsRecord(**{**known, "values": {name: float(value) for name, value in line["values"].items()}})
