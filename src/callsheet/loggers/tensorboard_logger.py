"""Logging to TensorBoard's event files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from callsheet.core.context import Context
from callsheet.core.run_state import Outcome, RunInfo
from callsheet.errors import ConfigError
from callsheet.loggers.support.file_names import folder_of, path_from
from callsheet.loggers.support.pixels import as_pixels, png
from callsheet.loggers.support.tracker import Opened, Tracker, plain

_MAX_QUEUED_EVENTS = 1000  # size of the writer's queue; if it is full, the logger's thread waits for the disk


class TensorboardLogger(Tracker):
    """Log metrics records, hyperparameters, images and tables to event files, which `tensorboard --logdir runs` shows.

    A resume writes a new file to the same folder; this file makes TensorBoard hide older values of steps after the checkpoint. If
    a run starts from the beginning in a folder with older files, all older values are hidden. (TensorBoard's fast loader hides
    only steps of metrics that are logged again; with `--load_fast=false`, TensorBoard hides all.) Values that are measured again
    at the checkpoint's own step, such as an evaluation after the save, appear twice. Numbers have 32 bits, as always in
    TensorBoard; NaN and infinite values are kept.

    Hyperparameters are logged as the text `hyperparameters`. Those that are known at the first record also appear in
    TensorBoard's HParams. Tables, `outcome` and `exception` are text. Files are not logged. The logger runs on a background
    thread (a lane). Everything that was logged is on disk when a checkpoint has been saved, soon after a signal or an exception,
    and at the run's end.

    Args:
        folder: the folder that holds several runs, each in a folder with its name; None means `tensorboard` in the run's own folder.
        flush_seconds: the maximum time, in seconds, until logged values are visible.

    Raises:
        ConfigError: `flush_seconds` is not above 0, or the run has no folder and none was given.
        MissingPackage: tensorboard is not installed.
    """

    writes_to_run_folder = True
    package = "tensorboard"
    extra = "tensorboard"
    state_is_ready = False  # False, so that a checkpoint waits until all earlier records are in the files

    def __init__(self, *, folder: str | Path | None = None, flush_seconds: float = 10.0) -> None:
        if not flush_seconds > 0:
            raise ConfigError(f"flush_seconds={flush_seconds!r}: give more than 0")
        super().__init__()
        self.folder = folder
        self.flush_seconds = flush_seconds
        self._writer: Any = None
        self._run: RunInfo | None = None  # the current run; None while no writer is open
        self._hyperparameters: dict[str, Any] = {}  # hyperparameters logged so far, by dotted name
        # Whether the event for TensorBoard's HParams page was written. The page reads only the first such event.
        self._has_hparams = False

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        """Write all queued metrics records to the files, so that everything logged before the checkpoint is on disk."""
        self._flush()

    def on_preempt(self, ctx: Context) -> None:
        """Write all queued metrics records to the files, because the process may be killed soon."""
        self._flush()

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table as text."""
        self._text(name, _table(columns, rows), ctx.step)

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Log images. Several images are named `<name>/<number>`."""
        if self.is_open:
            summary = _summary_pb2().Summary()
            for i, image in enumerate(images):
                pixels = as_pixels(image)
                shown = summary.value.add(tag=f"{name}/{i}" if len(images) > 1 else name).image
                shown.height, shown.width, shown.colorspace = pixels.shape
                shown.encoded_image_string = png(pixels)
            self._add(ctx.step, summary=summary)

    # --- methods of the base class `Tracker` that a logger must implement ---

    def _open(self, ctx: Context, run_id: str | None) -> Opened:
        self._module()
        folder = self._place(ctx)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = ctx.run
        begun = [
            int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*") if path.name.split(".")[3].isdigit()
        ]
        pause = max(begun, default=0) + 1 - time.time()
        if 0 < pause <= 1:  # wait for the next second, because TensorBoard sorts files by names that contain whole seconds
            time.sleep(pause)
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(
            str(folder), _MAX_QUEUED_EVENTS, self.flush_seconds
        )
        is_resumed = run_id is not None and ctx.checkpoint is not None
        log = import_module("tensorboard.compat.proto.event_pb2").SessionLog
        # After a start event, TensorBoard hides the old values of the event's step and of later steps. A resumed run logs these
        # steps again. TensorBoard ignores the first start event of a run. So write a start event in a new run too, so that the
        # start event of a resume is never the first.
        self._add(ctx.checkpoint.step + 1 if is_resumed and ctx.checkpoint else 0, session_log=log(status=log.START))
        self._hyperparameters, self._has_hparams = {}, False
        return Opened(ctx.run.name)

    def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
        self._write_hparams(ctx)
        kind = _summary_pb2().Summary
        self._add(ctx.record.step, summary=kind(value=[kind.Value(tag=name, simple_value=values[name]) for name in values]))

    def _settings(self, ctx: Context, values: Mapping[str, Any]) -> None:
        self._hyperparameters |= values
        self._text("hyperparameters", _table(["name", "value"], sorted(self._hyperparameters.items())), ctx.step)

    def _fail(self, ctx: Context, error: str) -> None:
        self._text("exception", f"    {error}".replace("\n", "\n    "), ctx.step)
        self._flush()

    def _close(self, ctx: Context, outcome: Outcome) -> None:
        writer = self._writer
        try:
            self._write_hparams(ctx)
            self._text("outcome", outcome.value, ctx.step)
        finally:
            self._writer = self._run = None
            writer.close()

    def _place(self, ctx: Context) -> Path:
        if self.folder is None:
            return folder_of(self, ctx) / "tensorboard"
        place = Path(self.folder, path_from(ctx.run.name))
        return place / path_from(self.name) if self.name else place

    def _write_hparams(self, ctx: Context) -> None:
        """Write the hyperparameters for TensorBoard's HParams page, if they are not written yet."""
        if self._hyperparameters and not self._has_hparams:
            self._has_hparams = True
            values = self._hyperparameters.items()
            known = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in values}
            hparams_pb = import_module("tensorboard.plugins.hparams.summary_v2").hparams_pb
            self._add(ctx.step, summary=hparams_pb(known, trial_id=ctx.run.name))

    def _text(self, tag: str, markdown: str, step: int) -> None:
        if self._writer is not None:
            self._add(step, summary=import_module("tensorboard.plugins.text.summary_v2").text_pb(tag, markdown))

    def _add(self, step: int, **what: Any) -> None:
        if self._run is not None and self._run.has_lost_folder and self.folder is None:
            return
        event = import_module("tensorboard.compat.proto.event_pb2").Event
        self._writer.add_event(event(step=step, wall_time=time.time(), **what))

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()


def _summary_pb2() -> Any:
    return import_module("tensorboard.compat.proto.summary_pb2")


def _table(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as Markdown text."""
    lines = [columns, ["---"] * len(columns), *([plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "<br>")
