"""Reads a run's folder into one object. The content is not trusted, and every part may be missing or incomplete."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from callsheet.core.costs import Cost, CostReport, Failures, Slice, Window
from callsheet.core.run_state import MetricsRecord, Outcome
from callsheet.report.lines import JsonLines, inside, is_shallow, number, text_of, whole
from callsheet.report.lines import moment as moment_of
from callsheet.report.notes import NOTES, Notes, read_notes
from callsheet.report.records import RecordLines, Resume
from callsheet.run.lock_claims import claim_of
from callsheet.run.run_marker import is_marked

RUNNING, LOST, ENDED = "running", "lost", "ended"
"""The outcomes of a run that has recorded no end.

- `running`: the run wrote recently, and its process is not known to be dead. A run without a log of events must have a live
  process.
- `ended`: the run has ended, but how is unknown. It has written its results, or it had no `JSONLLogger` and has released its lock,
  or it was imported from a source that does not have the outcome.
- `lost`: all other runs.
"""

_LINE_FILES = ("metrics.jsonl", "events.jsonl", "costs.jsonl", "timeline.jsonl", "images.jsonl")
_TEXT_FILES = ("hyperparameters.json", "settings.json", "environment.json", "config.yaml", "call_sheet.txt", "results.json")
_MAX_TEXT_BYTES, _LOG_TAIL_BYTES = 2**20, 2**16
_MAX_WINDOWS, _MAX_SLICES_PER_WINDOW = 200, 20_000
_MAX_TABLES, _MAX_ENTRIES_PER_TABLE, _MAX_LOGS, _MAX_EVENTS = 200, 40, 64, 50_000
# A run counts as lost if it has written nothing for `_LOST_AFTER_SECONDS` and for `_LOST_AFTER_GAPS` times the usual gap.
# The usual gap is the median time between two records of the run.
_LOST_AFTER_SECONDS, _LOST_AFTER_GAPS = (300.0, 10)
_MAX_IMAGE_BYTES = 16 * 2**20
_MAX_STEP = 2**53  # the largest valid step: JSON readers that use doubles cannot represent larger integers exactly
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(slots=True)
class RunFolder:
    """The content of a run's folder. Times are in seconds since 1970, and NaN if unknown.

    Attributes:
        path: the folder.
        name: the name of the run.
        outcome: the outcome that the run recorded, or `running`, `ended` (how is unknown) or `lost` (it stopped writing without
            recording an end).
        reason: why the run ended, in one line.
        started: when the run was started first.
        ended: when the run ended; NaN while it is running.
        last_write: when a file of the run was last written.
        config: the content of `config.yaml`, which a recipe writes.
        config_text: the text of `config.yaml`.
        hyperparameters: the content of `hyperparameters.json`.
        settings: the content of `settings.json`: model, optimizer, scheduler and callbacks with their options.
        environment: the content of `environment.json`: command, git commit, packages and hardware.
        call_sheet: the printed call sheet.
        records: the metrics records that no resume has undone.
        times: the time of each record in `records`.
        records_left_out: the number of records that are left out because the run does not fit into memory. Records with a rare
            metric or with a value that is not finite are never left out.
        resumes: the resumes: the step, the time, and which records they undid.
        evaluations: the evaluations, with step, time and results. `is_undone` is true if the run was later resumed from an earlier
            step.
        checkpoints: the checkpoints, with step and time. `is_undone` is true if the run was later resumed from an earlier step.
        events: the lines of `events.jsonl`.
        files: the files that were logged, with step, time, name and path.
        images: the lines of `images.jsonl`.
        tables: for each table, by its name: its columns and rows at each step at which it was logged.
        costs: for each process, its last report on the time that callbacks take.
        windows: the timelines of timed steps, in the order of their steps.
        logs: the end of each log file in the subfolder `logs`, by the file's path.
        results: the content of `results.json`, which a recipe writes.
        notes: the user's tags and notes.
        torn_lines: the number of lines that are not JSON objects and were skipped, for example lines that a killed run left
            incomplete.
        version: a text that changes whenever the content of the folder has changed.
    """

    path: Path
    name: str
    outcome: str = LOST
    reason: str = ""
    started: float = math.nan
    ended: float = math.nan
    last_write: float = math.nan
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    call_sheet: str = ""
    records: list[MetricsRecord] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    records_left_out: int = 0
    resumes: list[Resume] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    files: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    costs: list[CostReport] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    torn_lines: int = 0
    version: str = ""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RunFolder:
        """Read the folder of a run, which may still be running.

        To read one run repeatedly, use a `RunReader`, which reads only what is new.

        Args:
            path: the run's folder.

        Returns:
            The content of the folder.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        return RunReader(path).read()

    @property
    def status(self) -> str:
        """The same as `outcome`: how the run ended, or `running`, or `lost` if the run stopped writing without recording an end."""
        return self.outcome

    @property
    def last_step(self) -> int:
        """The step of the last metrics record or event."""
        steps = [record.step for record in self.records[-1:]]
        steps += [whole(event.get("step")) for event in self.events[-1:]]
        return max(steps, default=0)

    @property
    def seconds(self) -> float:
        """The seconds of training; NaN if unknown, as in a run that was imported from files without times."""
        ends = [number(event.get("seconds")) for event in self.events[-1:] if event.get("event") == "run_end"]
        seconds = [record.elapsed_seconds for record in self.records[-1:] if record.elapsed_seconds] + [
            end for end in ends if math.isfinite(end)
        ]
        return max(seconds, default=math.nan)

    def start_event(self) -> dict[str, Any]:
        """Return the last `run_start` event, which contains the device, the world size and the versions.

        A run writes such an event at its first start and at each resume.
        """
        return next((event for event in reversed(self.events) if event.get("event") == "run_start"), {})


