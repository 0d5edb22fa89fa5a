"""Collects the metrics records in a run's folder, without the records that a resume has made invalid.

A resumed run repeats the steps after its checkpoint, so earlier records of these steps are invalid. The number of records is limited to
what fits into memory: of a long run, only every second, fourth, ... record is kept, and the records with the extremes of each metric.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from heapq import merge
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


@dataclass(frozen=True, slots=True)
class _Numbered:
    """A record, its time, and its index among all records of the run."""

    number: int
    record: MetricsRecord
    time: float


class _Extremes:
    """Some of the records that were left out: for each metric, the records with its lowest, its highest and its last value.

    To save memory, a record with a lowest or highest value contains only this value.
    """

    def __init__(self) -> None:
        self._lowest: dict[str, tuple[float, _Numbered]] = {}  # metric name -> its lowest value, and the record with it
        self._highest: dict[str, tuple[float, _Numbered]] = {}
        self._last: dict[str, _Numbered] = {}

    def add(self, each: _Numbered) -> None:
        """Store a left-out record if it has the lowest, highest or last value of a metric so far. All its values must be finite."""
        lowest, highest, last = self._lowest, self._highest, self._last
        empty = replace(each, record=replace(each.record, values={}))
        for name, value in each.record.values.items():  # keep this loop fast, because it visits most values of a long run
            if name not in lowest or value < lowest[name][0]:
                lowest[name] = value, empty
            if name not in highest or value > highest[name][0]:
                highest[name] = value, empty
            if name not in last or each.number > last[name].number:
                last[name] = each

    def truncate(self, number: int) -> None:
        """Remove the records from index `number` on, which a resume has made invalid.

        Earlier records that were left out may then be missing, because records with more extreme values have replaced them.
        """
        earlier = [each for each in self.kept_records() if each.number < number]
        self._lowest, self._highest, self._last = {}, {}, {}
        for each in earlier:
            self.add(each)

    def kept_records(self) -> list[_Numbered]:
        """Return the kept records in the order in which they were added."""
        found = {each.number: each for each in self._last.values()}
        for extremes in (self._lowest, self._highest):
            for name, (value, empty) in extremes.items():
                each = found.get(empty.number, empty)
                found[each.number] = replace(each, record=replace(each.record, values={**each.record.values, name: value}))
        return sorted(found.values(), key=lambda each: each.number)


class RecordLines:
    """The metrics records, read line by line. Records that a resume has made invalid are left out."""

    def __init__(self) -> None:
        self.resumes: list[Resume] = []
        self.counted = 0
        """The number of valid records, including those that were left out."""
        self._counted_at_resume = -1
        self._kept: list[MetricsRecord] = []
        self.times: list[float] = []
        """The times of the records that are kept."""
        self._numbers: list[int] = []  # for each kept record, its index among all records, including those left out
        self._extremes = _Extremes()
        self._names: dict[str, str] = {}  # each metric name once, so that equal names share one string object
        self._common: set[str] = (
            set()
        )  # metrics that have many values; the report may leave out a record that has only such metrics
        self._values = 0
        self._most_values = _MAX_VALUES
        self._stride = 1

    def records(self) -> tuple[list[MetricsRecord], list[float]]:
        """Return the records, and the time of each, in the order in which they were written.

        Even if records were left out, the lowest, the highest and the last value of each metric are among them.
        """
        extremes = self._extremes.kept_records()
        if not extremes:
            return list(self._kept), list(self.times)
        kept = map(_Numbered, self._numbers, self._kept, self.times)
        found = list(merge(kept, extremes, key=lambda each: each.number))
        return [each.record for each in found], [each.time for each in found]

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
        if self._stride > 1 and self.counted % self._stride and self._is_plain(record):
            self._extremes.add(_Numbered(self.counted - 1, record, moment(line.get("time"))))
            return
        self._kept.append(record)
        self.times.append(moment(line.get("time")))
        self._numbers.append(self.counted - 1)
        self._values += len(plain)
        if self._values > self._most_values:
            self._thin()

    def _resume(self, line: dict[str, Any]) -> None:
        step, records = whole(line.get("resumed_from_step")), line.get("records")
        if isinstance(records, int):
            first = next((place for place, each in enumerate(self._numbers) if each >= records), len(self._kept))
        else:
            first = next((place for place, record in enumerate(self._kept) if record.step > step), len(self._kept))
        left = self._numbers[first] if first < len(self._kept) else self.counted
        counts = max(0, min(records, self.counted)) if isinstance(records, int) else left
        gone = self._kept[first:]
        last, dropped, time = max((record.step for record in gone), default=step), self.counted - counts, moment(line.get("time"))
        if self.resumes and self.resumes[-1].step == step and self.counted == self._counted_at_resume:
            earlier = self.resumes.pop()  # no record came between two resumes from the same step, so merge the two resumes
            last, dropped, time = max(last, earlier.dropped_to_step), dropped + earlier.dropped, earlier.time
        self.resumes.append(Resume(step, time, dropped, last))
        self._counted_at_resume = counts
        self._values -= sum(len(record.values) for record in gone)
        del self._kept[first:], self.times[first:], self._numbers[first:]
        self._extremes.truncate(counts)
        self.counted = counts

    def _is_plain(self, record: MetricsRecord) -> bool:
        return self._common.issuperset(record.values) and all(map(math.isfinite, record.values.values()))

    def _thin(self) -> None:
        """Leave out every second record, but keep records with NaN, with infinity, or with a metric that has few values so far."""
        self._stride *= 2
        count = Counter(name for record in self._kept for name in record.values)
        self._common = {name for name in self._names if count[name] > _MAX_RARE_VALUES}
        all_kept = list(zip(self._numbers, self._kept, self.times, strict=True))
        self._numbers, self._kept, self.times = [], [], []
        for number_of_record, record, time in all_kept:
            if (number_of_record + 1) % self._stride and self._is_plain(record):
                self._extremes.add(_Numbered(number_of_record, record, time))
            else:
                self._numbers.append(number_of_record)
                self._kept.append(record)
                self.times.append(time)
        self._values = sum(len(record.values) for record in self._kept)
        # If thinning has removed only a few records, the next record would exceed the limit again, so raise the limit.
        self._most_values = max(_MAX_VALUES, 2 * self._values)
