"""Writes a run as a trace for Perfetto, in the Chrome trace event format: timed steps, metrics and events."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from callsheet.core.costs import Window
from callsheet.report.curves import select_points
from callsheet.report.lines import moment as moment_of
from callsheet.report.run_folder import RunFolder

_PROCESS_ID = 1
_STEPS_THREAD_ID, _EVENTS_THREAD_ID = 1, 2  # thread ids in the trace: one for nested spans, one for events
_MAX_COUNTERS, _MAX_POINTS_PER_COUNTER = 60, 1_000
_MAX_ARGUMENT_CHARACTERS = 2_000


def trace(run: RunFolder) -> dict[str, Any]:
    """Return a run's trace as plain data. Times are in microseconds since the run's start, which `otherData` contains."""
    began = min(
        [run.started, *(window.began for window in run.windows)], key=lambda time: time if math.isfinite(time) else math.inf
    )
    began = began if math.isfinite(began) else 0.0
    named = [
        {"ph": "M", "pid": _PROCESS_ID, "name": "process_name", "args": {"name": run.name}},
        {"ph": "M", "pid": _PROCESS_ID, "tid": _STEPS_THREAD_ID, "name": "thread_name", "args": {"name": "steps"}},
        {"ph": "M", "pid": _PROCESS_ID, "tid": _EVENTS_THREAD_ID, "name": "thread_name", "args": {"name": "events"}},
    ]
    events = [event for window in run.windows for event in _window(window, began)]
    events += [*_instants(run, began), *_counters(run, began)]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "traceEvents": [*named, *events],
        "displayTimeUnit": "ms",
        "otherData": {"run": run.name, "outcome": run.outcome, "began_seconds_since_1970": began},
    }


def trace_json(run: RunFolder) -> str:
    """Return a run's trace as JSON text."""
    return json.dumps(trace(run), allow_nan=False, separators=(",", ":"))


def _window(window: Window, began: float) -> Iterator[dict[str, Any]]:
    """Yield the trace's slices for a timing window (a group of timed steps): one for the window, one for each span or call in it.

    Times are rounded to nanoseconds, so that slices nest exactly.
    """
    start = round((window.began - began) * 1e9)
    title = f"steps {window.first_step} to {window.last_step}"
    yield _slice(title, "window", start, round(window.seconds * 1e9), {"whole": window.is_whole})
    end = start + round(window.seconds * 1e9)
    for each in window.slices:
        begin = start + round(each.begin * 1e9)
        stop = min(start + round((each.begin + each.seconds) * 1e9), end)
        if each.callback:
            yield _slice(each.callback, "callback", begin, stop - begin, {"event": each.name, "step": each.step})
        else:
            yield _slice(each.name, "span", begin, stop - begin, {"step": each.step})


def _slice(name: str, category: str, begin: int, length: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": _PROCESS_ID,
        "tid": _STEPS_THREAD_ID,
        "name": name,
        "cat": category,
        "ts": begin / 1000,
        "dur": max(0, length) / 1000,
        "args": args,
    }


def _instants(run: RunFolder, began: float) -> Iterator[dict[str, Any]]:
    for event in run.events:
        moment = moment_of(event.get("time"))
        if math.isfinite(moment):
            args = {name: str(value)[:_MAX_ARGUMENT_CHARACTERS] for name, value in event.items() if name not in ("time", "event")}
            at = {"pid": _PROCESS_ID, "tid": _EVENTS_THREAD_ID, "ts": round((moment - began) * 1e6, 3)}
            yield {"ph": "i", "s": "p", "name": event["event"], "cat": "event", "args": args, **at}


def _counters(run: RunFolder, began: float) -> Iterator[dict[str, Any]]:
    """Yield counter events for the metrics, at the times at which they were logged."""
    points: dict[str, tuple[list[float], list[float]]] = {}
    for record, moment in zip(run.records, run.times, strict=True):
        if math.isfinite(moment):
            for name, value in record.values.items():
                if math.isfinite(value):
                    times, values = points.setdefault(name, ([], []))
                    times.append(moment)
                    values.append(value)
    for name in sorted(points, key=lambda name: (not name.startswith(("train/", "validation/")), name))[:_MAX_COUNTERS]:
        times, values = points[name]
        for place in select_points(times, values, _MAX_POINTS_PER_COUNTER):
            at = round((times[place] - began) * 1e6, 3)
            yield {"ph": "C", "pid": _PROCESS_ID, "name": name, "ts": at, "args": {"value": values[place]}}
