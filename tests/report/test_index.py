"""The index of runs: a cache of their folders that gives correct results whatever happens to it."""

from __future__ import annotations

import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.loggers import JSONLLogger, read_metrics
from callsheet.report.index import INDEX, MetricRow, RunRow, run_names, runs_in

DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3


def train(folder: Path, name: str, *callbacks: Callback, **options: Any) -> None:
    torch.manual_seed(1)
    with Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        DATA,
        DATA[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        callbacks=callbacks,
        loggers=[JSONLLogger()],
        runs_folder=folder,
        run_name=name,
        device="cpu",
        **{"max_duration": "2ep", "log_interval": "1ba", **options},
    ) as trainer:
        trainer.fit()


class LogsOdd(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        ctx.log({"odd/nan": math.nan, "odd/up": ctx.step, "odd/wild": math.inf if ctx.step == 6 else -ctx.step}, across="same")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two runs."""
    folder = tmp_path_factory.mktemp("two")
    train(folder, "first", LogsOdd(), CheckpointSaver(monitor="validation/loss"))
    with pytest.raises(ValueError, match="a bad step"):
        train(folder, "second", Fails())
    return folder


class Fails(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == 4:
            raise ValueError("a bad step")


@pytest.fixture
def folder(two_runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_runs, tmp_path / "runs", copy_function=shutil.copy2))


def by_name(folder: Path) -> dict[str, RunRow]:
    return {row.name: row for row in runs_in(folder).rows}


def rows_as_text(folder: Path) -> str:
    """Return all rows as text, so that NaN equals NaN."""
    return repr(runs_in(folder).rows)


# --- the content of a row ---


def test_a_row_has_the_data_of_the_run_s_folder(folder: Path) -> None:
    rows = by_name(folder)
    first, second = rows["first"], rows["second"]
    records = read_metrics(folder / "first")
    losses = [record.values["validation/loss"] for record in records if "validation/loss" in record.values]
    assert (first.outcome, first.steps, first.device, first.world_size) == ("finished", 6, "cpu", 1)
    assert (second.outcome, second.steps) == ("failed", 4)
    assert first.seconds == pytest.approx(records[-1].elapsed_seconds, abs=0.5)
    assert first.metrics["validation/loss"] == MetricRow(losses[-1], 6, min(losses), 6, max(losses), 3)
    assert first.metrics["odd/up"] == MetricRow(6.0, 6, 1.0, 1, 6.0, 6)
    assert Path(first.best_checkpoint).is_dir()
    assert second.best_checkpoint == ""
    assert time.time() - 600 < first.started <= second.started <= second.last_write <= time.time()


def test_numbers_that_are_not_finite_are_kept_but_are_not_extremes(folder: Path) -> None:
    for _ in ("read", "from the index"):
        metrics = by_name(folder)["first"].metrics
        assert math.isnan(metrics["odd/nan"].last)
        assert math.isnan(metrics["odd/nan"].lowest)
        assert metrics["odd/wild"] == MetricRow(math.inf, 6, -5.0, 5, -1.0, 1)


def test_the_newest_comes_first_and_only_runs_are_listed(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "a file").touch()
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "metrics.jsonl").touch()
    (folder / "torn").mkdir()
    (folder / "torn" / "metrics.jsonl").write_text('{"step": 1, "values"')
    assert run_names(folder) == ["first", "second", "torn"]
    assert [row.name for row in runs_in(folder).rows] == ["second", "first", "torn"]


def test_only_the_requested_metrics_are_loaded(folder: Path) -> None:
    assert list(runs_in(folder, metrics=["odd/up", "odd/none"]).rows[1].metrics) == ["odd/up"]
    assert [row.metrics for row in runs_in(folder, metrics=[]).rows] == [{}, {}]


def test_listing_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        runs_in(tmp_path / "nowhere")


# --- the cache ---


def test_unchanged_files_are_not_read_again(folder: Path) -> None:
    """A change of content without a change of size and time is not detected, which proves that the file was not read."""
    before = rows_as_text(folder)
    metrics = folder / "first" / "metrics.jsonl"
    status = metrics.stat()
    content = metrics.read_text()
    metrics.write_text(content.replace('"step": 6', '"step": 7'))
    os.utime(metrics, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert rows_as_text(folder) == before
    os.utime(metrics)
    assert by_name(folder)["first"].steps == 7


def test_running_new_and_deleted_runs_are_followed(folder: Path) -> None:
    runs_in(folder)
    train(folder, "first", max_duration="3ep", resume="auto")
    shutil.rmtree(folder / "second")
    train(folder, "third")
    assert {name: row.steps for name, row in by_name(folder).items()} == {"first": 9, "third": 6}
    with closing(sqlite3.connect(folder / INDEX)) as index:
        assert {run for (run,) in index.execute("SELECT DISTINCT run FROM metrics")} == {"first", "third"}


def test_a_run_that_stops_writing_becomes_lost_without_a_change_of_files(folder: Path) -> None:
    events = folder / "first" / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if json.loads(line)["event"] != "run_end"))
    assert by_name(folder)["first"].outcome == "running"
    long_ago = time.time() - 86400
    for path in (folder / "first").rglob("*"):
        os.utime(path, (long_ago, long_ago))
    assert by_name(folder)["first"].outcome == "lost"


def test_a_deleted_index_is_rebuilt(folder: Path) -> None:
    before = rows_as_text(folder)
    (folder / INDEX).unlink()
    assert rows_as_text(folder) == before
    assert (folder / INDEX).exists()


def damaged_header(path: Path) -> None:
    path.write_bytes(b"no database at all\n" * 100)


def damaged_pages(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def of_another_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as index:
        index.executescript("DROP TABLE metrics; ALTER TABLE runs DROP COLUMN device; PRAGMA user_version = 99")


def without_runs(path: Path) -> None:
    with closing(sqlite3.connect(path)) as index:
        index.executescript("DROP TABLE runs")


def without_metrics(path: Path) -> None:
    with closing(sqlite3.connect(path)) as index:
        index.executescript("DROP TABLE metrics")


def without_a_column(path: Path) -> None:
    with closing(sqlite3.connect(path)) as index:
        index.executescript("ALTER TABLE runs DROP COLUMN reason")


def with_a_view(path: Path) -> None:
    with closing(sqlite3.connect(path)) as index:
        index.executescript("DROP TABLE runs; CREATE VIEW runs AS SELECT 1")


def with_a_name_that_is_no_text(path: Path) -> None:
    with closing(sqlite3.connect(path)) as index:
        index.executescript("UPDATE runs SET name = CAST(x'ff' AS TEXT) WHERE name = 'first'")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "harm",
    [
        damaged_header,
        damaged_pages,
        cut_short,
        of_another_version,
        without_runs,
        without_metrics,
        without_a_column,
        with_a_view,
        with_a_name_that_is_no_text,
        emptied,
    ],
)
def test_an_invalid_index_is_rebuilt(folder: Path, harm: Any) -> None:
    before = rows_as_text(folder)
    harm(folder / INDEX)
    found = runs_in(folder)
    assert (repr(found.rows), found.note) == (before, "")
    with closing(sqlite3.connect(folder / INDEX)) as index:
        assert index.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert index.execute("SELECT count(*) FROM runs").fetchone() == (2,)


def test_a_stale_journal_is_not_applied_to_the_new_index(folder: Path) -> None:
    before = rows_as_text(folder)
    damaged_header(folder / INDEX)
    (folder / f"{INDEX}-journal").write_bytes(os.urandom(5000))
    assert rows_as_text(folder) == before
    assert rows_as_text(folder) == before


def test_files_of_other_programs_are_not_changed(folder: Path) -> None:
    before = rows_as_text(folder)
    (folder / INDEX).unlink()
    with closing(sqlite3.connect(folder / INDEX)) as other:
        other.executescript("CREATE TABLE runs (secret TEXT); INSERT INTO runs VALUES ('kept')")
    found = runs_in(folder)
    assert repr(found.rows) == before
    assert "the database of another program" in found.note
    with closing(sqlite3.connect(folder / INDEX)) as other:
        assert other.execute("SELECT * FROM runs").fetchall() == [("kept",)]

    (folder / INDEX).rename(folder / "other.sqlite")
    (folder / INDEX).symlink_to(folder / "other.sqlite")
    found = runs_in(folder)
    assert (repr(found.rows), found.note.endswith("is a link; remove it")) == (before, True)


def test_without_a_usable_index_runs_are_read_directly(folder: Path) -> None:
    before = rows_as_text(folder)
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()
    found = runs_in(folder)
    assert repr(found.rows) == before
    assert found.note.startswith(f"no index is kept in {folder}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("end", ["", "-journal"])
def test_a_named_pipe_as_the_index_is_not_waited_for(folder: Path, end: str) -> None:
    before = rows_as_text(folder)
    (folder / INDEX).unlink()
    os.mkfifo(folder / f"{INDEX}{end}")
    found = runs_in(folder)
    assert repr(found.rows) == before
    assert found.note.endswith(f"{INDEX}{end} is not a regular file; remove it")


_AS_ANOTHER_USER = """
import os, sys
sys.path[:0] = {path!r}
import callsheet.report.index as index
if os.getuid() == 0:
    os.setuid({nobody})  # for root nothing is forbidden
found = index.runs_in(sys.argv[1])
print(found.note.splitlines()[0])
print([(row.name, row.steps) for row in found.rows])
"""
NOBODY = 65534


@pytest.fixture
def forbidden(two_runs: Path) -> Iterator[Path]:
    """Return a folder of runs that another user can read but not write."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        folder = Path(shutil.copytree(two_runs, Path(place) / "runs", copy_function=shutil.copy2))
        folder.chmod(0o755)
        yield folder
        folder.chmod(0o755)


def as_another_user(folder: Path) -> list[str]:
    code = _AS_ANOTHER_USER.format(path=[path for path in sys.path if path], nobody=NOBODY)
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_folder_without_write_permission_is_read(forbidden: Path) -> None:
    runs_in(forbidden)
    metrics = forbidden / "first" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 6', '"step": 7'))  # not in the index yet
    (forbidden / INDEX).chmod(0o444)
    forbidden.chmod(0o555)
    before = (forbidden / INDEX).read_bytes()
    note, rows = as_another_user(forbidden)
    assert note.startswith(f"no index is kept in {forbidden}: attempt to write a readonly database")
    assert rows == "[('second', 4), ('first', 7)]"
    assert (forbidden / INDEX).read_bytes() == before
    forbidden.chmod(0o755)
    (forbidden / INDEX).unlink()
    forbidden.chmod(0o555)
    note, rows = as_another_user(forbidden)
    assert note.startswith(f"no index is kept in {forbidden}: unable to open database file")
    assert rows == "[('second', 4), ('first', 7)]"
    assert not (forbidden / INDEX).exists()


_LOOKS_OFTEN = """
import sys
sys.path[:0] = {path!r}
from callsheet.report.index import runs_in
for _ in range(20):
    found = runs_in(sys.argv[1])
    print(sorted((row.name, row.outcome) for row in found.rows if row.name in ("first", "second")), flush=True)
"""


@pytest.mark.test_all
def test_several_processes_can_list_runs_while_runs_and_the_index_change(folder: Path) -> None:
    """Two processes list the runs repeatedly, while runs are added and removed and the index is deleted."""
    code = _LOOKS_OFTEN.format(path=[path for path in sys.path if path])
    command = [sys.executable, "-c", code, str(folder)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    number = 0
    while any(process.poll() is None for process in processes):
        number += 1
        shutil.copytree(folder / "first", folder / f"copy-{number}")
        if number % 5 == 0:
            (folder / INDEX).unlink(missing_ok=True)
        shutil.rmtree(folder / f"copy-{number - 2}", ignore_errors=True)
    for process in processes:
        out, _ = process.communicate()
        assert out.splitlines() == ["[('first', 'finished'), ('second', 'failed')]"] * 20
    assert number > 5
    assert by_name(folder).keys() == set(run_names(folder))
