"""What a run logs, kept in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from callsheet.context import Context, MetricsRecord
from callsheet.costs import CostReport
from callsheet.errors import ConfigError, did_you_mean
from callsheet.loggers.logger import Logger


class InMemoryLogger(Logger):
    """Keep what is logged on the object, to be read in a notebook or a test.

    A destination, as a file is: on the first rank, empty when a run begins, also a resumed one, and no part of checkpoints. The callback
    `History` is the other way about: records and evaluations alone, on all ranks, in every checkpoint, so that a resumed run knows its
    whole curve.

    Args:
        most: keep so many records, and so many tables and batches of images of each name, the newest; None keeps all.
        images: keep images, as arrays of shape (height, width, 3) and type uint8.

    Raises:
        ConfigError: `most` is less than 1.
        KeyError: from `history`, for a name that no record has told; the message names the nearest.
    """

    def __init__(self, *, most: int | None = None, images: bool = False) -> None:
        if most is not None and most < 1:
            raise ConfigError(f"most={most}: keep at least one, or all with None")
        self._most = most
        self._keeps_images = images
        self._forget()

    def _forget(self) -> None:
        self.records: list[MetricsRecord] = []
        """The records, with what others had added to them by then."""
        self.hyperparameters: dict[str, Any] = {}
        """The run's configuration, and what was logged."""
        self.tables: dict[str, list[tuple[int, list[str], list[list[Any]]]]] = {}
        """By name: step, columns and rows of each time."""
        self.images: dict[str, list[tuple[int, list[Any]]]] = {}
        """By name: step and images of each time."""
        self.files: dict[str, Path] = {}
        """By name, the last path."""
        self.costs: CostReport | None = None
        """What the callbacks have cost so far."""

    def history(self, name: str) -> tuple[list[int], list[float]]:
        """The steps at which `name` was told, and its values."""
        told = [(record.step, record.values[name]) for record in self.records if name in record.values]
        if not told:
            names = list(dict.fromkeys(name for record in self.records for name in record.values))
            raise KeyError(f"no record told {name!r}{did_you_mean(name, names)} (told: {', '.join(names) or 'nothing'})")
        return [step for step, _ in told], [value for _, value in told]

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """A run begins."""
        self._forget()
        self.hyperparameters.update(ctx.run.config)

    def on_log(self, ctx: Context) -> None:
        """Keep the record."""
        self._keep(self.records, replace(ctx.record, values=dict(ctx.record.values)))

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Keep the settings."""
        self.hyperparameters.update(values)

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Keep the table."""
        self._keep(self.tables.setdefault(name, []), (ctx.step, list(columns), [list(row) for row in rows]))

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Keep the images, where they are asked for."""
        if self._keeps_images:
            from callsheet.loggers.pixels import as_pixels  # needs numpy

            self._keep(self.images.setdefault(name, []), (ctx.step, [as_pixels(image) for image in images]))

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """Keep the path."""
        self.files[name] = path

    def log_costs(self, ctx: Context, report: CostReport) -> None:
        """Keep the last one."""
        self.costs = report

    def _keep(self, kept: list[Any], what: Any) -> None:
        kept.append(what)
        if self._most is not None:
            del kept[: -self._most]
