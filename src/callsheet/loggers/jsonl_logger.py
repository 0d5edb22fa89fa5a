"""The run's folder as JSON lines: metrics, events, settings, tables, images, costs."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import callsheet
from callsheet.callback import label_of
from callsheet.context import Context, MetricsRecord
from callsheet.costs import CostReport, Window
from callsheet.errors import ConfigError
from callsheet.loggers.file_names import folder_of, path_from, replace_file
from callsheet.loggers.image_writer import ImageWriter
from callsheet.loggers.json_text import json_text
from callsheet.loggers.jsonl_reader import METRICS, read_metrics
from callsheet.loggers.line_writer import LineWriter
from callsheet.loggers.logger import Logger
from callsheet.loggers.resumption import records_before

_FIELDS = tuple(field.name for field in fields(MetricsRecord))


class JSONLLogger(Logger):
    """Write what is logged, and what happens, to the run's folder: the run's own account of itself, which is only ever added to.

    `metrics.jsonl` has one line a record: the fields of `MetricsRecord` and `time`, in seconds since 1970; after a resume a line with
    `resumed_from_step`, and `records`, the number of those before it that still count. `read_metrics` reads it. `events.jsonl` tells
    starts, with versions, process and host, evaluations, checkpoints, files, and how the run ended; `hyperparameters.json` the settings;
    `tables/<name>.jsonl` has one line for each time that a table was logged; `images.jsonl` one for each time that images were, which
    stand in `images/<name>/<step>-<number>.png`; `costs.jsonl` what the callbacks have cost this process so far, `timeline.jsonl` where
    the time of a few steps went. NaN and infinite numbers are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which `float()` reads;
    what JSON does not know is written as its `str()`.

    Lines and images are written by threads, so that training waits for no disk but at evaluations, checkpoints, signals, exceptions and
    the run's end, when all of them are written. A killed process loses those of the last `flush_seconds`, and may tear one, which readers pass
    by. Lines that the disk does not take wait until it does. With a `name` of its own it writes to the folder of that name in the run's.

    Args:
        flush_seconds: the longest that a line waits.

    Raises:
        ConfigError: `flush_seconds` is not above 0, or, when a run begins, it has no folder.
    """

    writes_to_run_folder = True
    transport_ignore = ("_resumed_records",)

    def __init__(self, *, flush_seconds: float = 0.5) -> None:
        if not flush_seconds > 0:
            raise ConfigError(f"flush_seconds={flush_seconds}: give more than 0")
        self._seconds = flush_seconds
        self._folder = Path()
        self._writer: LineWriter | None = None  # until the run may write
        self._images: ImageWriter | None = None  # until there are any
        self._process = ""
        self._records = 0  # those that count
        self._resumed_records: int | None = None  # as the checkpoint says
        self._pictures: dict[str, tuple[int, int]] = {}  # by name: the last step, and how many it has

    # --- what happens ---

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Forget what an earlier run's checkpoint said."""
        self._resumed_records = None

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Begin, or go on where the checkpoint was saved."""
        self._close()
        self._folder = folder_of(self, ctx)
        resumed, there = ctx.checkpoint, read_metrics(self._folder)
        self._records = records_before(ctx, [record.step for record in there], self._resumed_records)
        self._pictures = {}
        self._process = f"{ctx.run.rank}-{os.urandom(4).hex()}"
        run = ctx.run
        self._writer = LineWriter(self._folder, self._seconds, may_write=lambda: not run.has_lost_folder)
        if resumed is not None or there:
            step = resumed.step if resumed is not None else 0
            self._append(METRICS, {"resumed_from_step": step, "records": self._records, "time": time.time()})
        told: dict[str, Any] = {
            "world_size": ctx.run.world_size,
            "restart_count": ctx.run.restart_count,
            "device": ctx.run.device,
        }
        path = resumed.path if resumed is not None else None
        self._event(
            ctx, "run_start", flush=True, run=ctx.run.name, resumed_from=path, process=self._process, **told, **_whereabouts()
        )
        if ctx.run.config:
            self.log_hyperparameters(ctx, ctx.run.config)

    def on_log(self, ctx: Context) -> None:
        """One line of metrics."""
        if self._writer is not None:
            self._records += 1
            self._append(METRICS, {**{name: getattr(ctx.record, name) for name in _FIELDS}, "time": time.time()})

    def on_eval_all_end(self, ctx: Context) -> None:
        """The evaluation's results."""
        self._event(ctx, "evaluation", flush=True, standalone=ctx.standalone, results=ctx.eval_results)

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        """A checkpoint counts no record that a killed process would lose."""
        self._flush()

    def on_checkpoint_published(self, ctx: Context) -> None:
        """Where a checkpoint stands."""
        assert ctx.checkpoint is not None
        self._event(ctx, "checkpoint", flush=True, checkpoint=asdict(ctx.checkpoint))

    def on_preempt(self, ctx: Context) -> None:
        """A signal came."""
        self._event(ctx, "preempt", flush=True)

    def on_exception(self, ctx: Context) -> None:
        """What was raised, and where."""
        error = ctx.exception
        self._event(ctx, "exception", flush=True, type=type(error).__name__, message=str(error), span=ctx.span)

    def on_run_end(self, ctx: Context) -> None:
        """How the run ended."""
        writer = self._writer
        if writer is not None:
            more: dict[str, Any] = {"reason": ctx.run.outcome_reason} if ctx.run.outcome_reason else {}
            if writer.lost:
                more["lines_lost"] = writer.lost
            try:
                self._event(ctx, "run_end", outcome=ctx.run.outcome, seconds=ctx.state.timestamp.seconds, **more)
            finally:
                self._close()

    # --- what is logged ---

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Add to the settings that stand there."""
        if self._writer is not None:
            path = self._folder / "hyperparameters.json"
            try:
                known = json.loads(path.read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):  # ValueError: the disk was full, or somebody else wrote there
                known = {}
            replace_file(path, f"{json_text({**known, **values}, indent=1)}\n".encode())

    def log_call_sheet(self, ctx: Context, sheet: str) -> None:
        """A file of its own."""
        if self._writer is not None:
            replace_file(self._folder / "call_sheet.txt", f"{sheet}\n".encode())

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """One line: the step, the columns and all rows."""
        line = {"step": ctx.step, "name": name, "columns": columns, "rows": rows, "time": time.time()}
        self._append(f"tables/{path_from(name)}.jsonl", line)

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """A file each, and a line that names them."""
        if self._writer is not None:
            step, before = self._pictures.get(name, (ctx.step, 0))
            first = before if step == ctx.step else 0
            self._pictures[name] = (ctx.step, first + len(images))
            files = [f"images/{path_from(name)}/{ctx.step}-{first + number}.png" for number in range(len(images))]
            line = {"step": ctx.step, "name": name, "files": files, "time": time.time()}
            self._images = self._images or ImageWriter(label_of(self), self._folder)
            self._images.write(files, images, then=partial(self._append, "images.jsonl", line))

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """An event that says where the file is."""
        self._event(ctx, "file", name=name, path=path)

    def log_costs(self, ctx: Context, report: CostReport) -> None:
        """A line; the last one of a process holds all that came before."""
        self._append("costs.jsonl", {**self._moment(ctx), **report.to_dict()})

    def log_timeline(self, ctx: Context, window: Window) -> None:
        """A line for a few steps."""
        self._append("timeline.jsonl", {**self._moment(ctx), **window.to_dict()})

    # --- state ---

    def state_dict(self) -> Mapping[str, Any]:
        """How many records come before this checkpoint."""
        return {"records": self._records}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._resumed_records = state["records"]

    def _event(self, ctx: Context, event: str, *, flush: bool = False, **told: Any) -> None:
        self._append("events.jsonl", {"time": time.time(), "event": event, "step": ctx.step, "epoch": ctx.epoch, **told})
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
        images, self._images = self._images, None
        try:
            if images is not None:
                images.close()  # which gives the writer its last lines
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def _moment(self, ctx: Context) -> dict[str, Any]:
        return {"time": time.time(), "step": ctx.step, "process": self._process}

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.append(name, json_text(line).encode())


def _whereabouts() -> dict[str, Any]:
    """Which programs this is, and where it runs."""
    torch = sys.modules.get("torch")
    versions = {
        "callsheet": callsheet.__version__,
        "python": platform.python_version(),
        "torch": getattr(torch, "__version__", None),
    }
    return {"versions": versions, "pid": os.getpid(), "host": socket.gethostname()}
