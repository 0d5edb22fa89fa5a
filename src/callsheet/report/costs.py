"""The time that callbacks took in all processes of a run, as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from callsheet.core.costs import CostReport


def cost_rows(reports: Sequence[CostReport]) -> list[dict[str, Any]]:
    """Return one row for each callback with the time that it took, the most expensive callback first.

    Each row has `events`, a list with one row for each event of the callback, with the same columns.

    `calls`, `seconds` and `worst` count only the timed calls. `of_step` is the fraction of a step that the callback takes at events
    that fire at every step, and `per_step` is this time in seconds. `of_run` is the fraction of the run that the callback takes at
    all other events. If every call is timed, all time is in `of_run`.
    """
    window_seconds = sum(report.window_seconds for report in reports)
    window_steps = sum(report.window_steps for report in reports)
    seconds = sum(report.seconds for report in reports)
    by_event: dict[str, dict[str, dict[str, Any]]] = {}
    for report in reports:
        for cost in report.costs:
            row = by_event.setdefault(cost.callback, {}).setdefault(cost.event, {**_empty(), "event": cost.event})
            row["calls"] += cost.calls
            row["seconds"] += cost.seconds
            row["worst"] = max(row["worst"], cost.worst_seconds)
            if cost.is_sampled:
                row["of_step"] += cost.seconds / window_seconds if window_seconds else 0.0
                row["per_step"] += cost.seconds / window_steps if window_steps else 0.0
            else:
                row["of_run"] += cost.seconds / seconds if seconds else 0.0
    rows = []
    for callback, events in by_event.items():
        inner = sorted(events.values(), key=lambda row: -row["seconds"])
        whole = {name: sum(row[name] for row in inner) for name in _empty()}
        rows.append({**whole, "callback": callback, "worst": max(row["worst"] for row in inner), "events": inner})
    return sorted(rows, key=lambda row: (-row["of_step"] - row["of_run"], -row["seconds"]))


def costs_table(reports: Sequence[CostReport]) -> dict[str, Any]:
    """Return the table of the callbacks' times, and the total steps and seconds from which its fractions are computed."""
    return {
        "mode": ", ".join(sorted({report.mode for report in reports})),
        "processes": len(reports),
        "steps": sum(report.steps for report in reports),
        "seconds": sum(report.seconds for report in reports),
        "window_steps": sum(report.window_steps for report in reports),
        "window_seconds": sum(report.window_seconds for report in reports),
        "rows": cost_rows(reports),
    }


def _empty() -> dict[str, Any]:
    return {"calls": 0, "seconds": 0.0, "worst": 0.0, "of_step": 0.0, "per_step": 0.0, "of_run": 0.0}
