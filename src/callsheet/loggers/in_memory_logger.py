"""Keeps in memory what a run logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from callsheet.core.context import Context
from callsheet.core.costs import CostReport
from callsheet.core.run_state import MetricsRecord
from callsheet.errors import ConfigError, did_you_mean
from callsheet.loggers.logger import Logger


class InMemoryLogger(Logger):
    """Keep all logged data in memory, so that a notebook or a test can read the data.

    This logger stores data only on the first rank, is emptied when a run begins or resumes, and is not saved in checkpoints. The
    callback `History` stores only records and evaluations, but on all ranks and in every checkpoint, so a resumed run has the
    values from its beginning.

    Args:
        most: the number of records to keep and, for each name, the number of tables and of batches of images; the newest are
            kept. None keeps all.
        images: whether to keep images. They are arrays of shape (height, width, 3) and type uint8.

    Raises:
        ConfigError: `most` is less than 1.
    """

    def __init__(self, *, most: int | None = None, images: bool = False) -> None:
        if most is not None and most < 1:
            raise ConfigError(f"most={most}: keep at least one, or all with None")
        self._most = most
        self._keeps_images = images
        self._forget()

    def _forget(self) -> None:
        self.records: list[MetricsRecord] = []
        """The metrics records, with the values that callbacks have added to them."""
        self.hyperparameters: dict[str, Any] = {}
        """The run's configuration, and the hyperparameters that were logged."""
        self.tables: dict[str, list[tuple[int, list[str], list[list[Any]]]]] = {}
        """For each table name, a list with the step, the columns and the rows of every table that was logged under this name."""
        self.images: dict[str, list[tuple[int, list[Any]]]] = {}
        """For each name, a list with the step and the images of every call of `log_images` with this name."""
        self.files: dict[str, Path] = {}
        """For each name of a logged file, the path that was logged last."""
        self.costs: CostReport | None = None
        """The latest report of the time that each callback has taken so far, or None before the first report."""

    def history(self, name: str) -> tuple[list[int], list[float]]:
        """Return two lists for a metric: the steps at which it was logged, and its values.

        Args:
            name: the full name of the metric, such as `train/loss`.

        Raises:
            KeyError: no record has the metric; the message suggests the nearest name.
        """
        found = [(record.step, record.values[name]) for record in self.records if name in record.values]
        if not found:
            names = list(dict.fromkeys(name for record in self.records for name in record.values))
            raise KeyError(f"no record has {name!r}{did_you_mean(name, names)} (logged: {', '.join(names) or 'nothing'})")
        return [step for step, _ in found], [value for _, value in found]

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Discard what was logged in an earlier run with this logger."""
        self._forget()

    def on_log(self, ctx: Context) -> None:
        self._keep(self.records, replace(ctx.record, values=dict(ctx.record.values)))

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        self.hyperparameters.update(values)

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._keep(self.tables.setdefault(name, []), (ctx.step, list(columns), [list(row) for row in rows]))

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Store the images if the constructor's argument `images` is True."""
        if self._keeps_images:
            from callsheet.loggers.support.pixels import as_pixels  # imported here because `pixels` needs numpy

            self._keep(self.images.setdefault(name, []), (ctx.step, [as_pixels(image) for image in images]))

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        self.files[name] = path

    def log_costs(self, ctx: Context, report: CostReport) -> None:
        """Store the report of the time that callbacks have taken so far, in place of the previous report."""
        self.costs = report

    def _keep(self, kept: list[Any], what: Any) -> None:
        kept.append(what)
        if self._most is not None:
            del kept[: -self._most]
