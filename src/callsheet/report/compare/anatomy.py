"""The times of a step and of its parts (spans and callbacks), for each run and each group of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from callsheet.core.costs import CostReport, Window
from callsheet.core.lifecycle import SPANS, names_in
from callsheet.core.optional import load
from callsheet.report.compare.values import STEP_SECONDS, Value, difference, step_seconds
from callsheet.report.run_folder import RunFolder

_STEP_SPANS = ("fetch", "train_step")
_FETCH_NAMES = ("fetch", SPANS["fetch"].start_event, SPANS["fetch"].end_event)
_MIN_SHARE_OF_PART, _MIN_SHARE_OF_STEP = 0.05, 0.005
"""A change of a part (a span or callback) is noticeable if it exceeds these fractions: of its baseline, and of the whole step."""
_CLEAR_FACTOR = 1.5
"""A span is clearly slower in one run if its shortest time there exceeds this factor times its longest time in the other run.

Then a few timed steps are enough to call the span slower, but only if the whole step is slower too. The whole step is measured in
the whole run, whereas another program on the machine may have slowed all steps of a timing window.
"""

Kind = Literal["step", "span", "callback"]
Key = tuple[Kind, str]
"""The kind and the name of a part of a step. The whole step has the kind `step` and the name `step_seconds`."""


@dataclass(frozen=True, slots=True)
class Calls:
    """How long one callback takes at one event: per step, per call on average, and in the slowest call.

    Args:
        per_step: the seconds per step.
        mean: the mean seconds of a call.
        worst: the seconds of the slowest call.
    """

    per_step: float
    mean: float
    worst: float


@dataclass(frozen=True, slots=True)
class Part:
    """The time that a part of a step takes in one run.

    Args:
        seconds: its time per step: for a span the median of the timed steps, for a callback and the whole step the mean.
        step: the median seconds of the run's timed steps (`fetch` and `train_step`), from which the part's share is computed. NaN
            if the part is the whole step, which has no share.
        samples: for a span, one median for each timing window, because the consecutive steps of a window are not independent; for
            the whole step, its mean between each two consecutive metrics records.
        extremes: for a span, its shortest and its longest time in a timed step, in seconds.
        calls: for a callback its timed calls, by event.
    """

    seconds: float
    step: float
    samples: tuple[float, ...] = ()
    extremes: tuple[float, float] = (0.0, 0.0)
    calls: Mapping[str, Calls] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The number of timed steps of a run, and the time of each part of a step, by kind and name."""

    steps: int
    parts: Mapping[Key, Part]


def _spans_of_a_step() -> list[str]:
    """Return the names of the spans in a step, in the order of the lifecycle."""
    found = list(_STEP_SPANS)
    for name in found:  # `found` grows in this loop, so that spans inside the added spans are found too
        found += [inner for inner in names_in(SPANS[name].order) if inner in SPANS and inner not in found]
    return [name for name in SPANS if name in found]


def anatomy_of(run: RunFolder) -> Anatomy:
    """Return the times of the parts of a step in this run. If no steps were timed, the result has no parts.

    The median is used for spans, because a single slow step would dominate the mean of a few steps.
    """
    windows = [timed for timed in map(_timed_steps, (each for each in run.windows if each.is_whole)) if timed]
    steps = [step for window in windows for step in window]
    whole = statistics.median(sum(step.get(name, 0.0) for name in _STEP_SPANS) for step in steps) if steps else 0.0
    if not whole:
        return Anatomy(0, {})
    parts: dict[Key, Part] = {}
    if measured := step_seconds(run):
        parts["step", STEP_SECONDS] = Part(statistics.fmean(measured), math.nan, tuple(measured))
    for name in {name for step in steps for name in step}:
        samples = tuple(statistics.median(step.get(name, 0.0) for step in window) for window in windows)
        seconds = [step.get(name, 0.0) for step in steps]
        parts["span", name] = Part(statistics.median(seconds), whole, samples, (min(seconds), max(seconds)))
    for callback, calls in _calls(run.costs).items():
        parts["callback", callback] = Part(sum(each.per_step for each in calls.values()), whole, calls=calls)
    return Anatomy(len(steps), parts)


def _timed_steps(window: Window) -> list[dict[str, float]]:
    """Return, for each complete step in a timing window, the seconds of each span by name.

    The last step may be incomplete, because a window ends while the next batch is fetched.
    """
    names = _spans_of_a_step()
    steps: dict[int, dict[str, float]] = {}
    # Span name -> seconds of the spans that fetch a batch. These seconds count for the step that trains on this batch.
    fetched: dict[str, float] = {}
    for each in window.slices:
        if not each.callback and each.name in names:
            if each.name == "train_step":
                steps[each.step], fetched = fetched, {}
            found = fetched if each.name in _FETCH_NAMES else steps.setdefault(each.step, {})
            found[each.name] = found.get(each.name, 0.0) + each.seconds
    return [found for found in steps.values() if "train_step" in found]


