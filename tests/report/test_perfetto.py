"""The trace is valid for Perfetto, and contains every slice at its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from callsheet.report import RunFolder
from callsheet.report.perfetto import trace, trace_json


@pytest.fixture(scope="module")
def events(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(trace_json(RunFolder.read(folder)))["traceEvents"]
    return found


def test_every_event_has_the_fields_of_the_format(events: list[dict[str, Any]]) -> None:
    needed = {"X": {"pid", "tid", "ts", "dur"}, "i": {"pid", "tid", "ts", "s"}, "C": {"pid", "ts", "args"}, "M": {"pid", "args"}}
    assert {event["ph"] for event in events} == set(needed)
    for event in events:
        assert needed[event["ph"]] <= event.keys()
        assert isinstance(event["name"], str)
        assert event.get("dur", 0) >= 0
        assert event.get("ts", 0) >= 0


def test_slices_nest(events: list[dict[str, Any]]) -> None:
    """Each slice of a thread is inside the open one, or after it."""
    slices = [event for event in events if event["ph"] == "X"]
    open_until: list[float] = []
    for each in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = round(each["ts"] * 1000), round((each["ts"] + each["dur"]) * 1000)
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], each
        open_until.append(end)


def test_every_slice_of_every_window_is_there(events: list[dict[str, Any]], folder: Path) -> None:
    run = RunFolder.read(folder)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(run.windows) + sum(len(window.slices) for window in run.windows)
    assert {"forward", "backward", "Slow", "OptimizerMonitor"} <= {event["name"] for event in slices}
    slow = [event["dur"] for event in slices if event["name"] == "Slow"]
    assert min(slow) >= 3000  # microseconds
    assert all(event["args"]["event"] == "on_train_step_end" for event in slices if event["name"] == "Slow")


def test_metrics_and_events_are_on_the_same_time_axis(events: list[dict[str, Any]], folder: Path) -> None:
    run = RunFolder.read(folder)
    loss = [event for event in events if event["ph"] == "C" and event["name"] == "train/loss"]
    logged = [
        (moment, record.values["train/loss"])
        for record, moment in zip(run.records, run.times, strict=True)
        if "train/loss" in record.values
    ]
    assert [event["args"]["value"] for event in loss] == [value for _, value in logged]
    assert [event["ts"] / 1e6 for event in loss] == pytest.approx([moment - run.started for moment, _ in logged], abs=1e-5)
    assert [event["name"] for event in events if event["ph"] == "i"] == [event["event"] for event in run.events]


@pytest.mark.parametrize("huge", ["1e308", "-1e308", "1e999", "NaN", "1" + "0" * 400, "18446744073709551616", "1e300"])
def test_a_trace_can_be_written_with_impossible_times(huge: str, tmp_path: Path) -> None:
    """Such times are left out, because the trace counts in whole nanoseconds."""
    good = '"first_step": 1, "last_step": 2, "began": 1e9, "seconds": 1'
    lines = {
        "metrics": [f'{{"step": 1, "time": {huge}, "memory_bytes": {huge}, "values": {{"train/loss": {huge}}}}}'],
        "events": [f'{{"event": "run_start", "time": {huge}, "step": {huge}}}', f'{{"event": "run_end", "time": {huge}}}'],
        "timeline": [
            f'{{"first_step": {huge}, "last_step": {huge}, "began": {huge}, "seconds": {huge}, "slices": []}}',
            f'{{{good}, "slices": [["forward", {huge}, {huge}, {huge}, ""]]}}',
            f'{{{good}, "slices": [["forward", 0.25, 0.5, 1, ""]]}}',
        ],
    }
    for name, logged in lines.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in logged))
    events = json.loads(trace_json(RunFolder.read(tmp_path)))["traceEvents"]
    slices = [event for event in events if event.get("cat") == "span"]
    assert [(event["name"], event["ts"], event["dur"]) for event in slices] == [("forward", 0.25e6, 0.5e6)]
    assert all(abs(event.get("ts", 0)) < 1e18 and event.get("dur", 0) < 1e18 for event in events)


def test_the_trace_of_an_empty_run_has_only_metadata(tmp_path: Path) -> None:
    assert [event["ph"] for event in trace(RunFolder.read(tmp_path))["traceEvents"]] == ["M", "M", "M"]
