"""If anything happens to one rank, all ranks end: at the same step and in the same way, or with an error that names it.

Real processes over gloo. `CALLSHEET_SEEDS=200 pytest tests/many_ranks` runs more seeds; `make ranks` writes a table.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from callsheet.testing import check_events
from callsheet.testing.ranks import RankProcesses

from .scenario import ANSWER, FATAL, KINDS, TIMEOUT, Report, RunResult, blamed, planned, run_scenario
from .table import table

SEEDS = range(int(os.environ.get("CALLSHEET_SEEDS", "10")))
AT_ONCE = 3  # a run waits most of the time
SLACK = 5.0
"""Additional seconds for a busy machine."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Future[RunResult]]]:
    """Start the runs of all selected tests. If CALLSHEET_TABLE is set, write a table of them to this path."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    seeds = [cast("int", item.callspec.params["seed"]) for item in here if hasattr(item, "callspec")]
    with RankProcesses(os.getpid, 2) as ranks:  # start the server from which processes are forked in a single thread
        ranks.wait(60)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun: dict[int, Future[RunResult]] = {
            seed: pool.submit(run_scenario, planned(seed), tmp_path_factory.mktemp(f"seed{seed}-")) for seed in seeds
        }
        yield begun
        for run in begun.values():
            run.cancel()
    if path := os.environ.get("CALLSHEET_TABLE"):
        Path(path).write_text(table([run.result() for run in begun.values() if not run.cancelled()]))


@pytest.mark.test_all
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_all_ranks_end_the_same_way_or_name_the_rank_that_failed(seed: int, runs: dict[int, Future[RunResult]]) -> None:
    run = runs[seed].result()
    if run.scenario.is_fatal and run.struck_after is not None:
        check_the_others_name_it(run)
    else:
        check_all_end_the_same(run)


def check_the_others_name_it(run: RunResult) -> None:
    scenario = run.scenario
    bad = scenario.rank
    expected = set(range(scenario.world_size)) - ({bad} if scenario.kind != "raise" else set())
    assert set(run.reports) == expected, f"{scenario}: {run.silent}"
    assert run.seconds < (TIMEOUT if scenario.kind == "stuck" else ANSWER) + SLACK, str(scenario)
    for rank, report in run.reports.items():
        recorded = f"{scenario}, rank {rank}: {report.error} | {report.notes}"
        check_events([event for event, _ in report.events])
        assert report.outcome == "failed", recorded
        if rank == bad:
            assert report.is_planned, recorded
        else:
            assert not report.is_planned, recorded
            assert blamed(report) == {bad}, recorded
            if scenario.kind == "raise":
                assert f"as planned on rank {bad}" in report.error, recorded


def check_all_end_the_same(run: RunResult) -> None:
    scenario = run.scenario
    assert set(run.reports) == set(range(scenario.world_size)), f"{scenario}: {run.silent}"
    reports = [run.reports[rank] for rank in range(scenario.world_size)]
    first = reports[0]
    about = str(scenario)
    interrupted = [report.error for report in reports]
    assert len(set(interrupted)) == 1, about
    assert interrupted[0] in ("", "KeyboardInterrupt: "), f"{about}: {interrupted[0]} | {first.notes}"
    for rank, report in enumerate(reports):
        check_events([event for event, _ in report.events])
        for name in ("events", "records", "published", "evaluated", "weights", "counted"):
            ours, theirs = list(getattr(report, name)), list(getattr(first, name))
            assert ours == theirs, f"{about}: {name} of rank {rank}: {differing(ours, theirs)}"
        for name in ("outcome", "step", "samples", "stopped_by", "signal"):
            assert getattr(report, name) == getattr(first, name), f"{about}: {name} of rank {rank}"
    check_the_outcome(run, first)
    check_requests_are_carried_out(run, first)
    check_every_sample_once(run, reports)
    summed = sum(float.fromhex(values["sum/odd"]) for _, values in first.records if "sum/odd" in values)
    assert summed == sum(report.logged for report in reports), about


def differing(ours: list[object], theirs: list[object]) -> str:
    """Describe the first difference of two lists."""
    pairs = zip([*ours, None], [*theirs, None], strict=False)
    place = next((place for place, (here, there) in enumerate(pairs) if here != there), min(len(ours), len(theirs)))
    return f"at {place} of {len(ours)} and {len(theirs)}: {ours[place : place + 3]} and {theirs[place : place + 3]}"


def check_the_outcome(run: RunResult, first: Report) -> None:
    scenario, about = run.scenario, str(run.scenario)
    struck = any(report.struck for report in run.reports.values())
    if scenario.kind == "signal" and struck:
        assert first.outcome == ("interrupted" if scenario.signal == "SIGINT" else "preempted"), about
        assert first.signal == str(signal.Signals[scenario.signal]), about
        assert [step for _, step, kind, _ in first.published if kind == "preempt"] == [first.step], about
        assert [event for event, _ in first.events].count("on_preempt") == 1, about
    else:
        assert first.outcome == ("stopped" if first.stopped_by else "finished"), about
        assert first.signal == "None", about
        if first.outcome == "finished":
            assert first.samples == scenario.epochs * samples_in_all(run), about
    assert first.published, about
    assert first.published[-1][1] == first.step, about


def samples_in_all(run: RunResult) -> int:
    lengths = run.scenario.lengths
    return 2 * sum(lengths) if run.scenario.data.startswith("own") else lengths[0]


def check_requests_are_carried_out(run: RunResult, first: Report) -> None:
    requested = [request for report in run.reports.values() for request in report.requested]
    for request in requested:
        about = f"{run.scenario}: {request.name}"
        if request.what == "save":
            assert [step >= request.step for _, step, _, by in first.published if request.name in by] == [True], about
        elif request.what == "evaluate":
            assert first.outcome in ("preempted", "interrupted") or any(step >= request.step for step, _ in first.evaluated), (
                about
            )
        else:
            assert first.stopped_by or first.signal != "None", about
    names = {request.name for request in requested}
    assert {why for _, why in first.evaluated if why} <= names, run.scenario
    assert first.stopped_by in names | {""}, run.scenario


def check_every_sample_once(run: RunResult, reports: list[Report]) -> None:
    """Check that shared data is trained on once. A rank without data repeats a sample of the epoch's last step as a filler."""
    scenario = run.scenario
    if scenario.data.startswith("own"):
        return
    whole = set(range(scenario.lengths[0]))
    for epoch, counted in reports[0].counted.items():
        drawn = [(step, number) for report in reports for at, step, numbers in report.drawn if at == epoch for number in numbers]
        last = max(step for step, _ in drawn)
        before = [number for step, number in drawn if step < last]
        at_last = {number for step, number in drawn if step == last}
        assert len(before) == len(set(before)), f"{scenario}: twice in epoch {epoch}"
        assert not at_last & set(before), f"{scenario}: again at the end of epoch {epoch}"
        so_far = counted - reports[0].counted.get(epoch - 1, 0)
        if so_far == len(whole):
            assert at_last | set(before) == whole, f"{scenario}: lost in epoch {epoch}"
        else:
            assert epoch == max(reports[0].counted), str(scenario)
            assert so_far <= len(at_last | set(before)), str(scenario)


def test_the_seeds_cover_everything() -> None:
    """The scenarios contain every kind, number of ranks, parallelism, kind of data, request and signal."""
    scenarios = [planned(seed) for seed in range(200)]
    assert {scenario.kind for scenario in map(planned, range(20))} == set(KINDS)
    assert {(s.kind, s.world_size, s.parallel) for s in scenarios} >= {
        (kind, size, parallel) for kind in KINDS for size in (2, 4) for parallel in ("ddp", "fsdp")
    }
    assert {s.data for s in scenarios} == {"items", "batches", "stream", "own", "own_stream"}
    assert {request.what for s in scenarios for request in s.requests} == {"save", "evaluate", "stop"}
    assert {(s.signal, s.rank < 0) for s in scenarios if s.kind == "signal"} == {
        (name, all_ranks) for name in ("SIGTERM", "SIGINT") for all_ranks in (True, False)
    }
    assert {s.launcher_follows for s in scenarios if s.kind == "dead"} == {True, False}
    assert set(FATAL) < set(KINDS)
