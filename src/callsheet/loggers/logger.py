"""The base class of loggers, the callbacks that write metrics and other data to a destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callsheet.core.callback import Callback, OnError, Phase
from callsheet.core.context import Context
from callsheet.core.costs import CostReport, Window


class Logger(Callback):
    """The base class of loggers. Override `on_log` to write metrics records, and other methods to write tables, images and so on.

    A logger runs on the first rank, after all callbacks that measure and decide. Its errors are reported without ending the run.
    """

    phase: Phase = "report"
    ranks = "zero"
    on_error: OnError | None = "isolate"

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Log hyperparameters of the run. `values` are plain data by name, which may be nested.

        This is called with the run's configuration (`ctx.run.config`), if there is one, after the checkpoint was loaded, and with what
        callbacks pass to `ctx.log_hyperparameters`. Later values replace earlier ones.
        """

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log the table `name`. Each of the `rows` is a sequence of cells, one for each of the `columns`."""

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Log `images` under the name `name`.

        An image is an array or tensor of shape (height, width), (height, width, 3) or (3, height, width), with integers from 0 to 255
        or floats from 0 to 1.
        """

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """Log the file at `path`, which a callback has written, such as a trace or an exported model.

        `name` is its name in the destination, such as `traces/step-10.json`.
        """

    def log_call_sheet(self, ctx: Context, sheet: str) -> None:
        """Log the call sheet: `sheet` is a printable table of all handlers. This is called once, after the checkpoint was loaded."""

    def log_settings(self, ctx: Context, settings: Mapping[str, Any]) -> None:
        """Log `settings`: with which model, optimizer, scheduler, callbacks and options the run was started, as plain data.

        This is called once, after the checkpoint was loaded. The values are those before that.
        """

    def log_costs(self, ctx: Context, report: CostReport) -> None:
        """Log `report`: the time that the callbacks in this process have taken so far. Each report replaces the previous one."""

    def log_timeline(self, ctx: Context, window: Window) -> None:
        """Log `window`, a timeline of some consecutive steps: when each span and each callback ran."""


for _method in (
    "log_hyperparameters", "log_table", "log_images", "log_file", "log_call_sheet", "log_settings", "log_costs", "log_timeline"
):  # fmt: skip
    getattr(Logger, _method).does_nothing = True  # skip the method for loggers that do not override it
