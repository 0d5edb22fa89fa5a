"""Computes the content of a run's page as plain data, with one function for each part of the page."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from callsheet.core.costs import Window
from callsheet.report.compare.settings import settings
from callsheet.report.costs import costs_table
from callsheet.report.curves import curves, memory, rates
from callsheet.report.lines import number, whole
from callsheet.report.problems import problems
from callsheet.report.run_folder import RunFolder

_MAX_WINDOWS, _MAX_SLICES = 40, 80_000
_MAX_MARKS, _MAX_EVENTS, _MAX_ROWS, _MAX_COLUMNS, _MAX_TABLE_ENTRIES = 10_000, 400, 500, 40, 60
_MAX_IMAGE_STEPS, _MAX_IMAGES_PER_STEP = 120, 64
_MAX_SAMPLES = 40
_MAX_CELL_CHARACTERS, _MAX_LOG_CHARACTERS, _MAX_TEXT_CHARACTERS = 4_000, 30_000, 200_000


def contents(run: RunFolder) -> dict[str, Any]:
    """Return every part of a run's page as plain data, by name. Numbers may be NaN."""
    evaluations = [each for each in run.evaluations if not each["is_undone"]]
    return {
        "version": run.version,
        "generated": time.time(),
        "run": _run(run),
        "tiles": _tiles(run, evaluations),
        "problems": [asdict(problem) for problem in problems(run)],
        **curves(run),
        "marks": _marks(run, evaluations),
        "windows": [_window(window) for window in _select_windows(run.windows)],
        "windows_left_out": len(run.windows) - len(_select_windows(run.windows)),
        "costs": costs_table(run.costs),
        "results": _final_results(run.results),
        "evaluations": _evaluations(evaluations),
        "checkpoints": [checkpoint_row(run, each) for each in run.checkpoints[-_MAX_ROWS:]],
        "checkpoints_left_out": max(0, len(run.checkpoints) - _MAX_ROWS),
        "images": images_by_name(run),
        "tables": {name: table_entries(entries) for name, entries in run.tables.items()},
        "call_sheet": run.call_sheet[:_MAX_TEXT_CHARACTERS],
        "config": run.config_text[:_MAX_TEXT_CHARACTERS],
        "settings": _settings(run),
        "events": [_event(event) for event in run.events[-_MAX_EVENTS:]],
        "events_in_all": len(run.events),
        "logs": {name: text[-_MAX_LOG_CHARACTERS:] for name, text in run.logs.items()},
    }


def _settings(run: RunFolder) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the settings with which the run was started. Each group of settings has a title, and rows of name and value."""
    groups = {"Settings": "settings", "Callbacks": "callbacks", "Code": "code", "Hardware": "hardware", "Packages": "packages"}
    found, described = [], settings(run)
    for title, group in groups.items():
        rows = [(name, cell_text(text)) for name, text in described[group].items() if text][: 4 * _MAX_ROWS]
        if rows:
            found.append((title, rows))
    return found


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested settings as a flat list of (dotted name, text), in the same order."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value and prefix.count(".") < 20:
            found += flatten(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", cell_text(value)))
    return found


def _run(run: RunFolder) -> dict[str, Any]:
    start = run.start_event()
    versions = start.get("versions")
    # The last epoch may have ended after the last record, so read the number of epochs from the `run_end` event too.
    epochs = [record.values["time/epoch"] for record in run.records[-1:] if "time/epoch" in record.values]
    epochs += [count for event in run.events[-1:] if math.isfinite(count := number(event.get("epochs")))]
    return {
        "name": run.name,
        "path": str(run.path),
        "outcome": run.outcome,
        "reason": cell_text(run.reason),
        "tags": list(run.notes.tags),
        "note": cell_text(run.notes.note),
        "started": run.started,
        "ended": run.ended,
        "last_write": run.last_write,
        "steps": run.last_step,
        "epochs": max(epochs, default=math.nan),
        "seconds": run.seconds,
        "records": len(run.records) + run.records_left_out,
        "starts": max(1, sum(event["event"] == "run_start" for event in run.events)),
        "device": cell_text(start.get("device")),
        "ranks": cell_text(start.get("world_size")),
        "host": cell_text(start.get("host")),
        "pid": cell_text(start.get("pid")),
        "versions": [(name, text) for name, text in flatten(versions) if text][:20] if isinstance(versions, dict) else [],
    }


def _tiles(run: RunFolder, evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the key figures at the top of the page. Each has a label, a value, a kind (such as `bytes`), and a line of detail."""
    tiles: list[dict[str, Any]] = []
    trained = [(record.step, record.values["train/loss"]) for record in run.records if "train/loss" in record.values]
    if trained:
        tiles.append({"label": "train/loss", "value": trained[-1][1], "detail": f"at step {trained[-1][0]}"})
    for dataset in list(dict.fromkeys(name for each in evaluations for name in each["results"]))[:2]:
        losses = [
            (each["step"], each["results"][dataset]["loss"]) for each in evaluations if "loss" in each["results"].get(dataset, {})
        ]
        finite = [each for each in losses if math.isfinite(each[1])]
        if finite:
            best = min(finite, key=lambda each: each[1])
            last = f"{losses[-1][1]:.5g}" if math.isfinite(losses[-1][1]) else "not finite"
            detail = f"the best, at step {best[0]}; last {last}"
            tiles.append({"label": f"{dataset}/loss", "value": best[1], "detail": detail})
    return [{"last": None, **tile} for tile in (*tiles, *_speed_tile(run), *_memory_tile(run))]


