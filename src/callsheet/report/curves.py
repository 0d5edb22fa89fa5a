"""The curves of a run: one for each metric, thinned to as many points as a screen can show, and grouped into charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from callsheet.core.run_state import MetricsRecord
from callsheet.report.run_folder import RunFolder

MAX_POINTS_PER_CURVE = 2_000
"""The maximum number of points of one curve."""
# The maximum number of points in all curves of a page together, so that the page has only a few megabytes.
_MAX_POINTS_PER_PAGE = 500_000
MIN_POINTS_PER_CURVE = 16
"""The minimum number of points of one curve, if the metric was logged that often."""
_MAX_ODD_POINTS = 50  # the maximum number of NaN and infinite values to mark in one curve

_SPLITS = ("train", "validation", "val", "eval", "test")
_ODD_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_FAMILIES_IN_ONE_CHART = ("lr", "memory")
"""Families whose metrics have the same unit and so share a chart."""
_METRICS_APART = ("alloc_retries", "ooms")
_PER_DEVICE_LABEL = "per device"
_MEMORY_METRICS = ("memory/peak_allocated", "memory/peak_resident", "memory/allocated", "memory/resident")
"""The metrics that the page can show as memory use, the preferred metric first."""
_FIRST_FAMILIES = ("", "throughput", "lr", "memory")
"""The families that the page shows first, in this order. The empty family has the metrics of training and evaluations."""
OTHERS_FAMILY = "others"
"""The family of metrics whose own family would have only one chart."""
_LAST_FAMILIES = (OTHERS_FAMILY, "time")


def curves(run: RunFolder) -> dict[str, Any]:
    """Return the data of the page's charts: `axis` (seconds and tokens by step), `curves` by metric, and `families` (groups of
    related charts).

    A curve has `x` (steps), `y` (None if a value is not finite), `count` (the number of values before thinning), `odd` (how many
    are not finite) and `odd_at` (the first of the values that are not finite, each as its step and a name such as `NaN`). A chart
    lists its curves by name and label.
    """
    points = points_of(run)
    most = shares(points, room=_MAX_POINTS_PER_PAGE, most=MAX_POINTS_PER_CURVE)
    known = axis(run, most=2 * MAX_POINTS_PER_CURVE)
    return {
        "axis": {name: known[name] for name in ("step", "seconds", "tokens")},
        "curves": {name: thin_curve(steps, values, most[name.partition("/")[0]]) for name, (steps, values) in points.items()},
        "families": families(without_doubles(points), splits_of(run)),
    }


def rates(run: RunFolder, name: str) -> list[float]:
    """Return the tokens or samples per second that the page shows, as a curve. `name` is `token` or `sample`.

    If a monitor logged this rate, its values are returned; otherwise, the values in the metrics records.
    """
    monitored = [record.values[metric] for record in run.records if (metric := f"throughput/{name}s_per_second") in record.values]
    return monitored or [rate for record in run.records if (rate := getattr(record, f"{name}s_per_second"))]


def memory(run: RunFolder) -> tuple[str, list[float]]:
    """Return the name and values of the memory curve that the page shows.

    This is the first of these that was logged: the device's peak, the process's peak, or the current use.
    """
    for name in _MEMORY_METRICS:
        if values := [record.values[name] for record in run.records if name in record.values]:
            return name, values
    return "memory/process", [float(record.memory_bytes) for record in run.records if record.memory_bytes]


def splits_of(run: RunFolder) -> list[str]:
    """Return the prefixes of metric names that denote a dataset: common ones, such as `train`, and evaluated datasets."""
    evaluated = [name for each in run.evaluations for name in each["results"]]
    return list(dict.fromkeys([*_SPLITS, *evaluated]))


def select_points(xs: Sequence[float], ys: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most `most` points of a curve, chosen so that the thinned curve looks the same.

    They are the first point, the last point and, from each section of the curve, the least value, the greatest value, and one value
    that is not finite, if there is one.
    """
    if len(xs) <= most:
        return list(range(len(xs)))
    are_finite = all(map(math.isfinite, ys))
    stretches = max(1, (most - 2) // (2 if are_finite else 3))
    kept = {0, len(xs) - 1}
    for stretch in range(stretches):
        begin, end = len(xs) * stretch // stretches, len(xs) * (stretch + 1) // stretches
        part = ys[begin:end]
        finite = part if are_finite else [value for value in part if math.isfinite(value)]
        if finite:
            kept |= {begin + part.index(min(finite)), begin + part.index(max(finite))}
        if len(finite) < len(part):
            kept.add(next(place for place in range(begin, end) if not math.isfinite(ys[place])))
    return sorted(kept)


def families(names: Iterable[str], splits: Sequence[str]) -> list[dict[str, Any]]:
    """Group metrics into charts, and charts into families.

    A chart shows one metric on several datasets, or several metrics of the same unit.
    """
    charts: dict[tuple[str, str], list[dict[str, str]]] = {}
    for name in names:
        family, title, label = _place(name, splits)
        charts.setdefault((family, title), []).append({"name": name, "label": label})
    single = Counter(family for family, _ in charts)
    found: dict[str, list[dict[str, Any]]] = {}
    for (family, title), members in charts.items():
        if single[family] == 1 and family == "lr":  # show a single learning rate next to the loss
            family = ""
        elif single[family] == 1 and family not in _FIRST_FAMILIES:  # a group with a single chart gets no separate heading
            family, title = OTHERS_FAMILY, f"{family}/{title}"
        if len(members) > 1 and any(member["label"] == _PER_DEVICE_LABEL for member in members):
            members = [member if member["label"] == _PER_DEVICE_LABEL else {**member, "label": "all"} for member in members]
        members.sort(key=lambda member: _before(member["label"], splits))
        found.setdefault(family, []).append({"title": title, "curves": members})
    for family, drawn in found.items():
        drawn.sort(key=(lambda chart: _importance(chart, splits)) if not family else (lambda chart: _natural(chart["title"])))
    return [{"name": family, "charts": found[family]} for family in sorted(found, key=_family_order)]


def points_of(run: RunFolder) -> dict[str, tuple[list[int], list[float]]]:
    """Return the steps and values of every metric. If speed or memory use is not among the metrics, take it from other fields of the records."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for record in run.records:
        step = record.step
        for name, value in record.values.items():
            curve = found.get(name)
            if curve is None:
                curve = found[name] = ([], [])
            curve[0].append(step)
            curve[1].append(value)
    _add(found, "throughput/samples_per_second", run.records, lambda record: record.samples_per_second)
    _add(found, "throughput/tokens_per_second", run.records, lambda record: record.tokens_per_second)
    if not any(name.startswith("memory/") for name in found):
        _add(found, "memory/process", run.records, lambda record: record.memory_bytes)
    return found


def without_doubles(points: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics without duplicates: if two metrics have the same curve, only one of them is returned.

    Left out are a metric of one device that equals the metric of all devices, and the Trainer's speed and learning rate if other
    metrics contain them.
    """
    monitored = {name.partition("/")[0] for name in points}
    doubles = {"train/tokens_per_second"} if "throughput/tokens_per_second" in points else set()
    doubles |= {"train/learning_rate"} if "lr" in monitored else set()
    for name, curve in points.items():
        family, _, rest = name.partition("/device/")
        if rest and points.get(f"{family}/{rest}") == curve:
            doubles.add(name)
    return [name for name in points if name not in doubles]


def shares(names: Iterable[str], *, room: int, most: int) -> dict[str, int]:
    """Return the maximum number of points of one curve, by family (the part of a metric's name before the first `/`).

    These limits keep the page small. Small families get as many points as they need; large families share the rest.

    Args:
        names: the names of the curves; a name may occur more than once.
        room: how many points all curves may have together. Very many curves may exceed this number, because each gets at least
            `MIN_POINTS_PER_CURVE`.
        most: how many points one curve may have.
    """
    sizes = Counter(name.partition("/")[0] for name in names)
    found: dict[str, int] = {}
    for place, (family, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        share = room // (size * (len(sizes) - place))
        found[family] = min(most, max(MIN_POINTS_PER_CURVE, share))
        room -= min(room, found[family] * size)
    return found


def _add(
    found: dict[str, tuple[list[int], list[float]]],
    name: str,
    records: Sequence[MetricsRecord],
    value: Callable[[MetricsRecord], float],
) -> None:
    if name not in found and (measured := [record for record in records if value(record)]):
        found[name] = ([record.step for record in measured], [float(value(record)) for record in measured])


def thin_curve(steps: Sequence[int], values: Sequence[float], most: int, *, digits: int = 9) -> dict[str, Any]:
    """Return a curve in the form that `curves` returns, with at most `most` points, rounded to `digits` digits.

    Nine digits are enough for float32.
    """
    places = select_points(steps, values, most)
    odd: list[tuple[int, str]] = []
    if not all(map(math.isfinite, values)):
        odd = [(step, odd_name(value)) for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    return {
        "x": [steps[place] for place in places],
        "y": [_short(values[place], digits) for place in places],
        "count": len(values),
        "odd": len(odd),
        "odd_at": odd[:_MAX_ODD_POINTS],
    }


def odd_name(value: float) -> str:
    """Return the name of a value that is not finite: `NaN`, `Infinity` or `-Infinity`."""
    return _ODD_NAMES[str(value)]


def _short(value: float, digits: int) -> float | None:
    """Return the value rounded to `digits` significant digits; None if the value is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def axis(run: RunFolder, *, most: int) -> dict[str, list[float]]:
    """Return the charts' x-axes: a list of `step`, and lists of training `seconds`, `tokens`, `samples` and `wall` at these steps.

    `wall` is in seconds since the run began.

    Between two steps, the page interpolates these values linearly. A list is empty if the run does not have the values.
    """
    at: dict[int, tuple[float, float, float, float]] = {}
    counted = {"time/token": 0.0, "time/sample": 0.0}
    dated = (
        zip(run.records, run.times, strict=True)
        if len(run.times) == len(run.records)
        else ((each, math.nan) for each in run.records)
    )
    for record, moment in dated:
        for name, before in counted.items():
            logged = record.values.get(name, before)
            counted[name] = logged if math.isfinite(logged) else before
        # If a step has two records, the first is of training and the second is of an evaluation. Keep the first.
        at.setdefault(record.step, (record.elapsed_seconds, counted["time/token"], counted["time/sample"], moment - run.started))
    steps = sorted(at)
    places = select_points(steps, [at[step][0] for step in steps], most)
    kept = [steps[place] for place in places]
    is_dated = all(math.isfinite(at[step][3]) for step in kept)
    return {
        "step": [float(step) for step in kept],
        "seconds": [round(at[step][0], 4) for step in kept] if any(at[step][0] for step in kept) else [],
        "tokens": [at[step][1] for step in kept] if counted["time/token"] else [],
        "samples": [at[step][2] for step in kept] if counted["time/sample"] else [],
        "wall": [round(max(0.0, at[step][3]), 2) for step in kept] if is_dated else [],
    }


def _place(name: str, splits: Sequence[str]) -> tuple[str, str, str]:
    """Return where the page shows a metric: its family (a group of charts), its chart, and its label in the chart."""
    family, _, rest = name.partition("/")
    if not rest:
        return "", name, name
    if family in splits:
        return "", rest, family
    if family in _FAMILIES_IN_ONE_CHART:
        return family, rest if rest in _METRICS_APART else family, rest
    if rest.startswith("device/") and len(rest) > len("device/"):
        return family, rest.removeprefix("device/"), _PER_DEVICE_LABEL
    stem, _, last = rest.rpartition("/")
    if stem and last.isdigit():  # metrics that end in a number, such as one per device, share a chart
        return family, stem, last
    return family, rest, rest


def _importance(chart: dict[str, Any], splits: Sequence[str]) -> tuple[Any, ...]:
    """Return the sort key of a chart, which puts the loss first, then metrics that are measured on several datasets."""
    labels = {curve["label"] for curve in chart["curves"]}
    return chart["title"] != "loss", -len(labels & set(splits)), _natural(chart["title"])


def _before(label: str, splits: Sequence[str]) -> tuple[Any, ...]:
    return (splits.index(label) if label in splits else len(splits)), _natural(label)


def _family_order(family: str) -> tuple[Any, ...]:
    if family in _FIRST_FAMILIES:
        return _FIRST_FAMILIES.index(family), family
    return len(_FIRST_FAMILIES) + (1 + _LAST_FAMILIES.index(family) if family in _LAST_FAMILIES else 0), family


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key that orders `layer.2` before `layer.10`."""
    parts: list[tuple[int, str]] = []
    digits = ""
    for char in [*text, ""]:
        if char.isdigit() and char.isascii() and len(digits) < 15:
            digits += char
            continue
        if digits:
            parts.append((int(digits), ""))
            digits = ""
        parts.append((-1, char))
    return parts
