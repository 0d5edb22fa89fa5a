"""Writes an imported run as a run folder with the same files that `JSONLLogger` writes."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from callsheet.errors import CallsheetError, ConfigError
from callsheet.loggers.support.file_names import path_from
from callsheet.loggers.support.json_text import json_text
from callsheet.report.imports.imported_run import ImportedRun, Record
from callsheet.report.imports.plain_settings import plain_settings
from callsheet.report.lines import moment, text_of
from callsheet.report.notes import NOTES
from callsheet.report.run_folder import ENDED
from callsheet.run.run_marker import MARKER

_WRITTEN_FILES = {MARKER, "metrics.jsonl", "events.jsonl", "hyperparameters.json", "images.jsonl", "images"}
_DERIVED_FILES = {"report.html", "trace.json"}  # files that `callsheet report` writes to the folder
_KEPT_FILE = NOTES  # the user's notes, which are kept when the run is imported again
_VALIDATION_PREFIX = "validation/"
_MAX_EVALUATIONS = 2000
_MAX_NAME_BYTES = 120  # the maximum length of a folder's name, in bytes


@dataclass(frozen=True, slots=True)
class Imported:
    """A summary of an imported run.

    Attributes:
        folder: the run's new folder.
        kind: the tool that the run comes from, such as `tensorboard`.
        records: the number of metrics records.
        metrics: the number of metrics.
        images: the number of images.
        left_out: how much was not imported, by its kind.
        warnings: the files that could not be read completely, each with the reason.
    """

    folder: Path
    kind: str
    records: int
    metrics: int
    images: int
    left_out: dict[str, int]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an imported run comes from: the tool, the path of the source, and the run's key in the source.

    The marker file of the run's folder contains the origin, so that a later import of the same run replaces this folder.
    """

    kind: str
    source: str
    run: str

    def as_json(self) -> dict[str, str]:
        """Return the origin as a dict, for the marker file of the run's folder."""
        return {"from": self.kind, "source": self.source, "run": self.run}


