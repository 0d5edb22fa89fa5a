"""The page of a comparison: many runs in one self-contained HTML file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from callsheet.report.compare.comparison import Compared, Comparison, run_facts
from callsheet.report.compare.values import better
from callsheet.report.contents import checkpoint_row, evenly, images_by_name, table_entries
from callsheet.report.curves import (
    MIN_POINTS_PER_CURVE,
    axis,
    families,
    points_of,
    shares,
    splits_of,
    thin_curve,
    without_doubles,
)
from callsheet.report.run_folder import RunFolder, image_bytes
from callsheet.report.run_page import Live, html_page, image_uris, json_in_html, plain, plotly_js, write_atomically

_SCRIPTS = ("dom.js", "tables.js", "frame.js", "charts.js", "compared_curves.js", "compared_parts.js", "live.js", "compare.js")

_MAX_PAGE_BYTES = 10_000_000
"""The size of a page, in bytes, up to which images are added. The constants below limit all other parts of a page."""
_MAX_POINTS, _MAX_POINTS_PER_CURVE, _MAX_AXIS_POINTS, _MAX_AXIS_POINTS_PER_RUN = 150_000, 1_000, 24_000, 1_000
_SIGNIFICANT_DIGITS = 6
_MAX_VALUE_ROWS, _MAX_SETTINGS_CHARACTERS = 4_000, 600_000
_MAX_EVALUATIONS, _MAX_EVALUATIONS_PER_RUN, _MAX_CHECKPOINTS, _MAX_CHECKPOINTS_PER_RUN = 20_000, 100, 1_000, 40
_MAX_TABLE_CHARACTERS, _MAX_TABLE_ROWS, _MAX_CELL_CHARACTERS = 600_000, 30, 400


def data(comparison: Comparison, metrics: Sequence[str] = ()) -> dict[str, Any]:
    """Return the data that the page's scripts draw, as plain JSON values. Runs and groups are given by their index.

    Args:
        comparison: the runs.
        metrics: only these metrics; empty: all of them.
    """
    runs = comparison.runs
    curves, families_drawn, left_out = _curves(comparison, metrics)
    rows, rows_left_out = _values(comparison, metrics)
    different, different_left_out = _differences(comparison)
    content: dict[str, Any] = plain(
        {
            "generated": time.time(),
            "group_by": comparison.group_by,
            "groups": comparison.groups,
            "runs": [{**run_facts(each), "group": comparison.groups.index(each.group)} for each in runs],
            "families": families_drawn,
            "metrics_left_out": left_out,
            "differences": different,
            "differences_left_out": different_left_out,
            "values": rows,
            "values_left_out": rows_left_out,
            "anatomy": _anatomy(comparison),
            "timed_steps": comparison.timed_steps(),
            "problems": comparison.problems(),
            "evaluations": _evaluations(runs),
            "checkpoints": [_checkpoints(each, len(runs)) for each in runs],
            "tables": _tables(runs),
            "images": _images(runs),
        }
    )
    # The curves and axes are large and contain no NaN or infinity, so skip `plain`, which replaces such values.
    return content | {"axes": [_axis(each, len(runs)) for each in runs], "curves": curves}


def comparison_page(comparison: Comparison, metrics: Sequence[str] = ()) -> str:
    """Return the page of a comparison as HTML. The page contains as many images as fit into 10 MB.

    Raises:
        MissingPackage: plotly is not installed.
    """
    content = data(comparison, metrics)
    # Base64 turns every 3 bytes of an image into 4 characters of the page.
    room = max(0, _MAX_PAGE_BYTES - len(plotly_js()) - len(json_in_html(content)) - 200_000) * 3 // 4
    by_run = {
        f"{each['run']}/{name}": [{"files": entry["files"]} for entry in each["entries"]]
        for name, found in content["images"].items()
        for each in found
    }
    paths = [each.run.path for each in comparison.runs]

    def read(file: str) -> bytes | None:
        run, _, name = file.partition("/")
        return image_bytes(paths[int(run)], name)

    pixels, content["images_left_out"] = image_uris(by_run, read, room=room)
    return html_page(_title(content), {"data": content, "pixels": pixels, "live": None}, _SCRIPTS)


def live_comparison_page(content: Mapping[str, Any], live: Live) -> str:
    """Return the page of a comparison as HTML for a server, from which the page loads images and new data.

    Args:
        content: the result of `data`, and the entries that `LiveComparison` adds.
        live: the settings of the live page.

    Raises:
        MissingPackage: plotly is not installed.
    """
    parts = {"data": content, "pixels": {}, "live": asdict(live)}
    return html_page(_title(content), parts, _SCRIPTS, has_server=True, nonce=live.nonce)


def write_comparison(comparison: Comparison, out: str | os.PathLike[str], metrics: Sequence[str] = ()) -> Path:
    """Write the page of a comparison to the file `out`, atomically. Return its path.

    Raises:
        MissingPackage: plotly is not installed.
    """
    path, text = Path(out), comparison_page(comparison, metrics)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return path


def _title(content: Mapping[str, Any]) -> str:
    runs = len(content["runs"])
    return f"{runs} run{'s' if runs != 1 else ''} compared - callsheet"


def _axis(each: Compared, runs: int) -> dict[str, list[float]]:
    most = _share(_MAX_AXIS_POINTS, runs, _MAX_AXIS_POINTS_PER_RUN)

    def short(run: RunFolder) -> dict[str, list[float]]:
        return {name: [plain(_short(value)) for value in values] for name, values in axis(run, most=most).items()}

    found: dict[str, list[float]] = each.once("axis", short, limit=most)
    return found


def _curves(comparison: Comparison, metrics: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Return the curves of each metric (one for each run), the charts in groups (families), and the number of metrics left out."""
    runs = comparison.runs
    points = [_points(each) for each in runs]
    names = dict.fromkeys(name for each in runs for name in _names(each) if not name.startswith("time/"))
    splits = dict.fromkeys(split for each in comparison.runs for split in splits_of(each.run))
    grouped = families([name for name in names if not metrics or name in metrics], list(splits))
    ordered = [curve["name"] for family in grouped for chart in family["charts"] for curve in chart["curves"]]
    room, shown = _MAX_POINTS // MIN_POINTS_PER_CURVE, list[str]()
    for name in ordered:
        room -= sum(name in each for each in points)
        if room < 0:
            break
        shown.append(name)
    most = shares([name for name in shown for each in points if name in each], room=_MAX_POINTS, most=_MAX_POINTS_PER_CURVE)
    curves = {
        name: [
            {"run": place, **_curve(each, name, most[name.partition("/")[0]])}
            for place, each in enumerate(runs)
            if name in points[place]
        ]
        for name in shown
    }
    # Each metric has its own chart, because lines of several metrics and many runs are hard to tell apart in one chart.
    charts = [
        {"name": family["name"], "charts": [_chart(curve["name"]) for chart in family["charts"] for curve in chart["curves"] if curve["name"] in curves]}
        for family in grouped
    ]  # fmt: skip
    return curves, [family for family in charts if family["charts"]], len(ordered) - len(shown)


