"""A run that was read from another tool's files, and is not written as a run folder yet."""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

MAX_VALUES = 20_000_000
"""How many values of metrics one run may have; further values are left out."""

_MAX_STEP = 2**53  # the largest step that `callsheet.report.records` accepts
_MAX_UNIX_SECONDS = 1e11  # a larger number does not count as a Unix time in seconds
_MAX_IMAGES, _MAX_TOTAL_IMAGE_BYTES, _MAX_IMAGE_BYTES = 1000, 256 * 2**20, 16 * 2**20
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NON_FINITE_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class Record:
    """The metric values of one step. `time` is in seconds since 1970, and NaN if unknown."""

    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class ImportedImage:
    """An image in PNG format. `time` is in seconds since 1970, and NaN if unknown."""

    name: str
    step: int
    time: float
    png: bytes


class Metrics:
    """The values of a run's metrics, in compact arrays. The values may be added in any order."""

    def __init__(self) -> None:
        # Metric name -> the metric's steps, values and times.
        self._columns: dict[str, tuple[array[int], array[float], array[float]]] = {}
        self.count = 0
        self.left_out: Counter[str] = Counter()

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def names(self) -> list[str]:
        """The names of the metrics, in the order in which they were first added."""
        return list(self._columns)

    def add(self, name: str, step: Any, value: float, time: float = math.nan) -> None:
        """Add a value of a metric. If the step is not a whole number, or there are too many values, count the value as left out."""
        whole = as_step(step)
        if whole is None:
            self.left_out["values with a step that is not a whole number"] += 1
            return
        if self.count >= MAX_VALUES:
            self.left_out[f"values beyond the first {MAX_VALUES:,}"] += 1
            return
        if (columns := self._columns.get(name)) is None:
            columns = self._columns[name] = (array("q"), array("d"), array("d"))
        columns[0].append(whole)
        columns[1].append(value)
        columns[2].append(time if abs(time) < _MAX_UNIX_SECONDS else math.nan)
        self.count += 1

    def drop_from(self, step: int) -> None:
        """Delete all values of the step `step` and of later steps."""
        for name, columns in list(self._columns.items()):
            kept = [place for place, each in enumerate(columns[0]) if each < step]
            if len(kept) < len(columns[0]):
                self.count -= len(columns[0]) - len(kept)
                steps, values, times = columns
                self._columns[name] = (
                    array("q", (steps[place] for place in kept)),
                    array("d", (values[place] for place in kept)),
                    array("d", (times[place] for place in kept)),
                )

    def add_all(self, other: Metrics, prefix: str = "") -> None:
        """Add all metrics of `other`, with `prefix` before names that do not begin with it."""
        for name, columns in other._columns.items():
            for step, value, time in zip(*columns, strict=True):
                self.add(with_prefix(name, prefix), step, value, time)
        self.left_out.update(other.left_out)

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename metrics. `names` contains the new name for each old one. No two metrics may get the same name."""
        self._columns = {names.get(name, name): columns for name, columns in self._columns.items()}

    def records(self) -> Iterator[Record]:
        """Yield one record for each step, in the order of the steps.

        Of several values of one metric at one step, the last one that was added is used. If a metric has several values and all
        are at step 0, it was logged without steps; then the position of each value is its step.
        """
        streams = [self._stream(place, *columns) for place, columns in enumerate(self._columns.values())]
        names = self.names
        for step, values in groupby(heapq.merge(*streams), key=lambda each: each[0]):
            row = list(values)
            times = [time for _, _, _, time in row if time == time]
            yield Record(step, min(times, default=math.nan), {names[place]: value for _, place, value, _ in row})

    def _stream(
        self, place: int, steps: array[int], values: array[float], times: array[float]
    ) -> Iterator[tuple[int, int, float, float]]:
        order = range(len(steps)) if _is_sorted(steps) else sorted(range(len(steps)), key=steps.__getitem__)
        if len(steps) > 1 and not any(steps):
            yield from ((at, place, values[at], times[at]) for at in order)
            return
        last: int | None = None
        for at in order:
            if last is not None and steps[at] != steps[last]:
                yield steps[last], place, values[last], times[last]
            elif last is not None and values[at] != values[last]:
                self.left_out["values that were logged again at the same step"] += 1
            last = at
        if last is not None:
            yield steps[last], place, values[last], times[last]


@dataclass(slots=True)
class ImportedRun:
    """A run that was read from the files of another tool.

    Args:
        name: the run's name.
        key: identifies the run among all runs of the same tool: its id, or the path of its folder.
        metrics: the metrics by name.
        hyperparameters: the settings.
        images: the images.
        outcome: how the run ended; empty if the source does not say.
        reason: why the run ended, or why the outcome is unknown.
        started, ended: seconds since 1970; NaN if the source does not say.
        seconds: the seconds of training; NaN if the source does not say.
        left_out: how many values, images and so on are not imported, by their kind.
        warnings: which files could not be read completely.
    """

    name: str
    key: str
    metrics: Metrics = field(default_factory=Metrics)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    images: list[ImportedImage] = field(default_factory=list)
    outcome: str = ""
    reason: str = ""
    started: float = math.nan
    ended: float = math.nan
    seconds: float = math.nan
    left_out: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    def add_image(self, name: str, step: int, time: float, png: bytes) -> None:
        """Add an image. If the image is not a PNG, or there are too many images, only count the image as left out."""
        if not png.startswith(_PNG_SIGNATURE):
            self.left_out["images that are not PNG"] += 1
        elif (
            len(png) > _MAX_IMAGE_BYTES
            or len(self.images) >= _MAX_IMAGES
            or self._image_bytes() + len(png) > _MAX_TOTAL_IMAGE_BYTES
        ):
            self.left_out["images beyond the limit"] += 1
        else:
            self.images.append(ImportedImage(name, step, time, png))

    def add_row(self, values: Mapping[str, Any], step: Any, time: float = math.nan) -> None:
        """Add the numbers in `values` as metrics. Numbers in nested mappings get dotted names. Other values are only counted as left out."""
        for name, value in values.items():
            if (found := as_number(value)) is not None:
                self.metrics.add(name, step, found, time)
            elif isinstance(value, Mapping) and "_type" not in value and name.count(".") < 20:
                self.add_row({f"{name}.{inner}": each for inner, each in value.items()}, step, time)
            elif isinstance(value, Mapping) and "_type" in value:
                self.left_out["images, tables and other media"] += 1
            elif value is not None:
                self.left_out["values that are not numbers"] += 1

    def _image_bytes(self) -> int:
        return sum(len(image.png) for image in self.images)


def as_number(value: Any) -> float | None:
    """Return `value` as a float, or None if it is not a number. The strings `NaN`, `Infinity` and `-Infinity` are numbers."""
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            return None
    return _NON_FINITE_NUMBERS.get(value) if isinstance(value, str) else None


def as_step(value: Any) -> int | None:
    """Return `value` as an integer, or None if it is not a whole number or too large for a step."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_STEP else None


def with_prefix(name: str, prefix: str) -> str:
    """Return `name` with `prefix` before it, unless `name` already begins with `prefix`."""
    return name if name.startswith(prefix) else f"{prefix}{name}"


def _is_sorted(steps: array[int]) -> bool:
    return all(steps[place] <= steps[place + 1] for place in range(len(steps) - 1))