def write(run: ImportedRun, to: Path, origin: Origin, *, name: str | None, taken: set[str]) -> Imported:
    """Write an imported run to a folder in `to`, in place of an earlier import of this run. Add the folder's name to `taken`.

    Args:
        run: what to write.
        to: the folder of runs.
        origin: where the run comes from.
        name: the name of the run's folder; None means the run's own name, with a number appended if another imported
            run has a folder of this name.
        taken: the names of the folders that this import has already written.

    Raises:
        ConfigError: a folder of this name was not made by an import, or the folder `name` has the import of another run.
        CallsheetError: the folder cannot be written.
    """
    target = _target(to, origin, folder_name(run.name) if name is None else name, is_fixed=name is not None, taken=taken)
    taken.add(target.name)
    draft = to / f".import-{secrets.token_hex(8)}"
    try:
        draft.mkdir(parents=True)
        try:
            records = _write_files(run, draft, target.name, origin)
            _move_into_place(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise CallsheetError(f"{target} cannot be written: {error}; name another folder with --to") from error
    left_out: Counter[str] = run.left_out + run.metrics.left_out
    return Imported(target, origin.kind, records, len(run.metrics), len(run.images), dict(left_out), tuple(run.warnings))


def folder_name(name: str) -> str:
    """Return `name` changed to a folder name that every file system and every command accepts."""
    safe = re.sub(r"[^\w.-]", "_", re.sub(r"[/\\]+", "-", name))
    # A leading dot would hide the folder, and a leading hyphen would look like an option.
    return _shorten(safe.lstrip(".-") or "run")


def _shorten(name: str) -> str:
    return name.encode()[:_MAX_NAME_BYTES].decode("utf-8", "ignore")


# --- choosing and replacing the folder ---


def _target(to: Path, origin: Origin, name: str, *, is_fixed: bool, taken: set[str]) -> Path:
    """Return the folder to write: the folder of an earlier import of the same run, or a new folder."""
    number = 1
    while True:
        target = to / (name if number == 1 else f"{name}-{number}")
        there = _read_origin(target)
        if target.name not in taken and (there is None or (there.get("from"), there.get("run")) == (origin.kind, origin.run)):
            return target
        if is_fixed:
            held = f"holds the run imported from {there.get('source')}" if there is not None else "was imported just now"
            raise ConfigError(f"{target} {held}; give another --name, or another folder with --to")
        number += 1


def _read_origin(folder: Path) -> dict[str, Any] | None:
    """Return where the imported run in `folder` comes from; None if there is no such folder.

    Raises:
        ConfigError: the folder is not an import, or something else was written to it.
    """
    if not os.path.lexists(folder):
        return None
    origin: Any = None
    if folder.is_dir() and not folder.is_symlink():
        try:
            marker = json.loads(text_of(folder, MARKER, at_most=2**20))
            origin = marker.get("imported") if isinstance(marker, dict) else None
        except (ValueError, RecursionError):
            origin = None
    instead = "give another --name, or another folder with --to"
    if not isinstance(origin, dict):
        raise ConfigError(f"{folder} is there and was not made by an import, so it stays as it is; {instead}")
    if others := sorted({entry.name for entry in folder.iterdir()} - _WRITTEN_FILES - _DERIVED_FILES - {_KEPT_FILE}):
        raise ConfigError(f"{folder} is an import to which {others[0]!r} was added, so it stays as it is; {instead}")
    return origin


def _move_into_place(draft: Path, target: Path) -> None:
    """Rename the complete folder `draft` to `target`, in place of the folder of an earlier import."""
    if not target.exists():
        draft.rename(target)
        return
    if (target / _KEPT_FILE).is_file():
        shutil.copyfile(target / _KEPT_FILE, draft / _KEPT_FILE)
    old = draft.with_name(f"{draft.name}-old")
    target.rename(old)
    try:
        draft.rename(target)
    except OSError:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


# --- writing the files ---


def _write_files(run: ImportedRun, folder: Path, name: str, origin: Origin) -> int:
    """Write all files of the run's folder, and return the number of records."""
    with ExitStack() as stack:
        metrics = stack.enter_context(open(folder / "metrics.jsonl", "w", encoding="utf-8"))
        evaluations: list[dict[str, Any]] | None = []
        first = last = elapsed = math.nan
        step = count = 0
        for record in run.metrics.records():
            if record.time == record.time:
                first = record.time if first != first else first
                last = record.time if last != last else max(last, record.time)
                elapsed = last - first
            line = {"step": record.step, "values": record.values, **_keep_finite(elapsed_seconds=elapsed, time=record.time)}
            metrics.write(f"{json_text(line)}\n")
            step, count = record.step, count + 1
            if evaluations is not None and (event := _evaluation(record)) is not None:
                evaluations.append(event)
                if len(evaluations) > _MAX_EVALUATIONS:  # so many values form a curve, and are not shown as single evaluations
                    evaluations = None
        started = moment(run.started) if math.isfinite(moment(run.started)) else first
        events = stack.enter_context(open(folder / "events.jsonl", "w", encoding="utf-8"))
        for event in [
            {**_keep_finite(time=started), "event": "run_start", "step": 0, "run": name, "imported_from": origin.kind},
            *(evaluations or ()),
            {
                **_keep_finite(time=moment(run.ended) if math.isfinite(moment(run.ended)) else last),
                "event": "run_end",
                "step": step,
                "outcome": run.outcome or ENDED,
                **_keep_finite(seconds=run.seconds if math.isfinite(run.seconds) else elapsed),
                **({"reason": run.reason} if run.reason else {}),
            },
        ]:
            events.write(f"{json_text(event)}\n")
    _write_images(run, folder)
    if run.hyperparameters:
        _write_json(folder / "hyperparameters.json", plain_settings(run.hyperparameters))
    _write_json(folder / MARKER, {"format": 1, "run": name, "began": _date(started), "imported": origin.as_json()})
    return count


def _date(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # the time is unknown, or is not a valid date
        return None


def _keep_finite(**values: float) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _evaluation(record: Record) -> dict[str, Any] | None:
    """Return an evaluation event if the record has values of the validation data; otherwise None."""
    found = {
        name.removeprefix(_VALIDATION_PREFIX): value
        for name, value in record.values.items()
        if name.startswith(_VALIDATION_PREFIX)
    }
    if not found:
        return None
    return {**_keep_finite(time=record.time), "event": "evaluation", "step": record.step, "results": {"validation": found}}


def _write_images(run: ImportedRun, folder: Path) -> None:
    numbers: Counter[tuple[str, int]] = Counter()
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    for image in run.images:
        path = _shorten(path_from(image.name)).strip("/") or "_"
        file = f"images/{path}/{image.step}-{numbers[path, image.step]}.png"
        numbers[path, image.step] += 1
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(image.png)
        line = {"step": image.step, "name": image.name, "files": [], **_keep_finite(time=image.time)}
        lines.setdefault((image.name, image.step), line)["files"].append(file)
    if lines:
        with open(folder / "images.jsonl", "w", encoding="utf-8") as out:
            out.writelines(f"{json_text(line)}\n" for line in sorted(lines.values(), key=lambda line: line["step"]))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(f"{json_text(content, indent=1)}\n", encoding="utf-8")


def rename_metrics(run: ImportedRun, names: Mapping[str, str]) -> Iterator[str]:
    """Rename metrics of the run, and yield each key of `names` that matches a metric. A key that ends with `/` matches as a prefix.

    Raises:
        ConfigError: two metrics would get the same name.
    """
    new = {name: name for name in run.metrics.names}
    for old, name in names.items():
        matching = [each for each in new if each == old or (old.endswith("/") and each.startswith(old))]
        new |= {each: name + each.removeprefix(old) for each in matching}
        if matching:
            yield old
    for name, count in Counter(new.values()).items():
        if count > 1:
            both = " and ".join(repr(each) for each, other in new.items() if other == name)
            raise ConfigError(f"--rename gives {both} of run {run.name} the same name {name!r}; give them different names")
    run.metrics.rename(new)
