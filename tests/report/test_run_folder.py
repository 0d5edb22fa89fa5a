"""Reading a run's folder: files of a real run, and invalid content."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callsheet.callbacks import CheckpointSaver
from callsheet.loggers import read_metrics
from callsheet.report import RunFolder, RunReader, data, image_bytes
from callsheet.report import records as records_module
from callsheet.report.compare.values import values_of
from callsheet.report.lines import _MAX_LINE_BYTES
from callsheet.report.perfetto import trace_json
from callsheet.run.run_lock import RunLock

from .sample_run import FailsAt, Logs, fit


@pytest.fixture
def crafted(tmp_path: Path) -> Path:
    """Return a folder for files that a test writes."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def write(folder: Path, name: str, *lines: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


def record(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "values": {f"train/{name}": value for name, value in values.items()},
        "elapsed_seconds": step / 2,
        "time": 1e9 + step,
    }


def everything(run: RunFolder) -> dict[str, Any]:
    """Return everything that was read as text, so that NaN equals NaN."""
    plain = {each.name: getattr(run, each.name) for each in dataclasses.fields(run)}
    return {name: repr(value) for name, value in plain.items()}


# --- what a run wrote ---


def test_the_records_equal_those_of_read_metrics(folder: Path) -> None:
    run = RunFolder.read(folder)
    assert repr(run.records) == repr(read_metrics(folder))  # as text: one holds a NaN
    assert len(run.times) == len(run.records)
    assert run.times == sorted(run.times)
    assert run.last_step == 120
    assert run.records_left_out == run.torn_lines == 0


def test_a_resume_has_its_step_and_the_number_of_dropped_records(folder: Path) -> None:
    (resume,) = RunFolder.read(folder).resumes
    assert (resume.step, resume.dropped, resume.dropped_to_step) == (42, 9, 51)  # step 52 failed before its record


def test_the_outcome_evaluations_checkpoints_and_times_are_read(folder: Path) -> None:
    run = RunFolder.read(folder)
    assert (run.name, run.outcome, run.status) == ("sample", "finished", "finished")
    assert [each["step"] for each in run.evaluations] == [20, 40, 60, 80, 100, 120]
    assert all(math.isfinite(each["results"]["validation"]["loss"]) for each in run.evaluations)
    assert [each["step"] for each in run.checkpoints if each["kind"] == "requested"] == [42]
    assert not any(each["is_undone"] for each in [*run.evaluations, *run.checkpoints])
    assert 0 < run.ended - run.started < 600
    assert run.seconds == pytest.approx(run.records[-1].elapsed_seconds, abs=1.0)


def test_the_settings_call_sheet_images_and_tables_are_read(folder: Path) -> None:
    run = RunFolder.read(folder)
    assert (run.config, run.hyperparameters["model"]) == ({"batch_size": 8, "model": "two layers"}, {"depth": 2, "width": 16})
    assert "on_train_step_end" in run.call_sheet
    assert [(each["step"], len(each["files"])) for each in run.images] == [(step, 2) for step in (20, 40, 60, 80, 100, 120)]
    assert all(image_bytes(folder, file) for each in run.images for file in each["files"])
    assert [row["step"] for row in run.tables["generations"]] == [20, 40, 60, 80, 100, 120]
    assert run.tables["generations"][0]["rows"][0][0] == "once upon a time, at step 20"


def test_costs_and_windows_are_those_of_both_processes(folder: Path) -> None:
    run = RunFolder.read(folder)
    assert len(run.costs) == 2
    assert sum(report.steps for report in run.costs) == 52 + 78
    assert [failure.callback for report in run.costs for failure in report.failures] == ["Broken"]
    assert run.windows
    for window in run.windows:
        assert {"train_step", "forward", "backward"} <= {each.name for each in window.slices if not each.callback}
        assert window.last_step - window.first_step == 3