class RunReader:
    """Reads the folder of a run repeatedly while the run still writes.

    Each reading reads only what was appended since the last reading. Threads may share this object.

    Args:
        path: the run's folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._begin()

    def version(self) -> str:
        """Return a text that changes when a file of the run changes in size or time, or when the state of the run's lock changes."""
        with self._lock:
            return self._version(self._state())

    def read(self) -> RunFolder:
        """Return the current content of the folder.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        if not self._path.is_dir():
            raise FileNotFoundError(f"{self._path} is not the folder of a run")
        with self._lock:
            if any(lines.is_another() for lines in self._lines.values()):
                self._begin()
            # Take the state (sizes and times of files) before reading. Lines that are added during the reading are read at the next call.
            state = self._state()
            self._add_new()
            return self._run(self._version(state))

    def _begin(self) -> None:
        self._lines: dict[str, JsonLines] = {}
        self._records = RecordLines()
        self._events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)
        self._costs: dict[str, CostReport] = {}
        self._windows: list[Window] = []
        self._images: list[dict[str, Any]] = []
        self._tables: dict[str, deque[dict[str, Any]]] = {}

    def _new(self, name: str) -> Iterator[dict[str, Any]]:
        if name not in self._lines:
            self._lines[name] = JsonLines(self._path, name)
        return self._lines[name].new()

    def _add_new(self) -> None:
        for line in self._new("metrics.jsonl"):
            self._records.add(line)
        self._events.extend(line for line in self._new("events.jsonl") if isinstance(line.get("event"), str))
        for line in self._new("costs.jsonl"):
            if (report := _report(line)) is not None:
                self._costs[str(line.get("process"))] = report
        for line in self._new("timeline.jsonl"):
            if (window := _window(line)) is not None:
                self._windows.append(window)
            if len(self._windows) > _MAX_WINDOWS:
                del self._windows[1:-1:2]
        for line in self._new("images.jsonl"):
            files = line.get("files")
            if isinstance(files, list):
                names = [file for file in files if isinstance(file, str)]
                self._images.append(_step_and_time(line) | {"name": str(line.get("name")), "files": names})
        for path in self._table_files():
            for line in self._new(path):
                columns, rows, name = line.get("columns"), line.get("rows"), line.get("name")
                if isinstance(columns, list) and isinstance(rows, list):
                    plain = [row for row in rows if isinstance(row, list)]
                    name = name if isinstance(name, str) else path.removeprefix("tables/").removesuffix(".jsonl")
                    entries = self._tables.setdefault(name, deque(maxlen=_MAX_ENTRIES_PER_TABLE))
                    entries.append(_step_and_time(line) | {"columns": [str(column) for column in columns], "rows": plain})

    def _table_files(self) -> list[str]:
        found = (path.relative_to(self._path).as_posix() for path in sorted((self._path / "tables").rglob("*.jsonl")))
        return [name for name in found if inside(self._path, name) is not None][:_MAX_TABLES]

    def _log_files(self) -> list[str]:
        found = sorted((self._path / "logs").glob("*.log"), key=lambda path: (len(path.name), path.name))
        return [path.relative_to(self._path).as_posix() for path in found][:_MAX_LOGS]

    def _run(self, version: str) -> RunFolder:
        path, records, events = self._path, self._records, list(self._events)
        kept, times = records.records()
        name = path.resolve().name  # the folder may have been renamed since training
        if not is_marked(path):  # a subfolder that a logger made has no marker: take the run's name from an event
            name = next((str(event["run"]) for event in events if event.get("run")), name)
        config_text = text_of(path, "config.yaml", at_most=_MAX_TEXT_BYTES)
        run = RunFolder(
            path,
            name,
            last_write=self._last_write(),
            config=_yaml(config_text),
            config_text=config_text,
            hyperparameters=_json_object(text_of(path, "hyperparameters.json", at_most=_MAX_TEXT_BYTES)),
            settings=_json_object(text_of(path, "settings.json", at_most=_MAX_TEXT_BYTES)),
            environment=_json_object(text_of(path, "environment.json", at_most=_MAX_TEXT_BYTES)),
            call_sheet=text_of(path, "call_sheet.txt", at_most=_MAX_TEXT_BYTES),
            records=kept,
            times=times,
            records_left_out=records.counted - len(kept),
            resumes=list(records.resumes),
            events=events,
            evaluations=[_step_and_time(event) | {"standalone": bool(event.get("standalone")), "results": _results(event)}
                         for event in _events_of_kind("evaluation", events, records.resumes)],
            checkpoints=[_checkpoint(event) for event in _events_of_kind("checkpoint", events, records.resumes)],
            files=[_step_and_time(event) | {"name": str(event.get("name")), "path": str(event.get("path"))}
                   for event in _events_of_kind("file", events, records.resumes)],
            images=list(self._images),
            tables={name: list(entries) for name, entries in self._tables.items() if entries},
            costs=list(self._costs.values()),
            windows=sorted(self._windows, key=lambda window: window.began),
            logs={name: text_of(path, name, at_most=_LOG_TAIL_BYTES, from_end=True) for name in self._log_files()},
            results=_json_object(text_of(path, "results.json", at_most=_MAX_TEXT_BYTES)),
            notes=read_notes(path),
            torn_lines=sum(lines.torn for lines in self._lines.values()),
            version=version,
        )  # fmt: skip
        began = [moment_of(event.get("time")) for event in events[:1]] + times[:1]
        run.started = min((moment for moment in began if math.isfinite(moment)), default=math.nan)
        run.outcome = self._outcome()
        if run.outcome != RUNNING:
            run.reason = next((str(event.get("reason") or "") for event in events[-1:] if event["event"] == "run_end"), "")
            if run.outcome == ENDED and not events:
                run.reason = "unknown, because the run had no JSONLLogger"
            ends = [moment_of(event.get("time")) for event in events[-1:] if event.get("event") == "run_end"]
            run.ended = ends[0] if ends else run.last_write
        return run

    # --- outcome and version ---

    def _inputs(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the name and `os.stat` result of each file of the run, including files that only show that the run is alive."""
        names = [*_LINE_FILES, *_TEXT_FILES, *self._table_files(), *self._log_files(), NOTES, "heartbeat.json", "checkpoints"]
        for name in names:
            try:
                yield name, os.stat(self._path / name)
            except OSError:
                continue

    def _state(self) -> str:
        stats = sorted((name, status.st_size, status.st_mtime_ns) for name, status in self._inputs())
        return hashlib.blake2s(repr(stats).encode(), digest_size=12).hexdigest()

    def _version(self, state: str) -> str:
        claim = claim_of(self._path)
        owner = "unowned" if claim is None else "owned" if claim.is_alive else "left"
        return f"{state}-{'silent' if self._is_silent() else 'live'}-{owner}"

    def _last_write(self) -> float:
        return max((status.st_mtime for name, status in self._inputs() if name != NOTES), default=math.nan)

    def _is_silent(self) -> bool:
        times = [moment for moment in self._records.times[-20:] if math.isfinite(moment)]
        gaps = [after - before for before, after in pairwise(times)]
        patience = max(_LOST_AFTER_SECONDS, _LOST_AFTER_GAPS * statistics.median(gaps)) if gaps else _LOST_AFTER_SECONDS
        return not time.time() - self._last_write() <= patience

    def _outcome(self) -> str:
        for event in reversed(self._events):
            if event["event"] == "run_end":
                return str(event.get("outcome") or Outcome.FINISHED)
            if event["event"] == "run_start":
                break
        return RUNNING if self._is_running() else ENDED if self._has_results() or self._has_released_lock() else LOST

    def _is_running(self) -> bool:
        """Return whether a process is training in the folder, judging by the run's lock and the times of its files."""
        claim = claim_of(self._path)
        if claim is not None and claim.is_of_dead_process:
            return False
        # If the run has no JSONLLogger, its folder has no events, and only the lock shows whether the run is running.
        if not self._events and is_marked(self._path):
            return claim is not None and claim.is_alive
        return not self._is_silent()  # the lock alone is not enough, because a run that hangs keeps its lock

    def _has_released_lock(self) -> bool:
        """Return whether a run without a JSONLLogger has released its lock. A run does so at its end, unless it is killed."""
        return not self._events and is_marked(self._path) and claim_of(self._path) is None

    def _has_results(self) -> bool:
        """Return whether `results.json` exists and is not older than `config.yaml`, which each run writes at its start."""
        try:
            return os.stat(self._path / "results.json").st_mtime_ns >= os.stat(self._path / "config.yaml").st_mtime_ns
        except OSError:
            return False


