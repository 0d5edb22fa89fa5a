"""Writes the metrics, events, hyperparameters, tables, images and costs of a run to files, mostly as JSON lines."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import callsheet
from callsheet.core.callback import label_of
from callsheet.core.context import Context
from callsheet.core.costs import CostReport, Window
from callsheet.core.run_state import MetricsRecord
from callsheet.errors import ConfigError, text_of
from callsheet.loggers.logger import Logger
from callsheet.loggers.support import environment
from callsheet.loggers.support.file_names import folder_of, path_from, replace_file
from callsheet.loggers.support.image_writer import ImageWriter
from callsheet.loggers.support.json_text import json_text
from callsheet.loggers.support.jsonl_reader import METRICS, read_metrics
from callsheet.loggers.support.line_writer import LineWriter
from callsheet.loggers.support.resumption import ValidRecords, valid_records

_ENVIRONMENT_SECONDS = (
    3.0  # how long the end of a run waits for the thread that records the versions of packages and the git commit
)
_RECORD_FIELDS = tuple(field.name for field in fields(MetricsRecord))


class JSONLLogger(Logger):
    """Write everything that is logged, and the events of the run, to files in the run's folder. Written lines are never changed.

    - `metrics.jsonl` has one line per record: the fields of `MetricsRecord` and `time`, in seconds since 1970. A resume adds a
      line with `resumed_from_step` and `records`, the number of earlier records that are still valid. `read_metrics` reads the
      file.
    - `events.jsonl` lists starts (with versions, process and host), evaluations, checkpoints, files, and the run's end. Once
      `ctx.run.inexact_counts` is set, each line also has the field `inexact_counts`.
    - `hyperparameters.json` holds the hyperparameters.
    - `settings.json` holds the model, the optimizer, the scheduler, the callbacks and their options, without what looks like a credential.
    - `environment.json` holds what the run was started with: the command, the git commit with uncommitted changes, the installed packages
      and the hardware. A thread collects these facts, and leaves out what looks like a credential.
    - `tables/<name>.jsonl` has one line for each time that the table was logged.
    - `images.jsonl` has one line for each time that images were logged; the images are in `images/<name>/<step>-<number>.png`.
    - `costs.jsonl` has the costs of the callbacks in this process so far, and `timeline.jsonl` the times of all spans and
      callbacks in some steps.

    NaN and infinite numbers are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which `float()` reads. Values that JSON does not
    have are written as their `str()`.

    Threads write lines and images, so training waits for the disk only at evaluations, checkpoints, signals, exceptions and the
    end of the run. At these times, all queued lines and images are written. A killed process loses the lines of the last
    `flush_seconds`, and may leave an incomplete line, which readers skip. Lines that cannot be written are kept and tried again.
    If the logger has a `name`, it writes to the folder of that name in the run's folder.

    Args:
        flush_seconds: the maximum time, in seconds, that a line is queued before it is written.

    Raises:
        ConfigError: `flush_seconds` is not above 0, or the run has no folder.
    """

    writes_to_run_folder = True
    transport_ignore = ("_resumed_records", "_valid")

    def __init__(self, *, flush_seconds: float = 0.5) -> None:
        if not flush_seconds > 0:
            raise ConfigError(f"flush_seconds={flush_seconds}: give more than 0")
        self._seconds = flush_seconds
        self._folder = Path()
        self._writer: LineWriter | None = None  # writes lines; None until the run may write to its folder
        self._images: ImageWriter | None = None  # writes images; None until the first images are logged
        self._process = ""
        # Number of valid metrics records. After a resume, records that are later than the checkpoint are invalid.
        self._records = 0
        self._resumed_records: int | None = None  # number of records when the loaded checkpoint was saved
        self._valid = ValidRecords()  # how many records are still valid after a resume; needed until the next record is logged
        self._eval_began = self._save_began = self._save_seconds = 0.0
        self._environment: threading.Thread | None = None  # the thread that reads git commit, packages and hardware
        # Name of logged images -> last step, and how many images were logged at that step.
        self._pictures: dict[str, tuple[int, int]] = {}

    # --- handlers of events ---

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Reset the record count, which may be from an earlier run with this logger."""
        self._resumed_records = None

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Create the run's log files or, in a resumed run, continue the existing log files."""
        self._close()
        self._folder = folder_of(self, ctx)
        resumed, there = ctx.checkpoint, read_metrics(self._folder)
        self._valid = valid_records(ctx, [record.step for record in there], self._resumed_records)
        self._records = self._valid.kept
        self._pictures = {}
        self._process = f"{ctx.run.rank}-{os.urandom(4).hex()}"
        run = ctx.run
        self._writer = LineWriter(self._folder, self._seconds, may_write=lambda: not run.has_lost_folder)
        if resumed is not None or there:
            self._append_resume()
        facts: dict[str, Any] = {
            "world_size": ctx.run.world_size,
            "restart_count": ctx.run.restart_count,
            "device": ctx.run.device,
        }
        resumed_from = resumed.path if resumed is not None else None
        self._event(
            ctx,
            "run_start",
            flush=True,
            run=ctx.run.name,
            resumed_from=resumed_from,
            process=self._process,
            **facts,
            **_process_and_versions(),
        )
        path, run = self._folder / environment.ENVIRONMENT_FILE, ctx.run

        def write(found: dict[str, Any]) -> None:
            if not run.has_lost_folder:
                replace_file(path, f"{json_text(found, indent=1)}\n".encode())

        self._environment = environment.record_environment(ctx.run.device, write)

    def on_log(self, ctx: Context) -> None:
        if self._writer is not None:
            if self._valid.are_repeated_by(ctx.record.step):
                self._records = self._valid.before
                self._append_resume()
            self._valid = ValidRecords()
            self._records += 1
            self._append(METRICS, {**{name: getattr(ctx.record, name) for name in _RECORD_FIELDS}, "time": time.time()})

    def on_eval_all_start(self, ctx: Context) -> None:
        """Store the time at which the evaluation starts, to log its duration."""
        self._eval_began = time.monotonic()

    def on_eval_all_end(self, ctx: Context) -> None:
        seconds = time.monotonic() - self._eval_began
        self._event(ctx, "evaluation", flush=True, standalone=ctx.standalone, results=ctx.eval_results, seconds=seconds)

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        """Write all queued lines, because the checkpoint stores how many records the file has. Store the save's start time."""
        self._flush()
        self._save_began = time.monotonic()

    def on_checkpoint_save_end(self, ctx: Context) -> None:
        """Store how long training waited for the save, which may continue in the background."""
        self._save_seconds = time.monotonic() - self._save_began

    def on_checkpoint_published(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        self._event(ctx, "checkpoint", flush=True, checkpoint=asdict(ctx.checkpoint), seconds=self._save_seconds)

    def on_preempt(self, ctx: Context) -> None:
        self._event(ctx, "preempt", flush=True)

    def on_exception(self, ctx: Context) -> None:
        if (error := ctx.exception) is not None:
            self._event(ctx, "exception", flush=True, type=type(error).__name__, message=text_of(error), span=ctx.span)

    def on_run_end(self, ctx: Context) -> None:
        writer = self._writer
        if writer is not None:
            more: dict[str, Any] = {"reason": ctx.run.outcome_reason} if ctx.run.outcome_reason else {}
            if writer.lost:
                more["lines_lost"] = writer.lost
            try:
                now = ctx.state.timestamp
                self._event(ctx, "run_end", outcome=ctx.run.outcome, seconds=now.seconds, epochs=now.epoch, **more)
            finally:
                self._close()

    # --- logging methods ---

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Add the hyperparameters to the file `hyperparameters.json`."""
        if self._writer is not None and not ctx.run.has_lost_folder:
            path = self._folder / "hyperparameters.json"
            try:
                known = json.loads(path.read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError, RecursionError):
                # `hyperparameters.json` does not exist, is damaged, or was not written by callsheet: start a new file.
                known = {}
            replace_file(path, f"{json_text({**known, **values}, indent=1)}\n".encode())

    def log_call_sheet(self, ctx: Context, sheet: str) -> None:
        if self._writer is not None and not ctx.run.has_lost_folder:
            replace_file(self._folder / "call_sheet.txt", f"{sheet}\n".encode())

    def log_settings(self, ctx: Context, settings: Mapping[str, Any]) -> None:
        """Write the run's settings to `settings.json`, in place of those from an earlier start of the run."""
        if self._writer is not None and not ctx.run.has_lost_folder:
            replace_file(self._folder / "settings.json", f"{json_text(settings, indent=1)}\n".encode())

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write the table as one JSON line with the step, the columns and all rows."""
        line = {"step": ctx.step, "name": name, "columns": columns, "rows": rows, "time": time.time()}
        self._append(f"tables/{path_from(name)}.jsonl", line)

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Write each image to a PNG file, and add a line with the file names to `images.jsonl`."""
        if self._writer is not None:
            step, before = self._pictures.get(name, (ctx.step, 0))
            first = before if step == ctx.step else 0
            self._pictures[name] = (ctx.step, first + len(images))
            files = [f"images/{path_from(name)}/{ctx.step}-{first + number}.png" for number in range(len(images))]
            line = {"step": ctx.step, "name": name, "files": files, "time": time.time()}
            run = ctx.run
            if self._images is None:
                self._images = ImageWriter(label_of(self), self._folder, may_write=lambda: not run.has_lost_folder)
            self._images.write(files, images, then=partial(self._append, "images.jsonl", line))

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        self._event(ctx, "file", name=name, path=path)

    def log_costs(self, ctx: Context, report: CostReport) -> None:
        """Append to `costs.jsonl` the time that this process's callbacks have taken so far. Only a process's last line counts."""
        self._append("costs.jsonl", {**self._moment(ctx), **report.to_dict()})

    def log_timeline(self, ctx: Context, window: Window) -> None:
        self._append("timeline.jsonl", {**self._moment(ctx), **window.to_dict()})

    # --- state for checkpoints, and private methods ---

    def state_dict(self) -> Mapping[str, Any]:
        """Return the number of metrics records so far. A resumed run thus finds the records written after the checkpoint."""
        return {"records": self._records}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._resumed_records = state["records"]

    def _append_resume(self) -> None:
        self._append(METRICS, {"resumed_from_step": self._valid.step, "records": self._records, "time": time.time()})

    def _event(self, ctx: Context, event: str, *, flush: bool = False, **facts: Any) -> None:
        if ctx.run.inexact_counts:
            facts["inexact_counts"] = ctx.run.inexact_counts
        self._append("events.jsonl", {"time": time.time(), "event": event, "step": ctx.step, "epoch": ctx.epoch, **facts})
        if flush:
            self._flush()

    def _flush(self) -> None:
        try:
            if self._images is not None:
                self._images.flush()
        finally:
            if self._writer is not None:
                self._writer.flush()

    def _close(self) -> None:
        if self._environment is not None:
            self._environment.join(_ENVIRONMENT_SECONDS)
            self._environment = None
        images, self._images = self._images, None
        try:
            if images is not None:
                images.close()  # close the image writer first, because it adds lines to the line writer
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def _moment(self, ctx: Context) -> dict[str, Any]:
        return {"time": time.time(), "step": ctx.step, "process": self._process}

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.append(name, json_text(line).encode())


def _process_and_versions() -> dict[str, Any]:
    """Return facts for the event `run_start`: process id, machine name, and the versions of callsheet, Python and torch."""
    torch = sys.modules.get("torch")
    versions = {
        "callsheet": callsheet.__version__,
        "python": platform.python_version(),
        "torch": getattr(torch, "__version__", None),
    }
    return {"versions": versions, "pid": os.getpid(), "host": socket.gethostname()}