def test_evaluations_and_checkpoints_that_a_resume_undid_are_marked(tmp_path: Path) -> None:
    folder = fit(tmp_path, CheckpointSaver(), steps=60)
    for path in (folder / "checkpoints").iterdir():  # leave only the first one to resume from
        if path.is_dir() and path.name != "ep1-ba20":
            shutil.rmtree(path)
    fit(tmp_path, steps=30, resume="auto")
    run = RunFolder.read(folder)
    assert [(each["step"], each["is_undone"]) for each in run.evaluations] == [(20, False), (40, True), (60, True), (30, False)]
    assert [each["is_undone"] for each in run.checkpoints] == [False, True, True]
    assert run.resumes[0].dropped_to_step == 60


# --- a run that continues ---


def test_reading_again_continues_where_the_last_reading_ended(folder: Path, crafted: Path) -> None:
    """A reader that reads files while they are written piece by piece has the same content as a new reader."""
    reader = RunReader(crafted)
    files = {path: path.read_bytes() for path in [*folder.glob("*.jsonl"), *(folder / "tables").glob("*.jsonl")]}
    for pieces in range(1, 12):
        for path, content in files.items():
            copy = crafted / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            begin, end = len(content) * (pieces - 1) // 11, len(content) * pieces // 11
            with open(copy, "ab") as file:
                file.write(content[begin:end])
        assert everything(reader.read()) == everything(RunFolder.read(crafted))
    assert len(reader.read().records) == len(RunFolder.read(folder).records)


def test_a_replaced_file_is_read_from_its_beginning(crafted: Path) -> None:
    reader = RunReader(crafted)
    write(crafted, "metrics.jsonl", record(1, loss=1.0), record(2, loss=2.0))
    assert [each.step for each in reader.read().records] == [1, 2]
    (crafted / "metrics.jsonl").unlink()
    assert reader.read().records == []
    write(crafted, "metrics.jsonl", record(7, loss=3.0), record(8, loss=3.0), record(9, loss=3.0))
    assert [each.step for each in reader.read().records] == [7, 8, 9]
    (crafted / "metrics.jsonl").write_text("")
    assert reader.read().records == []


def test_the_version_changes_with_the_content(crafted: Path) -> None:
    reader = RunReader(crafted)
    write(crafted, "metrics.jsonl", record(1, loss=1.0))
    first = reader.read().version
    assert reader.version() == reader.read().version == first
    write(crafted, "metrics.jsonl", record(2, loss=1.0))
    second = reader.version()
    write(crafted, "tables/t.jsonl", {"step": 1, "columns": ["a"], "rows": []})
    assert len({first, second, reader.version()}) == 3
    assert reader.read().version == reader.version()
    (crafted / "report.html").write_text("what we write ourselves is no news")
    assert reader.read().version == reader.version()


def test_running_and_lost_depend_on_the_last_write(crafted: Path) -> None:
    write(crafted, "events.jsonl", {"event": "run_start", "step": 0, "time": 1e9, "run": "named"})
    run = RunFolder.read(crafted)
    assert (run.outcome, run.name) == ("running", "named")
    assert math.isnan(run.ended)
    long_ago = time.time() - 3600
    os.utime(crafted / "events.jsonl", (long_ago, long_ago))
    run = RunFolder.read(crafted)
    assert run.outcome == "lost"
    assert run.ended == pytest.approx(long_ago, abs=1)


HOLDER = "import sys, os; from callsheet.run.run_lock import RunLock; RunLock(sys.argv[1]).acquire(0); os._exit(1)"


def test_a_renamed_folder_renames_the_run(crafted: Path) -> None:
    write(crafted, "events.jsonl", {"event": "run_start", "step": 0, "time": 1e9, "run": "named"})
    (crafted / "run.json").write_text("{}")
    assert RunFolder.read(crafted.rename(crafted.with_name("better"))).name == "better"