def image_bytes(folder: str | os.PathLike[str], file: str) -> bytes | None:
    """Return the content of a PNG file of a run.

    Args:
        folder: the run's folder.
        file: the file's path relative to the folder, as in `images.jsonl`.

    Returns:
        The bytes, or None if the file is not a PNG below the folder's `images`, or is larger than 16 MiB.
    """
    path = inside(Path(folder), file)
    if path is None or not path.is_relative_to((Path(folder) / "images").resolve()):
        return None
    try:
        content = path.read_bytes() if path.stat().st_size <= _MAX_IMAGE_BYTES else b""
    except OSError:  # the image was deleted in the meantime
        return None
    return content if content.startswith(_PNG_SIGNATURE) else None


# --- parsing one line ---


def _events_of_kind(kind: str, events: list[dict[str, Any]], resumes: list[Resume]) -> list[dict[str, Any]]:
    """Return the events of one kind, such as `checkpoint`, from the run's log of events.

    Each event gets the entry `is_undone`: whether the run was later resumed from a step before that of the event.
    """
    found: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "run_start":
            moment = moment_of(event.get("time"))
            # A process that resumes the run records the resume before its `run_start`. So the last resume before `event` is
            # the resume of the process that starts here.
            at = [resume.step for resume in resumes if resume.time <= moment]
            for each in found:
                each["is_undone"] |= each["step"] > (at[-1] if at else 0)
        elif event["event"] == kind:
            found.append(event | {"step": whole(event.get("step")), "is_undone": False})
    return found


