"""Costs of several processes, in one table."""

from __future__ import annotations

import pytest

from callsheet.core.costs import Cost, CostReport
from callsheet.report.costs import cost_rows, costs_table


def report(*costs: Cost, seconds: float = 10.0, window_steps: int = 4, window_seconds: float = 2.0) -> CostReport:
    return CostReport("sampled", 100, seconds, window_steps, window_seconds, costs)


def test_one_process_has_the_shares_that_it_reports() -> None:
    step, rare = Cost("A", "on_train_step_end", 4, 0.5, 0.3, True), Cost("A", "on_log", 9, 1.5, 1.0, False)
    table = report(step, rare)
    (row,) = cost_rows([table])
    assert (row["of_step"], row["of_run"]) == (table.share(step), table.share(rare)) == (0.25, 0.15)
    assert (row["calls"], row["seconds"], row["worst"], row["per_step"]) == (13, 2.0, 1.0, 0.125)
    assert [event["event"] for event in row["events"]] == ["on_log", "on_train_step_end"]


def test_several_processes_are_summed() -> None:
    first = report(Cost("A", "on_fetch_end", 4, 1.0, 0.3, True), Cost("B", "on_log", 1, 1.0, 1.0, False))
    second = report(Cost("A", "on_fetch_end", 12, 2.0, 0.9, True), seconds=30.0, window_steps=12, window_seconds=4.0)
    table = costs_table([first, second])
    assert (table["processes"], table["steps"], table["window_steps"], table["window_seconds"], table["seconds"]) == (
        2,
        200,
        16,
        6.0,
        40.0,
    )
    a, b = table["rows"]
    assert (a["callback"], a["calls"], a["worst"]) == ("A", 16, 0.9)
    assert (a["of_step"], a["per_step"]) == (pytest.approx(0.5), pytest.approx(3.0 / 16))
    assert (b["callback"], b["of_run"]) == ("B", 1.0 / 40)


def test_without_timed_steps_the_shares_are_zero() -> None:
    assert costs_table([])["rows"] == []
    (row,) = cost_rows([report(Cost("A", "on_fetch_end", 1, 1.0, 1.0, True), seconds=0.0, window_steps=0, window_seconds=0.0)])
    assert row["of_step"] == 0.0
