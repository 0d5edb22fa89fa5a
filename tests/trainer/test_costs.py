"""The costs of callbacks are counted correctly, and counting them changes nothing else."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from callsheet import Callback, CallbackManager, Context, every
from callsheet.core.costs import PATH_EVENTS, WINDOW_STEPS, CostReport, Window
from callsheet.core.lifecycle import POINTS, SPANS
from callsheet.errors import ConfigError
from callsheet.loggers import Logger
from callsheet.testing import Recorder, check_events

from .small_run import STEPS, small_trainer

SLEEP = 0.002


class CapturingLogger(Logger):
    """Keeps the cost reports and timelines that it receives."""

    def __init__(self) -> None:
        self.reports: list[CostReport] = []
        self.windows: list[Window] = []

    def log_costs(self, ctx: Context, report: CostReport) -> None:
        self.reports.append(report)

    def log_timeline(self, ctx: Context, window: Window) -> None:
        self.windows.append(window)


class Counts(Callback):
    """Counts a few events."""

    def __init__(self) -> None:
        self.received: Counter[str] = Counter()

    def on_train_step_end(self, ctx: Context) -> None:
        self.received[str(ctx.event)] += 1

    def on_microbatch_start(self, ctx: Context) -> None:
        self.received[str(ctx.event)] += 1

    def on_eval_step_end(self, ctx: Context) -> None:
        self.received[str(ctx.event)] += 1

    def on_log(self, ctx: Context) -> None:
        self.received[str(ctx.event)] += 1


class Sleeps(Callback):
    def __init__(self, *, seconds: float = SLEEP) -> None:
        self.seconds = seconds

    def on_train_step_end(self, ctx: Context) -> None:
        time.sleep(self.seconds)


def run(folder: Path, *callbacks: Callback, costs: Any = "sampled", **changes: Any) -> CapturingLogger:
    """Run a small training and return the logger that received its costs."""
    capture = CapturingLogger()
    manager = CallbackManager([*callbacks, capture], costs=costs, warn_share=changes.pop("warn_share", 0.05))
    with small_trainer(folder, callbacks=manager, **changes) as trainer:
        trainer.fit()
    return capture


def test_with_costs_all_every_call_is_counted(tmp_path: Path) -> None:
    counts = Counts()
    report = run(tmp_path, counts, costs="all", eval_interval="1ep", log_interval="1ba").reports[-1]
    assert {cost.event: cost.calls for cost in report.costs if cost.callback == "Counts"} == dict(counts.received)
    assert report.steps == STEPS
    assert not any(cost.is_sampled for cost in report.costs)


def test_by_default_rare_events_are_counted_and_steps_are_sampled(tmp_path: Path) -> None:
    counts = Counts()
    report = run(tmp_path, counts, eval_interval=None, log_interval="1ba", max_duration="40ep").reports[-1]
    recorded = {cost.event: cost for cost in report.costs if cost.callback == "Counts"}
    assert recorded["on_log"].calls == counts.received["on_log"]
    assert not recorded["on_log"].is_sampled
    assert recorded["on_train_step_end"].is_sampled
    assert 0 < recorded["on_train_step_end"].calls == report.window_steps < report.steps == 10 * STEPS
    assert report.window_steps % WINDOW_STEPS == 0


def test_with_costs_off_nothing_is_recorded(tmp_path: Path) -> None:
    capture = run(tmp_path, Counts(), costs="off")
    assert not capture.reports
    assert not capture.windows


def test_shares_and_worst_times_are_of_the_step(tmp_path: Path) -> None:
    report = run(tmp_path, Sleeps(), Counts(), eval_interval=None).reports[-1]
    costs = {(cost.callback, cost.event): cost for cost in report.costs}
    slow, fast = costs["Sleeps", "on_train_step_end"], costs["Counts", "on_train_step_end"]
    assert slow.seconds >= slow.calls * SLEEP
    assert slow.worst_seconds >= SLEEP
    assert slow.worst_seconds <= slow.seconds <= report.window_seconds <= report.seconds
    assert report.share(slow) == slow.seconds / report.window_seconds
    assert report.share(fast) < report.share(slow)


def test_an_interval_is_not_counted_as_a_call(tmp_path: Path) -> None:
    class Seldom(Callback):
        @every("4ba")
        def on_train_step_end(self, ctx: Context) -> None: ...

    report = run(tmp_path, Seldom(), costs="all").reports[-1]
    assert {cost.event: cost.calls for cost in report.costs if cost.callback == "Seldom"} == {"on_train_step_end": STEPS // 4}


def test_windows_hold_the_spans_and_callbacks_of_a_few_steps_nested(tmp_path: Path) -> None:
    capture = run(tmp_path, Counts(), eval_interval="2ba", log_interval="1ba")
    window = capture.windows[-1]
    assert window.last_step - window.first_step + 1 == WINDOW_STEPS
    assert window.is_whole
    for each in window.slices:
        assert 0 <= each.begin <= each.begin + each.seconds <= window.seconds
        assert window.first_step - 1 <= each.step <= window.last_step
        assert (each.name in SPANS) == (not each.callback)
    # There are four samples, in microbatches of 3.
    per_step = Counter(each.name for each in window.slices if each.step == 4 and not each.callback)
    assert per_step["train_step"] == per_step["optimizer_step"] == per_step["forward_backward"] == 1
    assert per_step["microbatch"] == per_step["forward"] == per_step["loss"] == per_step["backward"] == 2
    assert {"eval_all", "eval", "eval_step"} <= {each.name for each in window.slices}
    assert {each.name for each in window.slices if each.callback == "Counts"} == {
        "on_train_step_end",
        "on_microbatch_start",
        "on_eval_step_end",
        "on_log",
    }
    ends: list[float] = []
    for each in window.slices:  # a slice ends before the slice that it is nested in
        while ends and ends[-1] <= each.begin:
            ends.pop()
        assert not ends or each.begin + each.seconds <= ends[-1]
        ends.append(each.begin + each.seconds)


def test_reports_are_plain_data(tmp_path: Path) -> None:
    capture = run(tmp_path, Counts())
    recorded = json.loads(json.dumps([capture.reports[-1].to_dict(), capture.windows[-1].to_dict()]))
    assert recorded[0]["costs"][0].keys() == {"callback", "event", "calls", "seconds", "worst_seconds", "is_sampled"}
    assert recorded[1]["slices"][0][0] in SPANS


@pytest.mark.test_all
def test_a_callback_that_takes_too_much_time_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        run(tmp_path, Sleeps(), Counts(), costs="sampled", eval_interval=None, max_duration="250ep")
    named = [record.getMessage() for record in caplog.records if "of the step" in record.getMessage()]
    assert len(named) == 1
    assert named[0].startswith("Callback Sleeps takes ")


def test_a_callback_that_takes_most_of_a_short_run_is_logged_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, Sleeps(seconds=0.02), Counts(), eval_interval=None, max_duration="12ba")
    (named,) = [record.getMessage() for record in caplog.records if "of the step" in record.getMessage()]
    assert named.startswith("Callback Sleeps takes ")


@pytest.mark.test_all
@pytest.mark.parametrize("share", [None, 1000.0])
def test_a_callback_below_the_share_is_not_logged(share: float | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "callsheet"):
        run(tmp_path, Sleeps(), eval_interval=None, max_duration="100ep", warn_share=share)
    assert "of the step" not in caplog.text


def test_an_error_in_a_window_names_the_callback_that_raised_it(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 4:
                raise ValueError("in a window")

    recorder = Recorder()
    manager = CallbackManager([Counts(), Fails(), recorder])
    with pytest.raises(ValueError, match="in a window") as raised, small_trainer(tmp_path, callbacks=manager) as trainer:
        trainer.fit()
    assert "raised by callback Fails" in raised.value.__notes__[0]
    assert "at on_train_step_end, step 4" in raised.value.__notes__[0]
    check_events(recorder.events)


def test_failures_are_in_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Callback):
        on_error = "isolate"

        def on_train_step_end(self, ctx: Context) -> None:
            raise RuntimeError("out of order")

    (failures,) = run(tmp_path, Broken()).reports[-1].failures
    assert (failures.callback, failures.count, failures.is_off) == ("Broken", 3, True)
    assert failures.last.startswith("RuntimeError: out of order (at on_train_step_end, step 3")


def test_has_listeners_is_the_same_in_a_window(tmp_path: Path) -> None:
    answers: set[tuple[Any, ...]] = set()
    manager = CallbackManager()

    @manager.register("on_train_step_end")
    def record(ctx: Context) -> None:
        received = tuple(getattr(manager.has_listeners, event) for event in sorted(manager.events))
        answers.add((received, tuple(manager.has_callbacks(event) for event in sorted(manager.events))))

    with small_trainer(tmp_path, callbacks=manager) as trainer:
        trainer.fit()
    assert len(answers) == 1
    assert sum(answers.pop()[1]) == 1


def test_a_callback_added_in_a_window_is_called_and_timed(tmp_path: Path) -> None:
    late = Counts()

    class Adds(Callback):
        def on_train_step_start(self, ctx: Context) -> None:
            if ctx.step == 4:
                manager.add(late)

    capture = CapturingLogger()
    manager = CallbackManager([Adds(), capture])
    with small_trainer(tmp_path, callbacks=manager, eval_interval=None) as trainer:
        trainer.fit()
    assert late.received["on_train_step_end"] == STEPS - 3
    assert ("Counts", "on_train_step_end") in {(cost.callback, cost.event) for cost in capture.reports[-1].costs}


def test_costs_are_published_at_growing_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CallbackManager()
    now = [0.0]
    monkeypatch.setattr("callsheet.core.costs.perf_counter", lambda: now[0])
    manager.costs.reset()
    recorded = []
    for second in range(100_000):
        now[0] = float(second)
        if manager.costs.should_publish(is_last=False):
            recorded.append(second)
    assert recorded[0] == 0
    assert len(recorded) < 120
    assert all(later - earlier <= 0.1 * later + 3 for earlier, later in pairwise(recorded))
    assert manager.costs.should_publish(is_last=True)


def test_a_second_run_counts_from_zero(tmp_path: Path) -> None:
    capture = CapturingLogger()
    manager = CallbackManager([capture, Counts()])
    for name in ("first", "second"):
        with small_trainer(tmp_path / name, callbacks=manager, eval_interval=None, log_interval="1ba") as trainer:
            trainer.fit()
    assert [cost.calls for cost in capture.reports[-1].costs if cost.event == "on_log"] == [STEPS]


@pytest.mark.parametrize("wrong", [{"costs": "sometimes"}, {"warn_share": 0.0}, {"warn_share": -1.0}])
def test_invalid_arguments_of_the_cost_accounting_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"costs|warn_share"):
        CallbackManager(**wrong)


def test_events_of_every_batch_are_known_from_the_lifecycle() -> None:
    assert {"on_fetch_start", "on_backward_end", "on_eval_forward_start", "on_predict_step_end"} <= PATH_EVENTS
    assert not PATH_EVENTS & {"on_epoch_end", "on_eval_all_start", "on_eval_end", *POINTS} - {"on_checkpoint_due"}
