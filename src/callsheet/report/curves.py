"""The curves of a run: one for each metric, thinned to what a screen can show, and grouped into charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from callsheet.core.run_state import MetricsRecord
from callsheet.report.run_folder import RunFolder

MOST_POINTS = 2_000
"""The most points that one curve has."""
_POINTS_IN_ALL = 500_000  # of all curves together, which makes a page of some megabytes
_FEWEST_POINTS = 16
_MOST_ODD = 50  # NaN and infinite values that one curve marks

_SPLITS = ("train", "validation", "val", "eval", "test")
_ODD_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_TOGETHER = ("lr", "memory")
"""Families whose metrics share a unit, and therefore a chart."""
_APART = ("alloc_retries", "ooms")
_PER_DEVICE = "per device"
_MEMORY = ("memory/peak_allocated", "memory/peak_resident", "memory/allocated", "memory/resident")
"""Curves of memory, the preferred one first."""
_FIRST = ("", "throughput", "lr", "memory")
"""Families in the order of the page; others follow by name. The empty family holds the metrics of training and evaluations."""
OTHERS = "others"
"""The family that collects metrics whose own family would have only one chart."""
_LAST = (OTHERS, "time")


def curves(run: RunFolder) -> dict[str, Any]:
    """Return `axis` (seconds and tokens at each step), `curves` by name, and `families` of `charts` that show them.

    A curve has `x` (steps), `y` (None where a value is not finite), `count` (the number of values before thinning), `odd` (how many
    are not finite) and `odd_at` (the first of those as (step, name)). A chart lists its curves by name and label.
    """
    points = _points(run)
    most = _shares(points)
    return {
        "axis": _axis(run.records),
        "curves": {name: _curve(steps, values, most[name.partition("/")[0]]) for name, (steps, values) in points.items()},
        "families": families(_without_doubles(points), splits_of(run)),
    }


def rates(run: RunFolder, name: str) -> list[float]:
    """Return the curve of `token`s or `sample`s per second that the page shows: the monitor's, else that of the records."""
    monitored = [record.values[metric] for record in run.records if (metric := f"throughput/{name}s_per_second") in record.values]
    return monitored or [rate for record in run.records if (rate := getattr(record, f"{name}s_per_second"))]


def memory(run: RunFolder) -> tuple[str, list[float]]:
    """Return the name and values of the preferred memory curve: the device's peak, else the process's, else the current use."""
    for name in _MEMORY:
        if values := [record.values[name] for record in run.records if name in record.values]:
            return name, values
    return "memory/process", [float(record.memory_bytes) for record in run.records if record.memory_bytes]


def splits_of(run: RunFolder) -> list[str]:
    """Return the prefixes of metrics that measure one quantity on several datasets: `train`, and the evaluated datasets."""
    evaluated = [name for each in run.evaluations for name in each["results"]]
    return list(dict.fromkeys([*_SPLITS, *evaluated]))


