"""The run's folder as JSON lines: metrics, events, settings and tables."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from callsheet.context import Context, LogRecord
from callsheet.errors import ConfigError
from callsheet.loggers.logger import Logger

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
HYPERPARAMETERS = "hyperparameters.json"
TABLES = "tables"


class RunLog(Logger):
    """Write what is logged, and what happens, to the run's folder.

    `metrics.jsonl` has one line a record: the fields of `LogRecord` and `time`, in seconds since 1970; after a resume a line with
    `resumed_from_step`, and `records`, the number of those before it that still count. `events.jsonl` tells starts, evaluations,
    checkpoints, and how the run ended; `hyperparameters.json` the settings; `tables/<name>.jsonl` has one line for each time that a
    table was logged. NaN and infinite numbers are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which `float()` reads; what
    JSON does not know is written as its `str()`.

    Lines are only ever appended, each in one write: a killed process leaves at most its last line torn, which readers pass by. The
    folder is made with the first line, when it is certain that this run may write there: a run that fails in its set-up writes none.

    Raises:
        ConfigError: the run has no folder.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None  # until the run may write
        self._lines: dict[Path, _Lines] = {}
        self._records = 0  # those that count
        self._resumed_records: int | None = None  # as the checkpoint says

    # --- what happens ---

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Begin, or go on where the checkpoint was saved."""
        self._close()
        if ctx.run.folder is None:
            raise ConfigError("the run has no folder to write to; give it one, or leave RunLog out")
        self._folder = ctx.run.folder
        resumed, counted = ctx.checkpoint, self._resumed_records
        step = resumed.step if resumed is not None else 0
        there = read_metrics(self._folder)
        if resumed is None or not Path(resumed.path).absolute().is_relative_to(self._folder.absolute()):
            self._records = 0  # what stands there is of no past of this run
        elif counted is not None:
            self._records = min(counted, len(there))  # the machine may have lost lines that the checkpoint counts
        else:
            self._records = sum(record.step <= step for record in there)
        if resumed is not None or there:
            self._append(METRICS, {"resumed_from_step": step, "records": self._records, "time": time.time()})
        told = {"world_size": ctx.run.world_size, "restart_count": ctx.run.restart_count, "device": ctx.run.device}
        self._event(ctx, "run_start", run=ctx.run.name, resumed_from=resumed.path if resumed is not None else None, **told)
        if ctx.run.config:
            self.log_hyperparameters(ctx, ctx.run.config)

    def on_log(self, ctx: Context) -> None:
        """One line of metrics."""
        if self._folder is not None:
            self._append(METRICS, {**asdict(ctx.record), "time": time.time()})
            self._records += 1

    def on_eval_all_end(self, ctx: Context) -> None:
        """The evaluation's results."""
        self._event(ctx, "evaluation", standalone=ctx.standalone, results=ctx.eval_results)

    def on_checkpoint_published(self, ctx: Context) -> None:
        """Where a checkpoint stands."""
        assert ctx.checkpoint is not None
        self._event(ctx, "checkpoint", checkpoint=asdict(ctx.checkpoint))

    def on_preempt(self, ctx: Context) -> None:
        """A signal came."""
        self._event(ctx, "preempt")

    def on_exception(self, ctx: Context) -> None:
        """What was raised, and where."""
        self._event(ctx, "exception", type=type(ctx.exception).__name__, message=str(ctx.exception), span=ctx.span)

    def on_run_end(self, ctx: Context) -> None:
        """How the run ended."""
        self._event(ctx, "run_end", outcome=ctx.run.outcome, seconds=ctx.state.timestamp.seconds)
        self._close()

    # --- what is logged ---

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Add to the settings that stand there."""
        if self._folder is None:
            return
        path = self._folder / HYPERPARAMETERS
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.new")
        draft.write_text(_json({**known, **values}, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, path)

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """One line: the step, the columns and all rows."""
        if self._folder is not None:
            plain = "/".join(re.sub(r"[^\w.-]", "_", part).lstrip(".") or "_" for part in name.split("/"))
            self._append(f"{TABLES}/{plain}.jsonl", {"step": ctx.step, "columns": columns, "rows": rows, "time": time.time()})

    # --- state ---

    def state_dict(self) -> Mapping[str, Any]:
        """How many records come before this checkpoint."""
        return {"records": self._records}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._resumed_records = state["records"]

    def _event(self, ctx: Context, event: str, **told: Any) -> None:
        if self._folder is not None:
            self._append(EVENTS, {"time": time.time(), "event": event, "step": ctx.step, "epoch": ctx.epoch, **told})

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        assert self._folder is not None
        path = self._folder / name
        if path not in self._lines:
            self._lines[path] = _Lines(path)
        self._lines[path].append(_json(line).encode())

    def _close(self) -> None:
        for lines in self._lines.values():
            lines.close()
        self._lines = {}
        self._folder = None


def read_metrics(folder: str | os.PathLike[str]) -> list[LogRecord]:
    """The records in a run's folder, in the order in which they were logged; none where there is no `metrics.jsonl`.

    Where the run was resumed, the records of the future that did not happen are left out, so that the curve goes on without doubles.
    Torn lines are passed by. May be called while the run goes on.
    """
    try:
        content = (Path(folder) / METRICS).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    records: list[LogRecord] = []
    for text in content.split("\n"):
        try:
            line = json.loads(text)
        except ValueError:  # torn, or the end
            continue
        if "resumed_from_step" in line:
            del records[line["records"] :]
        else:
            known = {field.name: line[field.name] for field in fields(LogRecord)}
            records.append(LogRecord(**{**known, "values": {name: float(value) for name, value in line["values"].items()}}))
    return records


class _Lines:
    """A file that lines are appended to, each in one write that no buffer of ours delays."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by `close`
        self._is_torn = False
        if self._file.tell():
            with open(path, "rb") as file:
                file.seek(-1, os.SEEK_END)
                self._is_torn = file.read() != b"\n"

    def append(self, line: bytes) -> None:
        """Write a line; one that was torn before it, by a killed process or a full disk, is ended first."""
        content = (b"\n" if self._is_torn else b"") + line + b"\n"
        self._is_torn = True
        written = self._file.write(content)
        if written != len(content):
            raise OSError(f"{self._file.name}: only {written} of {len(content)} bytes could be written; free space on the disk")
        self._is_torn = False

    def close(self) -> None:
        self._file.close()


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    """`value` as JSON knows it."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):  # tensors and arrays
        values = value.tolist()
        return str(value) if type(values) is type(value) else _plain(values)
    return str(value)
