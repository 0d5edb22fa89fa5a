"""Computes the last and best values of runs, the speed of their steps, and the significance of differences between runs."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from callsheet.core.optional import load
from callsheet.report.curves import memory, rates
from callsheet.report.lines import number
from callsheet.report.run_folder import RunFolder

STEP_SECONDS = "step_seconds"
"""The name of a metric: the mean time of a step, without evaluations and checkpoints."""

_LOWER_IS_BETTER = (
    "loss", "perplexity", "error", "bits_per_byte", "seconds", "bytes", "memory", "wer", "cer", "mse", "mae", "rmse",
)  # fmt: skip
_HIGHER_IS_BETTER = (
    "accuracy", "acc", "f1", "precision", "recall", "auc", "auroc", "map", "miou", "iou", "dice", "r2", "bleu", "rouge", "score",
    "reward", "reward_mean", "return", "mfu", "top1", "top5", "exact_match",
)  # fmt: skip
_FAMILIES_NOT_COMPARED = ("time/", "lr/", "system/", "loss_spike/")
"""Families of metrics, such as learning rates, whose last value does not show how good a run is."""
# Leave out this many metrics records at the start, because the first steps also allocate memory and compile.
_SKIPPED_RECORDS = 1


@dataclass(frozen=True, slots=True)
class Value:
    """The last and best value of a metric in one run.

    Args:
        last: the last value, which may be NaN or infinite.
        best: the lowest or the highest finite value, whichever is better; for a speed or a time, the mean; None if the metric's
            name does not show which is better.
        best_step: the step of the best value; -1 if `best` describes the whole run.
        samples: if `best` is a mean, the measurements of which it is the mean. Their spread is the noise within the run.
    """

    last: float
    best: float | None = None
    best_step: int = -1
    samples: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """The mean, sample standard deviation (NaN for one run) and number of a metric's values in a group of runs."""

    mean: float
    deviation: float
    count: int


@dataclass(frozen=True, slots=True)
class Difference:
    """How much a metric's value differs from the baseline's value.

    Args:
        baseline: the baseline's value, the mean over its runs.
        absolute: the value minus the baseline's.
        relative: `absolute` as a fraction of the baseline's value; NaN if the baseline's value is 0.
        margin: half the width of the difference's 95 % confidence interval (Welch); NaN if nothing is known of the spread.
        p: the two-sided p-value of Welch's t-test; NaN if nothing is known of the spread.
        source: where the spread comes from: the `seeds` of both sides, the seeds of `one side`, or the measurements `within` single runs;
            empty if the spread is unknown.
    """

    baseline: float
    absolute: float
    relative: float
    margin: float = math.nan
    p: float = math.nan
    source: Literal["seeds", "one side", "within", ""] = ""

    @property
    def is_noise(self) -> bool | None:
        """Whether the difference may be noise (p of 0.05 or more); None if p is unknown."""
        return None if math.isnan(self.p) else self.p >= 0.05


def better(metric: str) -> Literal["lower", "higher"] | None:
    """Return whether `lower` or `higher` values of a metric are better, judging by its name; None if the name does not show it.

    Of several words in the name that show it, the last one decides, as in `error_free_accuracy`.
    """
    first, _, last = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", metric).lower().rpartition("/")
    if "per_second" in last:
        return "higher"
    for part in (last, first):
        words = "_".join(["", *re.findall(r"[a-z0-9]+", part), ""])
        words = re.sub(r"(?<=[a-z0-9])(loss|error|accuracy)(?=[0-9]*_)", r"_\1", words)  # split `valloss`
        ends: list[tuple[int, Literal["lower", "higher"]]] = []
        for word in _LOWER_IS_BETTER:
            ends += [(found.end(), "lower") for found in re.finditer(rf"_{word}[0-9]*(?=_)", words)]
        for word in _HIGHER_IS_BETTER:
            ends += [(found.end(), "higher") for found in re.finditer(rf"_{word}(?=_)", words)]
        if ends:
            return max(ends)[1]
    return None


def values_of(run: RunFolder) -> dict[str, Value]:
    """Return the run's values by metric: logged metrics, `step_seconds`, speed, memory, and times of the whole run."""
    series: dict[str, list[tuple[int, float]]] = {}
    for record in run.records:  # keep this loop fast, because it visits every value of the run
        step = record.step
        for name, value in record.values.items():
            each = series.get(name)
            if each is None:
                each = series[name] = []
            each.append((step, value))
    found = {}
    for name, each in series.items():
        finite = [pair for pair in each if math.isfinite(pair[1])]
        if not name.startswith(_FAMILIES_NOT_COMPARED):
            found[name] = replace(_of_metric(name, finite) if finite else Value(math.nan), last=each[-1][1])
    for name, samples in _speeds(run):
        if samples:
            found[name] = Value(samples[-1], statistics.fmean(samples), samples=tuple(samples))
    if math.isfinite(run.seconds):
        found["train_seconds"] = Value(run.seconds, run.seconds)
    most = [value for value in memory(run)[1] if math.isfinite(value)]
    if most:
        found["memory_bytes"] = Value(max(most), max(most))
    return found


def summary(values: Sequence[float]) -> Summary:
    """Return the mean, the sample standard deviation and the number of these values."""
    is_spread = len(values) > 1 and all(map(math.isfinite, values))
    deviation = math.sqrt(_variance(values)) if is_spread else math.nan
    return Summary(_mean(values), deviation, len(values))