def thinned(xs: Sequence[float], ys: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most `most` points whose curve looks like that of all points.

    They are the first and the last point, and of each stretch the least, the greatest and one that is not finite.
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
    """Return charts by family. Metrics of the same name in several splits share a chart, and so do metrics of one unit."""
    charts: dict[tuple[str, str], list[dict[str, str]]] = {}
    for name in names:
        family, title, label = _place(name, splits)
        charts.setdefault((family, title), []).append({"name": name, "label": label})
    single = Counter(family for family, _ in charts)
    found: dict[str, list[dict[str, Any]]] = {}
    for (family, title), members in charts.items():
        if single[family] == 1 and family == "lr":  # a single learning rate belongs beside the loss
            family = ""
        elif single[family] == 1 and family not in _FIRST:  # one chart does not need a heading of its own
            family, title = OTHERS, f"{family}/{title}"
        if len(members) > 1 and any(member["label"] == _PER_DEVICE for member in members):
            members = [member if member["label"] == _PER_DEVICE else {**member, "label": "all"} for member in members]
        members.sort(key=lambda member: _before(member["label"], splits))
        found.setdefault(family, []).append({"title": title, "curves": members})
    for family, drawn in found.items():
        drawn.sort(key=(lambda chart: _importance(chart, splits)) if not family else (lambda chart: _natural(chart["title"])))
    return [{"name": family, "charts": found[family]} for family in sorted(found, key=_family_order)]


def _points(run: RunFolder) -> dict[str, tuple[list[int], list[float]]]:
    """Return steps and values of every metric, and of the fields of each record that no metric repeats."""
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


def _without_doubles(points: Mapping[str, Any]) -> list[str]:
    """Return the names without those whose curve another one shows.

    These are the speed of one rank where it equals that of all, and the Trainer's speed and learning rate where a monitor logs them.
    """
    monitored = {name.partition("/")[0] for name in points}
    doubles = {"train/tokens_per_second"} if "throughput/tokens_per_second" in points else set()
    doubles |= {"train/learning_rate"} if "lr" in monitored else set()
    for name, curve in points.items():
        family, _, rest = name.partition("/device/")
        if rest and points.get(f"{family}/{rest}") == curve:
            doubles.add(name)
    return [name for name in points if name not in doubles]


def _shares(names: Iterable[str]) -> dict[str, int]:
    """Return how many points a curve of each family may have: small families take what they need, large ones share the rest."""
    sizes = Counter(name.partition("/")[0] for name in names)
    room, found = _POINTS_IN_ALL, {}
    for place, (family, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        share = room // (size * (len(sizes) - place))
        found[family] = min(MOST_POINTS, max(_FEWEST_POINTS, share))
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


def _curve(steps: list[int], values: list[float], most: int) -> dict[str, Any]:
    places = thinned(steps, values, most)
    odd: list[tuple[int, str]] = []
    if not all(map(math.isfinite, values)):
        odd = [(step, odd_name(value)) for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    return {
        "x": [steps[place] for place in places],
        "y": [_short(values[place]) for place in places],
        "count": len(values),
        "odd": len(odd),
        "odd_at": odd[:_MOST_ODD],
    }


def odd_name(value: float) -> str:
    """Return the name of a value that is not finite."""
    return _ODD_NAMES[str(value)]


def _short(value: float) -> float | None:
    """Return the value with nine digits, more than float32 has; None if it is not finite."""
    return float(f"{value:.9g}") if math.isfinite(value) else None


def _axis(records: Sequence[MetricsRecord]) -> dict[str, list[float]]:
    """Return each step once, with its seconds and tokens. Between two steps the page interpolates them linearly."""
    at: dict[int, tuple[float, float]] = {}
    tokens = 0.0
    for record in records:
        logged = record.values.get("time/token", tokens)
        tokens = logged if math.isfinite(logged) else tokens
        at.setdefault(record.step, (record.elapsed_seconds, tokens))  # an evaluation's record comes after the step's own
    steps = sorted(at)
    places = thinned(steps, [at[step][0] for step in steps], MOST_POINTS * 2)
    kept = [steps[place] for place in places]
    return {
        "step": [float(step) for step in kept],
        "seconds": [round(at[step][0], 4) for step in kept],
        "tokens": [at[step][1] for step in kept] if tokens else [],
    }


def _place(name: str, splits: Sequence[str]) -> tuple[str, str, str]:
    """Return family, chart and label of a metric."""
    family, _, rest = name.partition("/")
    if not rest:
        return "", name, name
    if family in splits:
        return "", rest, family
    if family in _TOGETHER:
        return family, rest if rest in _APART else family, rest
    if rest.startswith("device/") and len(rest) > len("device/"):
        return family, rest.removeprefix("device/"), _PER_DEVICE
    stem, _, last = rest.rpartition("/")
    if stem and last.isdigit():  # numbered metrics, such as one per device
        return family, stem, last
    return family, rest, rest


def _importance(chart: dict[str, Any], splits: Sequence[str]) -> tuple[Any, ...]:
    """Return a sort key: the loss first, then what is measured on several datasets, then the rest."""
    labels = {curve["label"] for curve in chart["curves"]}
    return chart["title"] != "loss", -len(labels & set(splits)), _natural(chart["title"])


def _before(label: str, splits: Sequence[str]) -> tuple[Any, ...]:
    return (splits.index(label) if label in splits else len(splits)), _natural(label)


def _family_order(family: str) -> tuple[Any, ...]:
    if family in _FIRST:
        return _FIRST.index(family), family
    return len(_FIRST) + (1 + _LAST.index(family) if family in _LAST else 0), family


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