def _speed_tile(run: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the key figure for the run's mean speed, with the speed in the last metrics record."""
    for name in ("token", "sample"):
        counted = [record for record in run.records if record.values.get(f"time/{name}") and record.elapsed_seconds]
        curve = [value for value in rates(run, name) if math.isfinite(value)]
        whole_run = counted[-1].values[f"time/{name}"] / counted[-1].elapsed_seconds if counted else math.nan
        if math.isfinite(whole_run):
            last = curve[-1] if curve else None
            detail = "the whole run, all ranks"
            yield {"label": f"{name}s per second", "value": whole_run, "detail": detail, "last": last, "kind": "count"}
            return
        if curve:
            yield {"label": f"{name}s per second", "value": curve[-1], "detail": "the last record, all ranks", "kind": "count"}
            return


def _memory_tile(run: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield the key figure for the highest memory use."""
    name, values = memory(run)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        yield {"label": "memory, highest", "value": max(finite), "detail": f"of {name}", "kind": "bytes"}


def _marks(run: RunFolder, evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the steps of resumes, evaluations and checkpoints, which the charts mark."""
    saved = [{"step": each["step"], "kind": cell_text(each.get("kind"))} for each in run.checkpoints if not each["is_undone"]]
    return {
        "resumes": [{"step": resume.step, "dropped": resume.dropped} for resume in run.resumes if resume.step][-_MAX_MARKS:],
        "evaluations": evenly([each["step"] for each in evaluations], _MAX_MARKS),
        "checkpoints": evenly(saved, _MAX_MARKS),
    }


def _select_windows(windows: list[Window]) -> list[Window]:
    """Return as many timing windows (groups of timed steps) as fit into a page. The first and the last are always included."""
    most = _MAX_WINDOWS
    while most > 2 and sum(len(window.slices) for window in evenly(windows, most)) > _MAX_SLICES:
        most = most * 3 // 4
    return evenly(windows, most)


def evenly(items: list[Any], most: int) -> list[Any]:
    """Return at most `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _window(window: Window) -> dict[str, Any]:
    """Return a timing window (a group of timed steps) as JSON values. Each slice (timed span or call) has an index into `names`."""
    names: dict[str, int] = {}
    slices = [
        [
            names.setdefault(each.name, len(names)),
            round(each.begin * 1e6, 2),
            round(each.seconds * 1e6, 2),
            each.step,
            names.setdefault(each.callback, len(names)) if each.callback else -1,
        ]
        for each in window.slices
    ]
    return {
        "first_step": window.first_step,
        "last_step": window.last_step,
        "began": window.began,
        "seconds": window.seconds,
        "is_whole": window.is_whole,
        "names": list(names),
        "slices": slices,
    }


def _evaluations(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of evaluations, with one row for each evaluation and one column for each result.

    Only the last rows and the first columns are in the table. `lowest` has the lowest value of each column, over all evaluations.
    """
    results = [
        {f"{dataset}/{name}": value for dataset, found in each["results"].items() for name, value in found.items()}
        for each in evaluations
    ]
    names = list(dict.fromkeys(name for values in results for name in values))
    columns = names[:_MAX_COLUMNS]
    rows = [
        {"step": each["step"], "time": each["time"], "values": [values.get(name, math.nan) for name in columns]}
        for each, values in zip(evaluations[-_MAX_ROWS:], results[-_MAX_ROWS:], strict=True)
    ]
    finite = [[values[name] for values in results if math.isfinite(values.get(name, math.nan))] for name in columns]
    return {
        "columns": columns,
        "rows": rows,
        "lowest": [min(values, default=None) for values in finite],
        "rows_left_out": len(evaluations) - len(rows),
        "columns_left_out": len(names) - len(columns),
    }


def _final_results(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a recipe's `results.json`: the rows of its table, and the samples that the model generated."""
    rows, samples = content.get("results"), content.get("samples")
    return {
        "step": whole(content.get("step")),
        "unit": cell_text(content.get("unit")),
        "rows": [(cell_text(name), number(value)) for name, value in rows.items()][:_MAX_ROWS] if isinstance(rows, dict) else [],
        "samples": [cell_text(sample) for sample in samples[:_MAX_SAMPLES]] if isinstance(samples, list) else [],
    }


def checkpoint_row(run: RunFolder, info: dict[str, Any]) -> dict[str, Any]:
    """Return the values that a page shows for a checkpoint."""
    path = str(info.get("path") or "")
    name = _last_part(path)
    losses = info.get("val_losses")
    here = run.path / "checkpoints"
    is_here = "://" not in path and Path(path).parent.name == "checkpoints" and here.is_dir()
    return {
        "name": name,
        "path": path,
        "step": info["step"],
        "epoch": info.get("epoch"),
        "time": info["time"],
        "kind": cell_text(info.get("kind")),
        "size": info.get("size_bytes"),
        "train_loss": info.get("train_loss"),
        "val_losses": [(str(key), value) for key, value in losses.items()][:20] if isinstance(losses, dict) else [],
        "best": cell_text(info.get("best_metric_key")),
        "is_finite": info.get("is_finite") is not False,
        "is_undone": info["is_undone"],
        "is_gone": bool(is_here and name and not (here / name).exists()),
        "requested_by": cell_text(info.get("requested_by")),
    }


def images_by_name(run: RunFolder) -> dict[str, list[dict[str, Any]]]:
    """Return the logged images by name: a list of entries in the order of steps. An entry has a step, a time and files."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in run.images:
        entries = found.setdefault(each["name"], [])
        earlier = next((entry for entry in reversed(entries) if entry["step"] == each["step"]), None)
        if earlier is None:
            earlier = {"step": each["step"], "time": each["time"], "files": []}
            entries.append(earlier)
        earlier["files"] = list(dict.fromkeys([*earlier["files"], *each["files"]]))[:_MAX_IMAGES_PER_STEP]
    for entries in found.values():
        entries.sort(key=lambda entry: entry["step"])
    return {name: evenly(entries, _MAX_IMAGE_STEPS) for name, entries in found.items()}


def table_entries(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries that were logged to one table, the latest first. Each entry has column names, rows and a step."""
    return [
        {
            "step": each["step"],
            "time": each["time"],
            "columns": each["columns"],
            "rows": [[_plain_cell(cell) for cell in row] for row in each["rows"][:_MAX_ROWS]],
            "in_all": len(each["rows"]),
        }
        for each in reversed(entries[-_MAX_TABLE_ENTRIES:])
    ]


def _event(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event from the run's log of events, with a line of text that describes it."""
    known = {
        "exception": _exception_text,
        "checkpoint": _checkpoint_text,
        "evaluation": _evaluation_text,
        "run_start": _start_text,
        "run_end": _end_text,
    }
    describe = known.get(event["event"], _other_text)
    return {"event": event["event"], "time": event.get("time"), "step": event.get("step"), "text": describe(event)}


def _exception_text(event: dict[str, Any]) -> str:
    where = f" (in the span {cell_text(event['span'])})" if event.get("span") else ""
    return f"{cell_text(event.get('type'))}: {cell_text(event.get('message'))}{where}"


def _checkpoint_text(event: dict[str, Any]) -> str:
    info = event.get("checkpoint")
    fields = info if isinstance(info, dict) else {}
    losses = fields.get("val_losses")
    measured = [f"{name} {number(value):.5g}" for name, value in losses.items()] if isinstance(losses, dict) else []
    return ", ".join(filter(None, [cell_text(fields.get("kind")), _last_part(str(fields.get("path") or "")), *measured[:10]]))


def _evaluation_text(event: dict[str, Any]) -> str:
    results = event.get("results")
    found = flatten(results) if isinstance(results, dict) else []
    return ", ".join(f"{name.replace('.', '/', 1)} {number(value):.5g}" for name, value in found[:20])


def _start_text(event: dict[str, Any]) -> str:
    resumed = event.get("resumed_from")
    origin = cell_text(event.get("imported_from"))
    began = f"resumed from {_last_part(str(resumed))}" if resumed else f"began, imported from {origin}" if origin else "began"
    ranks = f"{cell_text(event['world_size'])} ranks" if number(event.get("world_size")) > 1 else ""
    return ", ".join(filter(None, [began, cell_text(event.get("device")), ranks, cell_text(event.get("host"))]))


def _end_text(event: dict[str, Any]) -> str:
    lost = whole(event.get("lines_lost"))
    more = [f"{lost} lines could not be written"] if lost > 0 else []
    ended = ": ".join(filter(None, [cell_text(event.get("outcome")), cell_text(event.get("reason"))]))
    seconds = number(event.get("seconds"))
    return ", ".join([ended, *([f"{seconds:.4g} s of training"] if math.isfinite(seconds) else []), *more])


def _other_text(event: dict[str, Any]) -> str:
    fields = {name: value for name, value in event.items() if name not in ("event", "time", "step", "epoch")}
    return ", ".join(f"{name} {text}" for name, text in flatten(fields)[:30] if text)


def _last_part(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2]


def _plain_cell(cell: Any) -> Any:
    return cell if isinstance(cell, (int, float)) and not isinstance(cell, bool) else cell_text(cell)


def cell_text(value: Any) -> str:
    """Return a value as readable text, truncated if it is long."""
    if value is None or value == [] or value == {}:
        return ""
    if isinstance(value, (list, tuple)) and all(isinstance(each, (str, int, float)) for each in value):
        value = ", ".join(map(str, value))
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _MAX_CELL_CHARACTERS else f"{text[:_MAX_CELL_CHARACTERS]} ... ({len(text):,} characters)"