def _step_and_time(line: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"step": whole(line.get("step")), "time": moment_of(line.get("time"))}
    return found | {"is_undone": line["is_undone"]} if "is_undone" in line else found


def _results(event: dict[str, Any]) -> dict[str, dict[str, float]]:
    results = event.get("results")
    return {
        str(dataset): {str(name): number(value) for name, value in values.items()}
        for dataset, values in (results.items() if isinstance(results, dict) else ())
        if isinstance(values, dict)
    }


def _checkpoint(event: dict[str, Any]) -> dict[str, Any]:
    info = event.get("checkpoint")
    return (dict(info) if isinstance(info, dict) else {}) | _step_and_time(event)


def _report(line: dict[str, Any]) -> CostReport | None:
    try:
        costs = tuple(_make_named_tuple(Cost, cost) for cost in line["costs"])
        failures = tuple(_make_named_tuple(Failures, each) for each in line.get("failures") or ())
        report: CostReport = _make_named_tuple(CostReport, line | {"costs": (), "failures": ()})._replace(
            costs=costs, failures=failures
        )
    except (KeyError, TypeError, ValueError, OverflowError):  # the line is not a report of costs
        return None
    return report


def _window(line: dict[str, Any]) -> Window | None:
    try:
        slices = tuple(
            Slice(str(name), float(begin), float(seconds), int(step), str(callback))
            for name, begin, seconds, step, callback in line["slices"][:_MAX_SLICES_PER_WINDOW]
        )
        window: Window = _make_named_tuple(Window, line | {"slices": ()})
        is_usable = all(map(_is_usable, (*slices, _whole_of(window)))) and abs(window.last_step) <= _MAX_STEP
    except (KeyError, TypeError, ValueError, OverflowError):  # the line does not contain the timed spans of some steps
        return None
    return window._replace(slices=slices) if is_usable else None


def _is_usable(part: Slice) -> bool:
    """Return whether a timed slice has valid times and a valid step.

    A trace converts the times to whole nanoseconds, which fails for NaN and infinity.
    """
    return math.isfinite(moment_of(part.begin)) and math.isfinite(moment_of(part.seconds)) and abs(part.step) <= _MAX_STEP


def _whole_of(window: Window) -> Slice:
    return Slice("", window.began, window.seconds, window.first_step)


@cache
def _converters(kind: type[Any]) -> dict[str, Callable[[Any], Any]]:
    """Return, for each field of a named tuple, the function that converts a plain value to the field's type."""
    return {name: hint if hint in (str, int, float, bool) else tuple for name, hint in get_type_hints(kind).items()}


def _make_named_tuple(kind: type[Any], values: dict[str, Any]) -> Any:
    """Make a named tuple from plain values, which are converted to the fields' types. Missing fields get their defaults."""
    return kind(**{name: convert(values[name]) for name, convert in _converters(kind).items() if name in values})  # type: ignore[arg-type]  # a class is hashable


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and is_shallow(found) else {}


def _yaml(text: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:  # without PyYAML, the page shows only the text of the configuration
        return {}
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and is_shallow(found) else {}
