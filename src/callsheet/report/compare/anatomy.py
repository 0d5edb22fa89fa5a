"""Where the time of a step goes in each run or group: the spans of the timed steps, and the callbacks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from callsheet.core.lifecycle import SPANS, names_in
from callsheet.core.optional import load
from callsheet.report.compare.values import Value, difference
from callsheet.report.costs import cost_rows
from callsheet.report.run_folder import RunFolder

_STEP = ("fetch", "train_step")
_FETCH = ("fetch", SPANS["fetch"].start_event, SPANS["fetch"].end_event)
_CHANGED, _NOTICEABLE = 0.05, 0.005
"""A part is compared with the baseline if its time changed by more than the first fraction of itself, and the second of a step."""

Kind = Literal["span", "callback"]


@dataclass(frozen=True, slots=True)
class Part:
    """The time that one span or one callback of a run takes in a step.

    Args:
        seconds: its time per step: for a span the median of the timed steps, for a callback the mean.
        step: the seconds of the run's whole step, the median of the timed steps.
        samples: its seconds in each timed step.
    """

    seconds: float
    step: float
    samples: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Where the time of a run's step goes: the number of timed steps, and the parts of a step by kind and name."""

    steps: int
    parts: Mapping[tuple[Kind, str], Part]


def _spans_of_a_step() -> list[str]:
    """Return the names of the spans of a step in the order of the lifecycle."""
    found = list(_STEP)
    for name in found:  # the loop also reads the names that it appends
        found += [inner for inner in names_in(SPANS[name].order) if inner in SPANS and inner not in found]
    return [name for name in SPANS if name in found]


def anatomy_of(run: RunFolder) -> Anatomy:
    """Return the times of the parts of a step in this run. A run without timed steps has no parts.

    The median is used for spans, because a single slow step would decide the mean of a few.
    """
    steps: dict[int, dict[tuple[Kind, str], float]] = {}
    names = _spans_of_a_step()
    for window in run.windows:
        if not window.is_whole:  # some timed slices of the window are missing, so sums would be too small
            continue
        fetched: dict[
            tuple[Kind, str], float
        ] = {}  # belongs to the step that follows: until that step begins, the number is the old one
        for each in window.slices:
            if each.callback or each.name in names:
                part: tuple[Kind, str] = ("callback", each.callback) if each.callback else ("span", each.name)
                if part == ("span", "train_step"):
                    steps[each.step], fetched = fetched, {}
                found = fetched if each.name in _FETCH else steps.setdefault(each.step, {})
                found[part] = found.get(part, 0.0) + each.seconds
    # Leave out incomplete steps: a timing window ends while the batch of the next step is fetched.
    timed = [found for found in steps.values() if ("span", "train_step") in found]
    whole = statistics.median(sum(found.get(("span", name), 0.0) for name in _STEP) for found in timed) if timed else 0.0
    if not whole:
        return Anatomy(0, {})
    samples = {part: tuple(found.get(part, 0.0) for found in timed) for part in {part for found in timed for part in found}}
    medians = {part: statistics.median(each) for part, each in samples.items() if part[0] == "span"}
    parts = {part: Part(seconds, whole, samples[part]) for part, seconds in medians.items()}
    for row in cost_rows(run.costs):
        if row["per_step"]:
            name: tuple[Kind, str] = ("callback", row["callback"])
            parts[name] = Part(row["per_step"], whole, samples.get(name, ()))
    return Anatomy(len(timed), parts)


def anatomy(groups: Sequence[Sequence[Anatomy]]) -> list[dict[str, Any]]:
    """Return one row for each span and callback of a step: its `kind`, its `name`, and a cell for each group.

    The first group is the baseline.

    A cell has the mean `seconds` over the group's runs, their `share` of the mean step, `change` from the baseline's seconds as a fraction, and `mark`,
    which is `slower` or `faster` if the change is noticeable and more than noise, `noise` if it may be noise, and otherwise empty. It
    is None if no run of the group timed the part.

    Spans nest, and a callback's time is within a span, so the shares do not add up to one.
    """
    order: list[tuple[Kind, str]] = [("span", name) for name in _spans_of_a_step()]
    rows: list[dict[str, Any]] = []
    for part in order + _callbacks([each for group in groups for each in group]):
        found = [[each.parts[part] for each in group if part in each.parts] for group in groups]
        if any(found):
            cells = [_cell(found[0], each) for each in found]
            rows.append({"kind": part[0], "name": part[1], "cells": cells})
    return rows


def _cell(baseline: Sequence[Part], parts: Sequence[Part]) -> dict[str, Any] | None:
    if not parts:
        return None
    seconds, step = _means(parts)
    share, change, mark = seconds / step, math.nan, ""
    if baseline and _means(baseline)[0] > 0:
        before, step = _means(baseline)
        change = seconds / before - 1
        if abs(change) > _CHANGED and abs(seconds - before) > _NOTICEABLE * step:
            mark = "noise" if _may_be_noise(baseline, parts) else "slower" if change > 0 else "faster"
    return {"seconds": seconds, "share": share, "change": change, "mark": mark}


def _means(parts: Sequence[Part]) -> tuple[float, float]:
    return statistics.fmean(part.seconds for part in parts), statistics.fmean(part.step for part in parts)


def _may_be_noise(baseline: Sequence[Part], parts: Sequence[Part]) -> bool:
    """Return whether the difference between two groups' times of a part may be noise, judging by the spread over the runs.

    With one run on each side, the timed steps of the two are compared by ranks (Mann and Whitney, 1947), since a few slow steps would
    decide their means.
    """
    if max(len(baseline), len(parts)) > 1:
        sides = [[Value(part.seconds, part.seconds) for part in side] for side in (baseline, parts)]
        return difference(*sides).is_noise is not False
    samples = [side[0].samples for side in (baseline, parts)]
    if min(map(len, samples)) < 2:
        return True
    stats = load("scipy.stats", extra="report", wanted_by="a comparison with spread")
    return not float(stats.mannwhitneyu(*samples).pvalue) < 0.05


def _callbacks(found: Sequence[Anatomy]) -> list[tuple[Kind, str]]:
    """Return the kind and name of the callbacks in these runs, those that take the most time first."""
    most: dict[tuple[Kind, str], float] = {}
    for each in found:
        for name, part in each.parts.items():
            if name[0] == "callback":
                most[name] = max(part.seconds, most.get(name, 0.0))
    return sorted(most, key=lambda name: -most[name])