def _calls(reports: Sequence[CostReport]) -> dict[str, dict[str, Calls]]:
    """Return the times of each callback's calls by event, over all processes of the run.

    At events that fire at every step, only the calls in timed steps are known; at others, such as `on_log`, all calls are known.
    """
    found: dict[tuple[str, str], list[tuple[CostReport, Any]]] = {}
    for report in reports:
        for cost in report.costs:
            found.setdefault((cost.callback, cost.event), []).append((report, cost))
    calls: dict[str, dict[str, Calls]] = {}
    for (callback, event), costs in found.items():
        seconds, number = sum(cost.seconds for _, cost in costs), sum(cost.calls for _, cost in costs)
        steps = sum(report.window_steps if cost.is_sampled else report.steps for report, cost in costs)
        if steps and number:
            worst = max(cost.worst_seconds for _, cost in costs)
            calls.setdefault(callback, {})[event] = Calls(seconds / steps, seconds / number, worst)
    return calls


def anatomy(groups: Sequence[Sequence[Anatomy]]) -> list[dict[str, Any]]:
    """Return a table of times. It has a row for the whole step, each span and each callback, and a column for each group of runs.

    A row has a `kind`, a `name` and `cells`. The first group is the baseline.

    A cell is None if no run of the group timed the part. Otherwise it has:

    - `seconds`: the mean over the group's runs.
    - `share`: the fraction of a timed step (`fetch` and `train_step`); NaN for the whole step. Spans nest, and a callback's time may be
      within a span, so the shares do not add up to one.
    - `change`: the change from the baseline's seconds, as a fraction of the baseline's seconds.
    - `mark`: empty if the change is not noticeable, `noise` if it may be noise, and otherwise `slower` or `faster`.
    """
    order: list[Key] = [("step", STEP_SECONDS), *(("span", name) for name in _spans_of_a_step())]
    rows: list[dict[str, Any]] = []
    # For each group, the `mark` of the whole step. `_cell` needs it to decide whether the change of a part may be noise.
    whole = [""] * len(groups)
    for key in order + _callbacks([each for group in groups for each in group]):
        kind, name = key
        found = [[each.parts[key] for each in group if key in each.parts] for group in groups]
        if any(found):
            cells = [_cell(kind, found[0], each, mark) for each, mark in zip(found, whole, strict=True)]
            if kind == "step":
                whole = [cell["mark"] if cell else "" for cell in cells]
            rows.append({"kind": kind, "name": name, "cells": cells})
    return rows


def _cell(kind: Kind, baseline: Sequence[Part], parts: Sequence[Part], whole: str) -> dict[str, Any] | None:
    if not parts:
        return None
    seconds, step = _means(parts)
    share, change, mark = seconds / step, math.nan, ""
    if baseline and _means(baseline)[0] > 0:
        before, step = _means(baseline)
        change = seconds / before - 1
        # Mark a change of a span or callback only if it is also large compared with the whole step.
        if abs(change) > _MIN_SHARE_OF_PART and (kind == "step" or abs(seconds - before) > _MIN_SHARE_OF_STEP * step):
            mark = "slower" if change > 0 else "faster"
            mark = "noise" if _may_be_noise(kind, baseline, parts, whole == mark) else mark
    return {"seconds": seconds, "share": share, "change": change, "mark": mark}


def _means(parts: Sequence[Part]) -> tuple[float, float]:
    return statistics.fmean(part.seconds for part in parts), statistics.fmean(part.step for part in parts)


def _may_be_noise(kind: Kind, baseline: Sequence[Part], parts: Sequence[Part], is_as_whole: bool) -> bool:
    """Return whether the difference between two groups of runs, in the time of one part of a step, may be noise.

    If a group has several runs, the spread over the runs decides. With one run in each group, whole steps are compared as in
    `difference`. Spans are compared by a rank test of their timing windows (Mann and Whitney, 1947), because a few slow windows
    would dominate a mean; see also `_CLEAR_FACTOR`. The difference of a callback is more than noise if even its slowest call in one
    run was faster than its mean call in the other run.

    Args:
        kind: what the part is.
        baseline, parts: the times of the part in the runs of each side.
        is_as_whole: whether the whole step has changed in the same direction, by more than noise.
    """
    if kind == "step" or max(len(baseline), len(parts)) > 1:
        sides = [[Value(part.seconds, part.seconds, samples=part.samples) for part in side] for side in (baseline, parts)]
        return difference(*sides).is_noise is not False
    one, other = baseline[0], parts[0]
    if kind == "callback":
        return not _calls_differ(one.calls, other.calls)
    if is_as_whole and max(one.extremes[0], other.extremes[0]) > _CLEAR_FACTOR * min(one.extremes[1], other.extremes[1]):
        return False
    if min(len(one.samples), len(other.samples)) < 2:
        return True
    stats = load("scipy.stats", extra="report", wanted_by="a comparison with spread")
    return float(stats.mannwhitneyu(one.samples, other.samples).pvalue) >= 0.05


def _calls_differ(one: Mapping[str, Calls], other: Mapping[str, Calls]) -> bool:
    """Return whether a callback's times clearly differ between two runs, judging by the event with the largest difference."""
    change = {event: abs(one[event].per_step - other[event].per_step) for event in one if event in other}
    if not change:
        return False
    most = max(change, key=lambda event: change[event])
    fast, slow = sorted((one[most], other[most]), key=lambda calls: calls.mean)
    return fast.worst < slow.mean


def _callbacks(found: Sequence[Anatomy]) -> list[Key]:
    """Return the keys (kind and name) of the callbacks in these runs, sorted by their time, the longest time first."""
    most: dict[Key, float] = {}
    for each in found:
        for name, part in each.parts.items():
            if name[0] == "callback":
                most[name] = max(part.seconds, most.get(name, 0.0))
    return sorted(most, key=lambda name: -most[name])
