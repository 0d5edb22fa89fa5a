"""The base class of loggers, the callbacks that write metrics and other data to a destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callsheet.core.callback import Callback, OnError, Phase
from callsheet.core.context import Context
from callsheet.core.costs import CostReport, Window
from callsheet.core.ranks import RankGate


class Logger(Callback):
    """The base class of loggers. Override `on_log` to write metrics records, and other methods to write tables, images and so on.

    A logger runs on the first rank, after all callbacks that measure and decide. Its errors are reported without ending the run.
    """

    phase: Phase = "report"
    ranks: RankGate = "zero"
    on_error: OnError | None = "isolate"

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Log hyperparameters of the run.

        If the run has a configuration (`ctx.run.config`), callsheet calls this method with it after the checkpoint, if any, was
        loaded. callsheet also passes on the values of each call of `ctx.log_hyperparameters`. Later values replace earlier ones.

        Args:
            ctx: the context.
            values: plain data by name, which may be nested.
        """

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table, which a callback has passed to `ctx.log_table`.

        Args:
            ctx: the context.
            name: the name of the table.
            columns: the titles of the columns.
            rows: the rows, each with a cell for each column.
        """

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Log images, which a callback has passed to `ctx.log_images`.

        Args:
            ctx: the context.
            name: the name under which the images are logged.
            images: arrays or tensors of shape (height, width), (height, width, 3) or (3, height, width), with integers from 0 to
                255 or floats from 0 to 1.
        """

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """Log a file that a callback has written, such as a trace or an exported model.

        Args:
            ctx: the context.
            name: the name of the file in the destination, such as `traces/step-10.json`.
            path: where the file is.
        """

    def log_call_sheet(self, ctx: Context, sheet: str) -> None:
        """Log the call sheet (the table of all handlers). callsheet calls this method once, after the checkpoint, if any, was loaded.

        Args:
            ctx: the context.
            sheet: a printable table of all handlers.
        """

    def log_settings(self, ctx: Context, settings: Mapping[str, Any]) -> None:
        """Log the settings with which the run was started. callsheet calls this method once, after the checkpoint, if any, was loaded.

        Args:
            ctx: the context.
            settings: with which model, optimizer, scheduler, callbacks and options the run was started, as plain data. The values
                are those before the checkpoint was loaded.
        """

    def log_costs(self, ctx: Context, report: CostReport) -> None:
        """Log how much time the callbacks in this process have taken so far. Each report replaces the previous one.

        Args:
            ctx: the context.
            report: the time of each callback at each event, in seconds, and the failures.
        """

    def log_timeline(self, ctx: Context, window: Window) -> None:
        """Log a timeline: when each span and each callback ran in a few steps.

        Args:
            ctx: the context.
            window: the timeline of some consecutive steps.
        """


for _method in (
    "log_hyperparameters", "log_table", "log_images", "log_file", "log_call_sheet", "log_settings", "log_costs", "log_timeline"
):  # fmt: skip
    getattr(Logger, _method).does_nothing = True  # lets callsheet skip the method of loggers that do not override it
