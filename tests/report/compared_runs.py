"""Writes folders of runs to compare, with known content, so that the values on the page can be computed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STARTED = 1_700_000_000.0


def write_run(
    folder: Path,
    name: str,
    losses: Mapping[int, float],
    *,
    seconds: float = 0.5,
    events: list[dict[str, Any]] | None = None,
    more: Mapping[str, float] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write a run with `train/loss` at the given steps, and `more` at each.

    A step takes `seconds` of training time, and 1.5 times as much wall-clock time.
    """
    run = folder / name
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "hyperparameters.json").write_text(json.dumps(settings or {}))
    with open(run / "metrics.jsonl", "w") as file:
        for step, loss in losses.items():
            values = {"train/loss": loss, "time/sample": step * 4, "time/token": step * 100, **(more or {})}
            line = {"step": step, "values": values, "elapsed_seconds": step * seconds, "time": STARTED + 1.5 * step * seconds}
            file.write(json.dumps(line) + "\n")
    start = {"event": "run_start", "run": name, "time": STARTED, "step": 0}
    end = {
        "event": "run_end",
        "outcome": "finished",
        "time": STARTED + 1000,
        "step": max(losses),
        "seconds": max(losses) * seconds,
    }
    with open(run / "events.jsonl", "w") as file:
        file.writelines(json.dumps(event) + "\n" for event in [start, *(events or []), end])
    return run


def write_timeline(run: Path, steps: int, *, forward: float, backward: float) -> None:
    """Write a timing window for each step, which consists of a forward and a backward of the given seconds."""
    windows = []
    at = 0.0
    for step in range(1, steps + 1):
        slices: list[list[Any]] = [
            ["train_step", at, forward + backward, step, ""],
            ["forward", at, forward, step, ""],
            ["backward", at + forward, backward, step, ""],
        ]
        began, seconds = STARTED + at, forward + backward
        windows.append(
            {"first_step": step, "last_step": step, "began": began, "seconds": seconds, "is_whole": True, "slices": slices}
        )
        at += forward + backward
    (run / "timeline.jsonl").write_text("".join(f"{json.dumps(window)}\n" for window in windows))