def _chart(name: str) -> dict[str, Any]:
    return {"title": name, "curves": [{"name": name, "label": name}]}


def _points(each: Compared) -> dict[str, tuple[list[int], list[float]]]:
    found: dict[str, tuple[list[int], list[float]]] = each.once("points", points_of)
    return found


def _names(each: Compared) -> list[str]:
    found: list[str] = each.once("names", lambda _: without_doubles(_points(each)))
    return found


def _curve(each: Compared, name: str, most: int) -> dict[str, Any]:
    def thin(run: RunFolder) -> dict[str, Any]:
        curve = thin_curve(*_points(each)[name], most, digits=_SIGNIFICANT_DIGITS)
        return {field: curve[field] for field in ("x", "y", "count", "odd")}

    found: dict[str, Any] = each.once(f"curve {name}", thin, limit=most)
    return found


def _values(comparison: Comparison, metrics: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of the table of values, and how many are left out to limit the page's size. Rows of losses are left out last."""
    rows = [row for row in comparison.rows() if not metrics or row["metric"] in metrics]
    kept = {id(row) for row in sorted(rows, key=_is_minor)[:_MAX_VALUE_ROWS]}
    found = []
    for row in rows:
        if id(row) in kept:
            numbers = {name: _short(value) if isinstance(value, float) else value for name, value in row.items()}
            found.append({**numbers, "group": comparison.groups.index(row["group"])})
    return found, len(rows) - len(found)


def _is_minor(row: Mapping[str, Any]) -> bool:
    return not row["metric"].endswith("/loss") and "/" in row["metric"]


def _differences(comparison: Comparison) -> tuple[dict[str, dict[str, list[str]]], int]:
    """Return the settings that differ between runs, and how many of them are left out to limit the page's size."""
    found: dict[str, dict[str, list[str]]] = {}
    room, left_out = _MAX_SETTINGS_CHARACTERS, 0
    for group, rows in comparison.differences.items():
        for name, values in rows.items():
            room -= sum(map(len, values)) + len(name)
            if room < 0:
                left_out += 1
            else:
                found.setdefault(group, {})[name] = values
    return found, left_out


def _anatomy(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the rows of the table of a step's parts, with numbers rounded as the page shows them."""
    return [
        {**row, "cells": [cell and {name: _short(value) if isinstance(value, float) else value for name, value in cell.items()}
                          for cell in row["cells"]]}
        for row in comparison.anatomy()
    ]  # fmt: skip


def _evaluations(runs: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return the results of evaluations for each metric and run, as pairs of step and value."""
    found: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for place, each in enumerate(runs):
        for evaluation in each.run.evaluations:
            if not evaluation["is_undone"]:
                for dataset, results in evaluation["results"].items():
                    for name, value in results.items():
                        found.setdefault(f"{dataset}/{name}", {}).setdefault(place, []).append(
                            (evaluation["step"], _short(value))
                        )
    ordered = sorted(found.items(), key=lambda item: not item[0].endswith("/loss"))
    most = max(2, min(_MAX_EVALUATIONS_PER_RUN, _MAX_EVALUATIONS // max(1, sum(len(each) for each in found.values()))))
    return [
        {
            "name": name,
            "better": better(name),
            "runs": [(place, evenly(pairs, most)) for place, pairs in each.items()],
        }
        for name, each in ordered[: _MAX_EVALUATIONS // (2 * len(runs))]
    ]


def _checkpoints(each: Compared, runs: int) -> dict[str, Any]:
    """Return a summary of the run's checkpoints, and the rows of the latest checkpoints."""
    kept = [info for info in each.run.checkpoints if not info["is_undone"]]
    sizes = [info["size_bytes"] for info in kept if isinstance(info.get("size_bytes"), (int, float))]
    saving = each.values.get("checkpoint_save_seconds")
    best = [info["step"] for info in kept if info.get("best_metric_key")]
    return {
        "count": len(kept),
        "last_step": kept[-1]["step"] if kept else None,
        "best_step": best[-1] if best else None,
        "size": sizes[-1] if sizes else None,
        "save_seconds": saving.best if saving else None,
        "latest": [checkpoint_row(each.run, info) for info in kept[-_share(_MAX_CHECKPOINTS, runs, _MAX_CHECKPOINTS_PER_RUN) :]],
    }


def _tables(runs: Sequence[Compared]) -> dict[str, list[dict[str, Any]]]:
    """Return the logged tables by name, with as many of each run's latest entries as fit into the page."""
    found: dict[str, list[dict[str, Any]]] = {}
    room = _MAX_TABLE_CHARACTERS // len(runs)  # every run gets an equal share of the room for tables
    for place, each in enumerate(runs):
        left = room
        for name, logged in each.run.tables.items():
            entries = []
            for entry in table_entries(logged):
                rows = [[_shorten_cell(cell) for cell in row] for row in entry["rows"][:_MAX_TABLE_ROWS]]
                left -= sum(len(str(cell)) + 3 for row in rows for cell in row)
                if left < 0:
                    break
                entries.append({**entry, "rows": rows})
            if entries:
                found.setdefault(name, []).append({"run": place, "entries": entries[::-1]})
    return found


def _images(runs: Sequence[Compared]) -> dict[str, list[dict[str, Any]]]:
    """Return, for each image name, one entry per run with steps and files. Paths begin with the run's index, such as `2/`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for place, each in enumerate(runs):
        for name, entries in images_by_name(each.run).items():
            named = [{"step": entry["step"], "files": [f"{place}/{file}" for file in entry["files"]]} for entry in entries]
            found.setdefault(name, []).append({"run": place, "entries": named})
    return found


def _share(room: int, runs: int, most: int) -> int:
    return max(2, min(most, room // runs))


def _short(value: float) -> float:
    """Return the value rounded as the page shows it. A whole number becomes an int, which is shorter in JSON."""
    if not math.isfinite(value):
        return value
    return int(value) if float(value).is_integer() else float(f"{value:.{_SIGNIFICANT_DIGITS + 2}g}")


def _shorten_cell(cell: Any) -> Any:
    return f"{cell[:_MAX_CELL_CHARACTERS]}..." if isinstance(cell, str) and len(cell) > _MAX_CELL_CHARACTERS else cell
