"""Reads W&B's transaction logs `run-*.wandb`. W&B writes such a log for each run, offline and online."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from callsheet.core import optional as extras
from callsheet.report.imports.imported_run import ImportedRun, as_number, as_step
from callsheet.report.imports.source import Source

LOOKS_FOR = "files run-*.wandb in folders offline-run-* or run-*"

_FILE_HEADER_BYTES, _BLOCK_BYTES, _FRAGMENT_HEADER_BYTES = 7, 32768, 7
_MAX_RECORD_BYTES = 64 * 2**20
_FULL_FRAGMENT, _FIRST_FRAGMENT, _LAST_FRAGMENT = 1, 2, 4  # types of log fragments; 3 is a fragment in the middle of a record
_OUTCOME_OF_EXIT_CODE = {0: "finished", 255: "interrupted"}  # W&B exits with 255 on Ctrl-C


def find(source: Source) -> list[Path]:
    """Return W&B's transaction logs below the source."""
    return [path for path in source.files if path.name.endswith(".wandb")]


def read(source: Source) -> Iterator[ImportedRun]:
    """Yield W&B's runs. The logs of a run and of its resumes are combined into one run.

    Raises:
        MissingPackage: wandb is not installed.
    """
    records = extras.load("wandb.proto.wandb_internal_pb2", extra="wandb", wanted_by="callsheet import").Record
    not_parsed = extras.load("google.protobuf.message", extra="wandb", wanted_by="callsheet import").DecodeError
    by_run: dict[str, list[Path]] = {}
    # Sort a run's files by their start times, which are in the names of the folders.
    for path in sorted(find(source), key=lambda path: (path.parent.name.removeprefix("offline-"), str(path))):
        by_run.setdefault(path.stem.removeprefix("run-"), []).append(path)
    for run_id, paths in by_run.items():
        run = ImportedRun(run_id, run_id)
        for path in paths:
            _Part(run, path, not_parsed).add(records)
        yield run


class _Part:
    """Reads one transaction log and adds its records to a run."""

    def __init__(self, run: ImportedRun, path: Path, not_parsed: type[Exception]) -> None:
        self._run, self._path, self._not_parsed = run, path, not_parsed
        self._step_metric = ""  # the metric that the run defined as the x-axis of all other metrics
        self._step: int | None = None  # last value of `_step_metric`

    def add(self, record_type: Any) -> None:
        """Read the transaction log, and add its metrics, configuration and outcome to the run."""
        run = self._run
        run.outcome, run.ended = "", math.nan
        run.reason = "the log has no exit record: the run was killed, or it still trained when it was copied"
        damaged = 0
        try:
            with open(self._path, "rb") as file:
                for content in _contents(file):
                    try:
                        if content is None:
                            raise ValueError
                        record = record_type.FromString(content)
                    except (ValueError, self._not_parsed):
                        damaged += 1
                        continue
                    self._add_record(record)
        except (OSError, _NotALogError) as error:
            run.warnings.append(f"{self._path} cannot be read: {error}")
        if damaged:
            run.warnings.append(f"{self._path} is damaged or cut off; records are left out ({damaged})")

    def _add_record(self, record: Any) -> None:
        kind, run = record.WhichOneof("record_type"), self._run
        if kind == "history":
            self._add_history({_name(item): _parse_value(item.value_json) for item in record.history.item})
        elif kind == "run":
            run.name = record.run.display_name or run.name
            seconds = record.run.start_time.seconds + record.run.start_time.nanos / 1e9
            if seconds > 0 and math.isnan(run.started):
                run.started = seconds
            self._add_config(record.run.config)
        elif kind == "config":
            self._add_config(record.config)
        elif kind == "metric":
            if record.metric.glob_name == "*" and record.metric.step_metric:
                self._step_metric = record.metric.step_metric
        elif kind == "exit":
            code = record.exit.exit_code
            run.outcome = _OUTCOME_OF_EXIT_CODE.get(code, "failed")
            run.reason = f"exit code {code}" if code else ""
        elif kind == "stats":
            run.left_out["system metrics"] += 1
        elif kind in ("output", "output_raw"):
            run.left_out["lines of output"] += 1

    def _add_history(self, row: Mapping[str, Any]) -> None:
        step, time = row.get("_step"), as_number(row.get("_timestamp"))
        if self._step_metric:
            declared = as_step(row.get(self._step_metric))
            self._step = self._step if declared is None else declared
            step = step if self._step is None else self._step
        values = {name: value for name, value in row.items() if not name.startswith("_") and name != self._step_metric}
        self._run.add_row(values, step, math.nan if time is None else time)

    def _add_config(self, config: Any) -> None:
        for item in config.update:
            name = _name(item)
            if not name.startswith("_"):
                self._run.hyperparameters[name] = _parse_value(item.value_json)


class _NotALogError(Exception):
    """Raised if a file is not a transaction log of W&B."""


def _name(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _contents(file: Any) -> Iterator[bytes | None]:
    """Yield the content of each record in a transaction log; None for a damaged record.

    The file is a header and then blocks of 32 KiB (the format of LevelDB's logs). A record consists of one or more
    fragments. Each fragment has a checksum, a length and a kind, and does not cross the end of a block.
    """
    head = file.read(_FILE_HEADER_BYTES)
    if head[:4] != b":W&B":
        raise _NotALogError("it is not a log of W&B")
    pieces: list[bytes] | None = None
    block, place = head + file.read(_BLOCK_BYTES - _FILE_HEADER_BYTES), _FILE_HEADER_BYTES
    while len(block) > place:
        while place + _FRAGMENT_HEADER_BYTES <= len(block):
            checksum, length, kind = struct.unpack_from("<IHB", block, place)
            content = block[place + _FRAGMENT_HEADER_BYTES : place + _FRAGMENT_HEADER_BYTES + length]
            if kind == 0 and length == 0:  # the rest of the block is padding
                place = _BLOCK_BYTES
                break
            if len(content) < length or zlib.crc32(bytes([kind]) + content) != checksum or kind > _LAST_FRAGMENT:
                # The fragment is damaged and its length may be wrong, so skip the rest of the block.
                pieces, place = None, _BLOCK_BYTES
                yield None
                break
            place += _FRAGMENT_HEADER_BYTES + length
            if kind in (_FULL_FRAGMENT, _FIRST_FRAGMENT):
                pieces = []
            if pieces is None:  # the start of this record is damaged, so skip it
                continue
            pieces.append(content)
            if sum(map(len, pieces)) > _MAX_RECORD_BYTES:
                pieces = None
                yield None
            elif kind in (_FULL_FRAGMENT, _LAST_FRAGMENT):
                yield b"".join(pieces)
                pieces = None
        block, place = file.read(_BLOCK_BYTES), 0
    if pieces:
        yield None