def test_a_run_without_events_runs_while_its_lock_is_held(crafted: Path) -> None:
    (crafted / "config.yaml").write_text("recipe: pretrain\n")
    (crafted / "run.json").write_text("{}")
    reader, lock = RunReader(crafted), RunLock(crafted)
    lock.acquire(0)
    assert reader.read().outcome == "running"
    for path in crafted.iterdir():  # without a logger, a run may not write for hours
        os.utime(path, (1e9, 1e9))
    held = reader.read()
    assert held.outcome == "running"
    lock.release()
    assert reader.version() != held.version
    assert reader.read().outcome == "ended"
    assert "JSONLLogger" in reader.read().reason
    (crafted / "results.json").write_text('{"step": 3}')
    ended = reader.read()
    assert (ended.outcome, ended.results) == ("ended", {"step": 3})
    os.utime(crafted / "config.yaml", (time.time() + 60, time.time() + 60))  # the run was started again and killed
    subprocess.run([sys.executable, "-c", HOLDER, str(crafted)], check=False)
    assert (reader.read().outcome, reader.read().reason) == ("lost", "")


def test_a_run_whose_process_is_gone_is_lost_at_once(crafted: Path) -> None:
    write(crafted, "events.jsonl", {"event": "run_start", "step": 0, "time": 1e9, "run": "named"})
    assert RunFolder.read(crafted).outcome == "running"
    subprocess.run([sys.executable, "-c", HOLDER, str(crafted)], check=False)
    assert RunFolder.read(crafted).outcome == "lost"


def test_a_run_with_rare_records_counts_as_running_for_longer(crafted: Path) -> None:
    write(crafted, "metrics.jsonl", *[record(step, loss=1.0) | {"time": 1e9 + 1000 * step} for step in range(10)])
    an_hour_ago = time.time() - 3600
    os.utime(crafted / "metrics.jsonl", (an_hour_ago, an_hour_ago))
    assert RunFolder.read(crafted).outcome == "running"  # its records are 15 minutes apart


# --- missing, incomplete, huge and hostile files ---


def test_reading_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not the folder of a run"):
        RunFolder.read(tmp_path / "nothing")


def test_an_empty_folder_is_a_lost_run(crafted: Path) -> None:
    run = RunFolder.read(crafted)
    assert (run.outcome, run.records, run.name, run.last_step) == ("lost", [], "run", 0)


