"""Records, settings, images and tables in TensorBoard's event files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from callsheet.context import Context, Outcome
from callsheet.errors import ConfigError
from callsheet.loggers.file_names import folder_of, path_from
from callsheet.loggers.pixels import as_pixels, png
from callsheet.loggers.tracker import Opened, Tracker, plain

_QUEUE = 1000  # events that wait for the disk before the lane does


class TensorboardLogger(Tracker):
    """Write event files, which `tensorboard --logdir runs` draws: each metric over the step.

    A resume goes on in the same folder with a file of its own, which hides the steps after the checkpoint: they did not happen. A run
    that begins anew in its old folder hides all that is there. (TensorBoard's fast loader hides a step only of metrics that come again;
    with `--load_fast=false` it hides all.) What is measured a second time at the checkpoint's own step, such as an
    evaluation that followed the save, stands twice. Numbers are kept with 32 bits, as TensorBoard does; NaN and infinite ones as such.

    Settings are the text `hyperparameters`, and, as they are at the first record, what TensorBoard's HParams compares. Tables are text,
    `outcome` and `exception` too. Files are not shown. It is written in a lane; all that was logged is on disk when a checkpoint has been
    saved, soon after a signal or an exception, and at the run's end.

    Args:
        folder: where runs stand side by side, each in the folder of its name; None: `tensorboard` in the run's own folder.
        flush_seconds: the longest that something waits before it can be seen.

    Raises:
        ConfigError: `flush_seconds` is not above 0, or, when a run begins, there is no folder.
        MissingPackage: tensorboard is not installed.
    """

    writes_to_run_folder = True
    package = "tensorboard"
    extra = "tensorboard"
    state_is_ready = False  # a checkpoint knows of no more than the files

    def __init__(self, *, folder: str | Path | None = None, flush_seconds: float = 10.0) -> None:
        if not flush_seconds > 0:
            raise ConfigError(f"flush_seconds={flush_seconds!r}: give more than 0")
        super().__init__()
        self.folder = folder
        self.flush_seconds = flush_seconds
        self._writer: Any = None
        self._told: dict[str, Any] = {}  # settings, by dotted name
        self._is_compared = False  # HParams takes the first that it finds

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        """A checkpoint should not know of more than the files."""
        self._flush()

    def on_preempt(self, ctx: Context) -> None:
        """There may be no later."""
        self._flush()

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table as text."""
        self._text(name, _table(columns, rows), ctx.step)

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Images; where there are several, as `<name>/<number>`."""
        if self.is_open:
            summary = _summary_pb2().Summary()
            for i, image in enumerate(images):
                pixels = as_pixels(image)
                shown = summary.value.add(tag=f"{name}/{i}" if len(images) > 1 else name).image
                shown.height, shown.width, shown.colorspace = pixels.shape
                shown.encoded_image_string = png(pixels)
            self._add(ctx.step, summary=summary)

    # --- what a tracker is asked for ---

    def _open(self, ctx: Context, run_id: str | None) -> Opened:
        self._module()
        folder = self._place(ctx)
        folder.mkdir(parents=True, exist_ok=True)
        begun = [
            int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*") if path.name.split(".")[3].isdigit()
        ]
        pause = max(begun, default=0) + 1 - time.time()
        if 0 < pause <= 1:  # files are read in the order of their names, which begin with whole seconds
            time.sleep(pause)
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(
            str(folder), _QUEUE, self.flush_seconds
        )
        goes_on = run_id is not None and ctx.checkpoint is not None
        log = import_module("tensorboard.compat.proto.event_pb2").SessionLog
        # TensorBoard hides later steps at a start, but not at the first that it sees: so the first process tells its own as well
        self._add(ctx.checkpoint.step + 1 if goes_on and ctx.checkpoint else 0, session_log=log(status=log.START))
        self._told, self._is_compared = {}, False
        return Opened(ctx.run.name)

    def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
        self._compare(ctx)
        kind = _summary_pb2().Summary
        self._add(ctx.record.step, summary=kind(value=[kind.Value(tag=name, simple_value=values[name]) for name in values]))

    def _settings(self, ctx: Context, values: Mapping[str, Any]) -> None:
        self._told |= values
        self._text("hyperparameters", _table(["name", "value"], sorted(self._told.items())), ctx.step)

    def _fail(self, ctx: Context, error: str) -> None:
        self._text("exception", f"    {error}".replace("\n", "\n    "), ctx.step)
        self._flush()

    def _close(self, ctx: Context, outcome: Outcome) -> None:
        writer = self._writer
        try:
            self._compare(ctx)
            self._text("outcome", outcome.value, ctx.step)
        finally:
            self._writer = None
            writer.close()

    def _place(self, ctx: Context) -> Path:
        if self.folder is None:
            return folder_of(self, ctx) / "tensorboard"
        place = Path(self.folder, path_from(ctx.run.name))
        return place / path_from(self.name) if self.name else place

    def _compare(self, ctx: Context) -> None:
        """Give HParams the settings, once."""
        if self._told and not self._is_compared:
            self._is_compared = True
            known = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in self._told.items()}
            hparams_pb = import_module("tensorboard.plugins.hparams.summary_v2").hparams_pb
            self._add(ctx.step, summary=hparams_pb(known, trial_id=ctx.run.name))

    def _text(self, tag: str, markdown: str, step: int) -> None:
        if self._writer is not None:
            self._add(step, summary=import_module("tensorboard.plugins.text.summary_v2").text_pb(tag, markdown))

    def _add(self, step: int, **what: Any) -> None:
        event = import_module("tensorboard.compat.proto.event_pb2").Event
        self._writer.add_event(event(step=step, wall_time=time.time(), **what))

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()


def _summary_pb2() -> Any:
    return import_module("tensorboard.compat.proto.summary_pb2")


def _table(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *([plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "<br>")
