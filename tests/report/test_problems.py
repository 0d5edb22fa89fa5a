"""The problems at the top of the page."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from callsheet import MetricsRecord
from callsheet.core.costs import Cost, CostReport, Failures
from callsheet.core.run_state import Outcome
from callsheet.report import RunFolder
from callsheet.report.problems import problems

from .sample_run import FailsAt, fit


def titles(run: RunFolder) -> list[tuple[str, str]]:
    return [(problem.level, problem.title) for problem in problems(run)]


def test_a_run_without_problems_has_none(tmp_path: Path) -> None:
    assert problems(RunFolder.read(fit(tmp_path, steps=20))) == []


def test_the_most_severe_problems_come_first(folder: Path) -> None:
    found = problems(RunFolder.read(folder))
    by_title = {problem.title: problem for problem in found}
    assert [problem.level for problem in found] == sorted(
        (problem.level for problem in found), key=["error", "warning", "note"].index
    )
    off = next(problem for problem in found if problem.title.startswith("Broken failed"))
    assert (off.level, off.title.endswith("and was switched off")) == ("error", True)
    assert "the server at 10.0.0.1 does not answer" in off.detail
    assert by_title["Values that are not finite, of 1 metric"].detail == "odd/sometimes: once, first NaN at step 25"
    assert by_title["An earlier attempt failed: ValueError at step 52"].detail == "a bad step\nin the span train_step"
    assert "9 records dropped: steps 43 to 51 were repeated" in by_title
    assert any(problem.title.startswith("Slow takes") and problem.level == "warning" for problem in found)


def test_a_failure_names_the_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bad step"):
        fit(tmp_path, FailsAt(12))
    assert titles(RunFolder.read(tmp_path / "sample")) == [("error", "The run failed: ValueError at step 12")]


def test_a_lost_run_is_an_error(tmp_path: Path) -> None:
    folder = fit(tmp_path, steps=20)
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    # The run was killed before it could record its end.
    (folder / "events.jsonl").write_text("".join(line for line in lines if '"run_end"' not in line))
    assert RunFolder.read(folder).outcome == "running"
    for path in folder.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)
    assert titles(RunFolder.read(folder)) == [("error", "The run is lost")]


def test_warnings_in_logs_unreadable_lines_and_out_of_memory_are_reported() -> None:
    log = "fine\n2026-01-01 WARNING callback X takes 12 % of the step\nValueError: no\nthe word warning alone\n"
    records = [MetricsRecord(1, {"memory/ooms": 2.0, "memory/alloc_retries": 0.0})]
    run = RunFolder(
        Path(), "run", outcome=Outcome.FINISHED, records=records, times=[0.0], logs={"logs/rank-0.log": log}, torn_lines=3
    )
    assert titles(run) == [
        ("warning", "The device ran out of memory twice"),
        ("note", "Warnings or errors in 2 lines of logs/rank-0.log"),
        ("note", "3 lines could not be read"),
    ]


def test_failures_and_dropped_events_are_summed_over_processes() -> None:
    def report(*failures: Failures) -> CostReport:
        return CostReport("sampled", 1, 1.0, 0, 0.0, (), failures)

    first = report(Failures("A", 1, False, "once"), Failures("B", 0, False, "", dropped=2), Failures("C", 3, True, "gone"))
    second = report(
        Failures("A", 1, False, "again", dropped=1),
        Failures("B", 0, False, "", dropped=1, undelivered=2),
        Failures("D", 0, False, "", undelivered=1),
    )
    found = problems(RunFolder(Path(), "run", outcome=Outcome.FINISHED, costs=[first, second]))
    assert [(problem.level, problem.title) for problem in found] == [
        ("error", "C failed 3 times and was switched off"),
        ("warning", "A failed twice"),
        ("warning", "The lane of A dropped 1 event"),
        ("warning", "The lane of B dropped 3 events"),
        ("warning", "The lane of B had not delivered 2 events at the end"),
        ("warning", "The lane of D had not delivered 1 event at the end"),
    ]
    assert [problem.detail for problem in found[:2]] == ["last: gone", "last: again"]


def test_a_costly_callback_is_reported_and_after_few_timed_steps_only_if_it_is_clearly_costly() -> None:
    def found(steps: int, seconds: float) -> list[str]:
        cost = Cost("A", "on_train_step_end", steps, seconds, seconds, is_sampled=True)
        report = CostReport("sampled", 100, 1.0, steps, 0.04 * steps, (cost,))
        return [problem.title for problem in problems(RunFolder(Path(), "run", outcome=Outcome.FINISHED, costs=[report]))]

    assert found(40, 40 * 0.003) == ["A takes 8% of the step"]
    assert found(8, 8 * 0.003) == []  # one interrupted call could have taken all of that
    assert found(8, 8 * 0.02) == ["A takes 50% of the step"]
    assert found(40, 40 * 0.001) == []


def test_a_failed_run_without_details_is_reported() -> None:
    assert titles(RunFolder(Path(), "run", outcome="failed")) == [("error", "The run failed")]
