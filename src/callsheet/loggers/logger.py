"""What a logger is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.costs import CostReport, Window


class Logger(Callback):
    """The base of all loggers: override `on_log` for the records, and what else the logger can store.

    A logger runs on the first rank, after all who measure and decide, and its errors are reported without ending the run.
    """

    phase = "report"
    ranks = "zero"
    on_error = "isolate"

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Settings of the run, by name; may come several times, and a later value replaces an earlier one."""

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table: one sequence of cells a row, as long as `columns`."""

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Images: arrays or tensors of shape (height, width), (height, width, 3) or (3, height, width)."""

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """A file that was written."""

    def log_call_sheet(self, ctx: Context, sheet: str) -> None:
        """Who is called when, as a printable table; told once, when the checkpoint has been loaded."""

    def log_costs(self, ctx: Context, report: CostReport) -> None:
        """What the callbacks have cost so far in this process; every telling replaces the one before."""

    def log_timeline(self, ctx: Context, window: Window) -> None:
        """Where the time of a few steps in a row went."""


for _method in ("log_hyperparameters", "log_table", "log_images", "log_file", "log_call_sheet", "log_costs", "log_timeline"):
    getattr(Logger, _method).does_nothing = True  # nobody calls it where it is not overridden