def test_incomplete_lines_are_skipped_and_counted(crafted: Path) -> None:
    write(crafted, "metrics.jsonl", record(1, loss=1.0), '{"step": 2, "values": {"tr', record(3, loss=3.0))
    with open(crafted / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "val')  # a line that is still being written
    run = RunFolder.read(crafted)
    assert ([each.step for each in run.records], run.torn_lines) == ([1, 3], 1)


def test_an_endless_line_is_skipped(crafted: Path) -> None:
    with open(crafted / "metrics.jsonl", "wb") as file:
        file.write(b"[" * (_MAX_LINE_BYTES + 5) + b"\n")
    write(crafted, "metrics.jsonl", record(2, loss=1.0))
    run = RunFolder.read(crafted)
    assert ([each.step for each in run.records], run.torn_lines) == ([2], 1)


def test_numbers_that_json_cannot_represent_are_read(crafted: Path) -> None:
    write(crafted, "metrics.jsonl", record(1, a="NaN", b="Infinity", c="-Infinity", d=[1], e=None, f="no number"))
    values = RunFolder.read(crafted).records[0].values
    assert math.isnan(values["train/a"])
    assert (values["train/b"], values["train/c"]) == (math.inf, -math.inf)
    assert all(math.isnan(values[f"train/{name}"]) for name in "def")


def test_memory_is_bounded(crafted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "_MAX_VALUES", 3000)
    monkeypatch.setattr(records_module, "_MAX_RARE_VALUES", 50)
    lines = []
    for step in range(5000):
        line = record(step, loss=math.sin(step), norm=1.0)
        if step % 500 == 0:
            line["values"]["validation/loss"] = 1.0
        if step == 4321:
            line["values"]["train/loss"] = "NaN"
        if step in (777, 3333):  # the extremes of the norm, in records that are left out
            line["values"]["train/norm"] = step
        if step == 4555:  # a metric that appears after the first records were left out
            line["values"]["test/accuracy"] = 0.5
        lines.append(line)
    lines[1234]["values"]["train/norm"] = -3.0
    lines[-1]["values"]["train/norm"] = 1.25
    write(crafted, "metrics.jsonl", *lines)
    run = RunFolder.read(crafted)
    norms = [each.values["train/norm"] for each in run.records if "train/norm" in each.values]
    assert sum(len(each.values) for each in run.records) <= 3000
    assert [each.step for each in run.records if "test/accuracy" in each.values] == [4555]
    assert (min(norms), max(norms), norms[-1], values_of(run)["train/norm"].last) == (-3.0, 3333.0, 1.25, 1.25)
    assert len(run.records) + run.records_left_out == 5000
    assert [each.step for each in run.records if "validation/loss" in each.values] == list(range(0, 5000, 500))
    assert 4321 in [each.step for each in run.records]
    steps = [each.step for each in run.records]
    assert max(after - before for before, after in pairwise(steps)) <= 8  # there are no large gaps

    write(crafted, "metrics.jsonl", {"resumed_from_step": 2999, "records": 3000}, record(3000, loss=1.0))
    assert max(each.step for each in RunFolder.read(crafted).records) <= 3000


def test_files_outside_are_not_read(crafted: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    write(secret, "metrics.jsonl", record(1, loss=1.0))
    write(secret, "tables/t.jsonl", {"step": 1, "columns": ["a"], "rows": [["secret"]]})
    write(secret, "rank-0.log", "secret")
    (secret / "config.yaml").write_text("secret: 1\n")
    (crafted / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    (crafted / "config.yaml").symlink_to(secret / "config.yaml")
    (crafted / "tables").symlink_to(secret / "tables")
    (crafted / "logs").symlink_to(secret)
    run = RunFolder.read(crafted)
    assert (run.records, run.config_text, run.tables) == ([], "", {})
    assert "secret" not in "".join(run.logs.values())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_files_that_are_not_regular_do_not_block(crafted: Path) -> None:
    for name in ("metrics.jsonl", "config.yaml", "results.json", "images.jsonl", "trigger"):
        os.mkfifo(crafted / name)
    (crafted / "events.jsonl").mkdir()
    assert RunFolder.read(crafted).records == []
    with pytest.raises(OSError, match="is not a regular file"):
        read_metrics(crafted)


@pytest.mark.parametrize("deep", ['{"a":' * 450 + "1" + "}" * 450, "[" * 300 + "]" * 300, "[" * 100_000 + "]" * 100_000])
def test_deeply_nested_content_does_not_break_the_page(crafted: Path, deep: str) -> None:
    """Such a line counts as invalid; the others are read."""
    (crafted / "tables").mkdir()
    for name in ("metrics", "events", "costs", "timeline", "images", "tables/t"):
        values = (
            f'"step": 1, "event": "checkpoint", "values": {{"a": 1}}, "columns": ["a"], "rows": [[{deep}]], "checkpoint": {deep}'
        )
        write(crafted, f"{name}.jsonl", f"{{{values}}}", f'{{"step": 2, "event": "x", "values": {{"train/loss": {deep}}}}}')
    write(crafted, "metrics.jsonl", record(3, loss=1.0))
    for name in ("hyperparameters.json", "results.json", "config.yaml"):
        (crafted / name).write_text(f'{{"results": {deep}}}')
    run = RunFolder.read(crafted)
    json.dumps(data(run), allow_nan=False)
    trace_json(run)
    assert ([each.step for each in run.records], run.torn_lines) == ([3], 12)
    assert [each.step for each in read_metrics(crafted)][-1] == 3


def test_images_outside_are_not_shown(folder: Path, tmp_path: Path) -> None:
    crafted = tmp_path / "run"
    (crafted / "images" / "a").mkdir(parents=True)
    png = image_bytes(folder, RunFolder.read(folder).images[0]["files"][0])
    assert png is not None
    (tmp_path / "outside.png").write_bytes(png)
    (crafted / "beside.png").write_bytes(png)
    (crafted / "images" / "inside.png").write_bytes(png)
    (crafted / "images" / "text.png").write_text("no image")
    (crafted / "images" / "link.png").symlink_to(tmp_path / "outside.png")
    assert image_bytes(crafted, "images/inside.png") == png
    names = ["../outside.png", "images/../../outside.png", str(tmp_path / "outside.png"), "images/link.png", "images/text.png"]
    for name in [*names, "beside.png", "images", "images/none.png", "", "images/\0.png", "/dev/zero"]:
        assert image_bytes(crafted, name) is None, name


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, "NaN", "\ud800", "1e999"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
KEYS = (
    "step time values event run checkpoint results costs failures slices first_step last_step began seconds name files columns rows records "
    "resumed_from_step process outcome reason type message span mode steps window_steps window_seconds path val_losses resumed_from lines_lost"
    " inexact_counts"
)


@pytest.mark.test_all
@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.dictionaries(st.sampled_from(KEYS.split()), anything, max_size=12), max_size=12),
    text=st.text(max_size=30),
    results=st.dictionaries(st.sampled_from(["step", "unit", "results", "samples"]), anything),
)
def test_no_content_of_the_folder_breaks_the_page(
    lines: list[dict[str, Any]], text: str, results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A page can be made from any JSON lines and any text."""
    folder = tmp_path_factory.mktemp("any")
    for name in ("metrics", "events", "costs", "timeline", "images", "tables/t"):
        write(folder, f"{name}.jsonl", *lines)
        known = {"event": {"events": "checkpoint"}.get(name, "evaluation"), "step": 3, "values": {"a": 1}}
        write(folder, f"{name}.jsonl", *[{**line, **known} for line in lines])
    for name in ("config.yaml", "hyperparameters.json", "call_sheet.txt", "logs/rank-0.log"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", errors="replace")
    (folder / "results.json").write_text(json.dumps(results))
    json.dumps(data(RunFolder.read(folder)), allow_nan=False)


def test_the_exception_of_a_failed_run_has_its_type_and_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, Logs(), FailsAt(12))
    run = RunFolder.read(tmp_path / "sample")
    assert run.outcome == "failed"
    assert [(each["type"], each["step"]) for each in run.events if each["event"] == "exception"] == [("ValueError", 12)]


@given(
    st.lists(st.dictionaries(st.sampled_from("abcde"), st.floats(-3, 3, width=16) | st.just(math.nan), max_size=5), max_size=120),
    st.integers(10, 60),
)
@settings(max_examples=60, deadline=None)
def test_extremes_and_last_values_stay_when_records_are_left_out(logged: list[dict[str, float]], most: int) -> None:
    """The least, the greatest and the last value of each metric are those of all records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "_MAX_VALUES", most)
        patch.setattr(records_module, "_MAX_RARE_VALUES", 3)
        lines = records_module.RecordLines()
        lines._most_values = most
        for step, values in enumerate(logged):
            lines.add({"step": step, "values": values, "time": step})
    records, times = lines.records()
    assert times == [each.step for each in records] == sorted({each.step for each in records})
    for name in "abcde":
        every, kept = (
            [values[name] for values in found if name in values] for found in (logged, [each.values for each in records])
        )
        finite, finite_kept = ([value for value in found if not math.isnan(value)] for found in (every, kept))
        assert (min(finite, default=None), max(finite, default=None)) == (
            min(finite_kept, default=None),
            max(finite_kept, default=None),
        )
        assert repr(every[-1:]) == repr(kept[-1:])
        assert len(every) - len(finite) == len(kept) - len(finite_kept)  # no NaN is left out
