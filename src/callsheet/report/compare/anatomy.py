"""Where the time of a step goes in each run: the spans of the timed steps, and the callbacks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from callsheet.core.lifecycle import SPANS, names_in
from callsheet.report.costs import cost_rows
from callsheet.report.run_folder import RunFolder

_STEP = ("fetch", "train_step")


def _spans_of_a_step() -> list[str]:
    """Return the spans of a step in the order of the lifecycle."""
    found = list(_STEP)
    for name in found:  # the loop also reads the names that it appends
        found += [inner for inner in names_in(SPANS[name].order) if inner in SPANS and inner not in found]
    return [name for name in SPANS if name in found]


def anatomy(runs: Sequence[tuple[str, RunFolder]]) -> list[dict[str, Any]]:
    """Return one row for each span and callback of a step, with the seconds and the share of the step in each run, by its name.

    Spans nest, and a callback's time is within a span, so the shares do not add up to one. A run without timed steps has no value.
    """
    measured = {name: _measured(run) for name, run in runs}
    rows: list[dict[str, Any]] = []
    for kind, order in (("span", _spans_of_a_step()), ("callback", _callbacks(measured))):
        for part in order:
            found = {name: parts[kind, part] for name, parts in measured.items() if (kind, part) in parts}
            if found:
                seconds = {name: each for name, (each, _) in found.items()}
                shares = {name: share for name, (_, share) in found.items()}
                rows.append({"kind": kind, "name": part, "seconds": seconds, "share": shares})
    return rows


def _measured(run: RunFolder) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the seconds per step and the share of the step's time, by kind (span or callback) and name.

    For a span they are the median over the timed steps, because a single slow step would decide the mean of a few.
    """
    steps: dict[int, dict[str, float]] = {}
    names = _spans_of_a_step()
    for window in run.windows:
        if not window.is_whole:  # some of its timed slices were left out, so sums would be too small
            continue
        for each in window.slices:
            if not each.callback and each.name in names:
                spans = steps.setdefault(each.step, {})
                spans[each.name] = spans.get(each.name, 0.0) + each.seconds
    whole = statistics.median(sum(spans.get(name, 0.0) for name in _STEP) for spans in steps.values()) if steps else 0.0
    if not whole:
        return {}
    timed = {name for spans in steps.values() for name in spans}
    medians = {name: statistics.median(spans.get(name, 0.0) for spans in steps.values()) for name in timed}
    found = {("span", name): (seconds, seconds / whole) for name, seconds in medians.items()}
    for row in cost_rows(run.costs):
        if row["per_step"]:
            found["callback", row["callback"]] = (row["per_step"], row["of_step"])
    return found


def _callbacks(measured: dict[str, dict[tuple[str, str], tuple[float, float]]]) -> list[str]:
    """Return the names of the callbacks in these runs, those that take the most time first."""
    most: dict[str, float] = {}
    for parts in measured.values():
        for (kind, name), (seconds, _) in parts.items():
            if kind == "callback":
                most[name] = max(seconds, most.get(name, 0.0))
    return sorted(most, key=lambda name: -most[name])