def difference(baseline: Sequence[Value], other: Sequence[Value], *, of_best: bool = False) -> Difference:
    """Return how much the other runs differ from the baseline's runs in one metric.

    The margin and the p-value come from a spread. With two or more runs on each side, this is the spread over the runs. If only one
    side has several runs, the single run of the other side is assumed to have the same spread. With a single run on each side,
    speeds and times have the spread of the measurements within the runs; for other metrics, the spread is unknown.
    """
    sides = [[_figure(value, of_best) for value in side] for side in (baseline, other)]
    before, after = map(_mean, sides)
    absolute = after - before
    relative = absolute / abs(before) if before else math.nan
    if not math.isfinite(absolute):
        return Difference(before, math.nan, math.nan)
    if min(map(len, sides)) > 1:
        return Difference(before, absolute, relative, *_welch(sides[0], sides[1]), "seeds")
    if max(map(len, sides)) > 1:
        return Difference(before, absolute, relative, *_one_more(max(sides, key=len), absolute), "one side")
    samples = [[sample for value in side for sample in value.samples] for side in (baseline, other)]
    if min(map(len, samples)) > 1:
        return Difference(before, absolute, relative, *_welch(samples[0], samples[1]), "within")
    return Difference(before, absolute, relative)


def _figure(value: Value, of_best: bool) -> float:
    return value.best if value.best is not None and (of_best or value.samples) else value.last


def _of_metric(name: str, values: list[tuple[int, float]]) -> Value:
    which = better(name)
    if which is None:
        return Value(values[-1][1])
    step, best = (min if which == "lower" else max)(values, key=lambda each: each[1])
    return Value(values[-1][1], best, step)


def step_seconds(run: RunFolder) -> list[float]:
    """Return the mean duration of a step in seconds, for each pair of consecutive metrics records.

    The time of evaluations and checkpoints is not counted.
    """
    seconds: list[float] = []
    for before, after in pairwise(run.records[_SKIPPED_RECORDS:]):
        steps, taken = after.step - before.step, after.elapsed_seconds - before.elapsed_seconds
        if steps > 0 and taken > 0 and math.isfinite(taken):
            seconds.append(taken / steps)
    return seconds


def _speeds(run: RunFolder) -> Iterable[tuple[str, list[float]]]:
    yield STEP_SECONDS, step_seconds(run)
    for name in ("token", "sample"):
        yield f"{name}s_per_second", _rates_between_records(run, name)
    for span, event in (("eval_all", "evaluation"), ("checkpoint_save", "checkpoint")):
        durations = [number(each.get("seconds")) for each in run.events if each["event"] == event]
        yield f"{span}_seconds", [duration for duration in durations if math.isfinite(duration)]


def _rates_between_records(run: RunFolder, name: str) -> list[float]:
    """Return the samples or tokens per second between consecutive metrics records, computed from the counts in the records.

    The rates that a run logs may be means over several records, whose spread is too small. Use them if there are no counts.
    """
    counted = [
        (record.values[f"time/{name}"], record.elapsed_seconds) for record in run.records if f"time/{name}" in record.values
    ]
    found = []
    for (before, began), (after, ended) in pairwise(counted[_SKIPPED_RECORDS:]):
        if after > before and ended > began and math.isfinite(ended - began):
            found.append((after - before) / (ended - began))
    return found or [rate for rate in rates(run, name) if math.isfinite(rate)][_SKIPPED_RECORDS:]


def _welch(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the margin of the 95 % confidence interval for the difference of two means, and the p-value, by Welch's t-test."""
    variances = [_variance(side) / len(side) for side in (one, other)]
    error = math.sqrt(sum(variances))
    absolute = _mean(other) - _mean(one)
    if error == 0:
        return 0.0, 0.0 if absolute else 1.0
    # Compute with shares of the variances, because the squares of the variances may overflow.
    shares = [variance / sum(variances) for variance in variances]
    freedom = 1 / sum(share**2 / (len(side) - 1) for share, side in zip(shares, (one, other), strict=True))
    student = load("scipy.stats", extra="report", wanted_by="a comparison with spread").t
    return float(student.ppf(0.975, freedom)) * error, float(2 * student.sf(abs(absolute) / error, freedom))


def _one_more(several: Sequence[float], absolute: float) -> tuple[float, float]:
    """Return the margin of the 95 % confidence interval, and the p-value, of a t-test that compares one value with several.

    The test assumes that the one value has the same variance as the others.
    """
    error, freedom = math.sqrt(_variance(several) * (1 + 1 / len(several))), len(several) - 1
    if error == 0:
        return 0.0, 0.0 if absolute else 1.0
    student = load("scipy.stats", extra="report", wanted_by="a comparison with spread").t
    return float(student.ppf(0.975, freedom)) * error, float(2 * student.sf(abs(absolute) / error, freedom))


def _variance(values: Sequence[float]) -> float:
    """Return the sample variance. This function is ten times as fast as `statistics.variance`, which uses exact fractions."""
    mean = _mean(values)
    return math.fsum((value - mean) * (value - mean) for value in values) / (len(values) - 1)


def _mean(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are infinite values of both signs."""
    try:
        return statistics.fmean(values)
    except (OverflowError, ValueError):  # the sum of the values is too large, or undefined
        return sum(value / len(values) for value in values)
