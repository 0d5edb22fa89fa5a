"""Finds the problems of a run: what failed, which events were dropped, and what looks wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from callsheet.core.costs import Failures, is_costly
from callsheet.core.run_state import Outcome
from callsheet.report.costs import cost_rows
from callsheet.report.curves import odd_name
from callsheet.report.lines import whole
from callsheet.report.run_folder import LOST, RunFolder

_MAX_NAMES = 8
_MAX_LINES = 12
_MAX_LINE_CHARACTERS = 600
_PROBLEM_LINE_PATTERN = re.compile(
    r"\b(CRITICAL|ERROR|WARNING|WARN)\b|Traceback \(most recent call last\)|\b[A-Z]\w*(?:Warning|Error): "
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a run; `detail` is one or more lines of plain text."""

    level: Literal["error", "warning", "note"]
    title: str
    detail: str = ""


def problems(run: RunFolder) -> list[Problem]:
    """Return the problems of the run, the most serious first."""
    found = [
        *_endings(run),
        *_failures(run),
        *_counts(run),
        *_not_finite(run),
        *_memory(run),
        *_resumes(run),
        *_costly(run),
        *_logs(run),
        *_reading(run),
    ]
    order = ("error", "warning", "note")
    return sorted(found, key=lambda problem: order.index(problem.level))


def _endings(run: RunFolder) -> Iterator[Problem]:
    last_start = max((place for place, event in enumerate(run.events) if event["event"] == "run_start"), default=0)
    is_reported = False
    for place, event in enumerate(run.events):
        if event["event"] == "exception":
            title = f"{event.get('type', 'An exception')} at step {event.get('step')}"
            where = f"in the span {event.get('span')}" if event.get("span") else ""
            detail = "\n".join(filter(None, [_shorten(event.get("message")), where]))
            if place >= last_start:
                is_reported = True
                yield Problem("error", f"The run failed: {title}", detail)
            else:
                yield Problem("warning", f"An earlier attempt failed: {title}", detail)
        elif event["event"] == "preempt":
            yield Problem("warning", f"A signal preempted the run at step {event.get('step')}")
    if run.outcome == Outcome.FAILED and not is_reported:
        yield Problem("error", "The run failed", "Its exception was not recorded.")
    if run.outcome == LOST:
        yield Problem(
            "error",
            "The run is lost",
            f"It has recorded no end and has stopped writing; its last recorded step is {run.last_step}. It was killed, or hangs.",
        )


def _failures(run: RunFolder) -> Iterator[Problem]:
    by_callback: dict[str, list[Failures]] = {}
    for report in run.costs:
        for each in report.failures:
            by_callback.setdefault(each.callback, []).append(each)
    for name, failures in by_callback.items():
        count, dropped = sum(each.count for each in failures), sum(each.dropped for each in failures)
        is_off = any(each.is_off for each in failures)
        if count > 0 or is_off:
            title = f"{name} failed {_times(count)}" + (" and was switched off" if is_off else "")
            last = next((each.last for each in reversed(failures) if each.last), "")
            yield Problem("error" if is_off else "warning", title, f"last: {_shorten(last)}" if last else "")
        if dropped > 0:
            detail = "It was too slow for its queue, which discarded the oldest events."
            yield Problem("warning", f"The lane of {name} dropped {_several(dropped, 'event')}", detail)
        if (undelivered := sum(each.undelivered for each in failures)) > 0:
            detail = "It was still busy, or stuck, when the time limit was reached."
            yield Problem("warning", f"The lane of {name} had not delivered {_several(undelivered, 'event')} at the end", detail)


def _counts(run: RunFolder) -> Iterator[Problem]:
    for text in dict.fromkeys(str(event["inexact_counts"]) for event in run.events if event.get("inexact_counts")):
        yield Problem("warning", "The counts of steps or epochs may be wrong", _shorten(text))


def _not_finite(run: RunFolder) -> Iterator[Problem]:
    odd: dict[str, list[Any]] = {}
    for record in run.records:
        if all(map(math.isfinite, record.values.values())):
            continue
        for name, value in record.values.items():
            if not math.isfinite(value):
                counted = odd.setdefault(name, [record.step, odd_name(value), 0])
                counted[2] += 1
    if odd:
        lines = [f"{name}: {_times(times)}, first {value} at step {step}" for name, (step, value, times) in odd.items()]
        yield Problem("error", f"Values that are not finite, of {_several(len(odd), 'metric')}", _join_lines(lines, _MAX_NAMES))
    for checkpoint in run.checkpoints:
        if checkpoint.get("is_finite") is False:
            yield Problem(
                "error",
                f"The checkpoint of step {checkpoint['step']} holds values that are not finite",
                _shorten(checkpoint.get("path")),
            )


def _memory(run: RunFolder) -> Iterator[Problem]:
    for name, what in (
        ("memory/ooms", "The device ran out of memory"),
        ("memory/alloc_retries", "The allocator emptied its cache to find memory"),
    ):
        most = max((record.values.get(name, 0.0) for record in run.records), default=0.0)
        if 0 < most < math.inf:
            yield Problem("warning", f"{what} {_times(int(most))}", f"counted by {name}")


def _resumes(run: RunFolder) -> Iterator[Problem]:
    for resume in run.resumes:
        if resume.dropped and resume.dropped_to_step > resume.step:  # the run repeated at least one step
            title = (
                f"{_several(resume.dropped, 'record')} dropped: steps {resume.step + 1} to {resume.dropped_to_step} were repeated"
            )
            yield Problem("note", title, f"The run was resumed from step {resume.step}.")


def _costly(run: RunFolder) -> Iterator[Problem]:
    steps = sum(report.window_steps for report in run.costs)
    for row in cost_rows(run.costs):
        if is_costly(row["of_step"], row["per_step"], steps):
            yield Problem(
                "warning",
                f"{row['callback']} takes {row['of_step']:.0%} of the step",
                f"{1000 * row['per_step']:.3g} ms per step; give it an interval, or make it do less at each step.",
            )


def _logs(run: RunFolder) -> Iterator[Problem]:
    for name, text in run.logs.items():
        lines = [line.strip() for line in text.splitlines() if _PROBLEM_LINE_PATTERN.search(line)]
        if lines:
            shown = _join_lines([_shorten(line) for line in lines[-_MAX_LINES:]], _MAX_LINES)
            yield Problem("note", f"Warnings or errors in {_several(len(lines), 'line')} of {name}", shown)


def _reading(run: RunFolder) -> Iterator[Problem]:
    lost = sum(whole(event.get("lines_lost")) for event in run.events)
    if lost > 0:
        yield Problem(
            "warning",
            f"{_several(lost, 'line')} could not be written",
            "Writing to the disk failed; these lines are missing here.",
        )
    if run.torn_lines:
        yield Problem(
            "note",
            f"{_several(run.torn_lines, 'line')} could not be read",
            "A process that is killed may leave its last line incomplete.",
        )
    if run.records_left_out:
        yield Problem(
            "note",
            f"{run.records_left_out:,} records are not shown",
            "The run has more values than fit into memory. Metrics with few values, and values that are not finite, are complete.",
        )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _join_lines(lines: list[str], most: int) -> str:
    more = [f"and {len(lines) - most:,} more"] if len(lines) > most else []
    return "\n".join([*lines[:most], *more])


def _shorten(value: Any) -> str:
    text = str(value or "")
    return text if len(text) <= _MAX_LINE_CHARACTERS else f"{text[:_MAX_LINE_CHARACTERS]} ..."
