"""Collects the metrics records in a run's folder, without the records that a resume has made invalid.

A resumed run repeats the steps after its checkpoint, so earlier records of these steps are invalid. The number of records is limited to
what fits into memory.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from callsheet.core.run_state import MetricsRecord
from callsheet.report.lines import finite, moment, number, whole

_MAX_VALUES = 6_000_000  # the maximum number of metric values in memory; if there are more, records are left out
_MAX_STEP = 2**53  # the largest valid step: JSON readers that use doubles cannot represent larger integers exactly
_MAX_RARE_VALUES = 2_000  # if a metric has at most this many values, all of them are kept


@dataclass(frozen=True, slots=True)
class Resume:
    """A resume from step `step`. The resume made `dropped` records invalid: those after `step`, up to step `dropped_to_step`."""

    step: int
    time: float
    dropped: int = 0
    dropped_to_step: int = 0


class RecordLines:
    """The metrics records, read line by line. Records that a resume has made invalid are left out."""

    def __init__(self) -> None:
        self.kept: list[MetricsRecord] = []
        self.times: list[float] = []
        self.resumes: list[Resume] = []
        self.counted = 0
        self._counted_at_resume = -1
        self._numbers: list[int] = []  # for each kept record, its index among all records, including those left out
        self._names: dict[str, str] = {}  # each metric name once, so that equal names share one string object
        self._rare: set[str] | None = None  # names of metrics with few values; records with one of them are never left out
        self._values = 0
        self._most_values = _MAX_VALUES
        self._stride = 1

    def add(self, line: dict[str, Any]) -> None:
        """Add a line of `metrics.jsonl`, which is a metrics record or a resume."""
        if "resumed_from_step" in line:
            self._resume(line)
            return
        values, step = line.get("values"), line.get("step")
        if not isinstance(values, dict) or not isinstance(step, int) or abs(step) > _MAX_STEP:
            return
        plain = {self._names.setdefault(name, name): number(value) for name, value in values.items()}
        record = MetricsRecord(
            step,
            plain,
            elapsed_seconds=finite(line.get("elapsed_seconds")),
            samples_per_second=finite(line.get("samples_per_second")),
            tokens_per_second=finite(line.get("tokens_per_second")),
            memory_bytes=whole(line.get("memory_bytes")),
        )
        self.counted += 1
        if self._stride > 1 and self.counted % self._stride and self._is_plain(record, self._rare_names()):
            return
        self.kept.append(record)
        self.times.append(moment(line.get("time")))
        self._numbers.append(self.counted - 1)
        self._values += len(plain)
        if self._values > self._most_values:
            self._thin()

    def _resume(self, line: dict[str, Any]) -> None:
        step, records = whole(line.get("resumed_from_step")), line.get("records")
        if isinstance(records, int):
            first = next((place for place in range(len(self.kept)) if self._numbers[place] >= records), len(self.kept))
        else:
            first = next((place for place, record in enumerate(self.kept) if record.step > step), len(self.kept))
        left = self._numbers[first] if first < len(self.kept) else self.counted
        counts = max(0, min(records, self.counted)) if isinstance(records, int) else left
        gone = self.kept[first:]
        last, dropped, time = max((record.step for record in gone), default=step), self.counted - counts, moment(line.get("time"))
        if self.resumes and self.resumes[-1].step == step and self.counted == self._counted_at_resume:
            earlier = self.resumes.pop()  # no record came between two resumes from the same step, so merge the two resumes
            last, dropped, time = max(last, earlier.dropped_to_step), dropped + earlier.dropped, earlier.time
        self.resumes.append(Resume(step, time, dropped, last))
        self._counted_at_resume = counts
        self._values -= sum(len(record.values) for record in gone)
        del self.kept[first:], self.times[first:], self._numbers[first:]
        self.counted = counts

    def _rare_names(self) -> set[str]:
        if self._rare is None:
            count = Counter(name for record in self.kept for name in record.values)
            self._rare = {name for name in self._names if count[name] <= _MAX_RARE_VALUES}
        return self._rare

    def _is_plain(self, record: MetricsRecord, rare: set[str]) -> bool:
        return rare.isdisjoint(record.values) and all(map(math.isfinite, record.values.values()))

    def _thin(self) -> None:
        """Leave out every second record, but keep records with NaN, with infinity, or with a metric that has few values."""
        self._stride *= 2
        self._rare = None
        rare = self._rare_names()
        stays = [
            place
            for place, record in enumerate(self.kept)
            if (self._numbers[place] + 1) % self._stride == 0 or not self._is_plain(record, rare)
        ]
        self.kept = [self.kept[place] for place in stays]
        self.times = [self.times[place] for place in stays]
        self._numbers = [self._numbers[place] for place in stays]
        self._values = sum(len(record.values) for record in self.kept)
        # If thinning has removed only a few records, the next record would exceed the limit again, so raise the limit.
        self._most_values = max(_MAX_VALUES, 2 * self._values)
