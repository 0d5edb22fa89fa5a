"""What a logger is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from callsheet.callback import Callback
from callsheet.context import Context


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
