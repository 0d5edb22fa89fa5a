"""Behavior that all trackers share: a lane, settings by dotted name, and no secrets."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from callsheet import Background, Context, Trainer
from callsheet.core.lane_options import LaneOptions
from callsheet.core.run_state import Outcome
from callsheet.errors import ConfigError
from callsheet.loggers.support.tracker import Opened, Tracker, check_no_secret, flatten, plain, unflatten

HANGS = ("open", "write", "close")


class HangingTracker(Tracker):
    """A tracker whose backend hangs in one of its calls until it is released."""

    package = extra = "json"
    lane_options = LaneOptions(deadline=1.0)

    def __init__(self, hangs_in: str = "") -> None:
        super().__init__()
        self.hangs_in = hangs_in
        self.is_released = threading.Event()
        self.calls: list[tuple[str, str, Any]] = []

    def _call(self, what: str, value: Any = None) -> None:
        self.calls.append((what, threading.current_thread().name, value))
        if what == self.hangs_in:
            self.is_released.wait(60)

    def _open(self, ctx: Context, run_id: str | None) -> Opened:
        self._call("open")
        return Opened(run_id or "an id")

    def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
        self._call("write", ctx.record.step)

    def _settings(self, ctx: Context, values: Mapping[str, Any]) -> None:
        self._call("settings", dict(values))

    def _fail(self, ctx: Context, error: str) -> None:
        self._call("fail", error)

    def _close(self, ctx: Context, outcome: Outcome) -> None:
        self._call("close", outcome)


def trainer(folder: Path, **options: Any) -> Trainer:
    return Trainer(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        [(torch.ones(2, 2), torch.ones(2, 1))] * 4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        runs_folder=folder,
        device="cpu",
        max_duration="4ba",
        log_interval="1ba",
        **options,
    )


@pytest.fixture
def hanging_tracker(request: pytest.FixtureRequest) -> Iterator[HangingTracker]:
    made = HangingTracker(request.param)
    yield made
    made.is_released.set()


# --- in a lane ---


def test_it_receives_all_events_in_its_lane(tmp_path: Path) -> None:
    tracker = HangingTracker()

    def fails(ctx: Context) -> None:
        if ctx.step == 3:
            raise ValueError("a bad step")

    training = trainer(tmp_path, loggers=[tracker], config={"lr": 0.1})
    training.callbacks.register("on_train_step_end", fails)
    with pytest.raises(ValueError, match="a bad step"):
        training.fit()
    assert {thread for _, thread, _ in tracker.calls} == {"callsheet-lane-HangingTracker"}
    recorded = [(what, value) for what, _, value in tracker.calls]
    assert recorded == [
        ("open", None),
        ("settings", {"lr": 0.1}),
        ("write", 1),
        ("write", 2),
        ("fail", "ValueError: a bad step"),
        ("close", Outcome.FAILED),
    ]


@pytest.mark.test_all
@pytest.mark.parametrize("hanging_tracker", HANGS, indirect=True)
def test_a_hanging_tracker_delays_only_the_end_by_its_deadline(
    hanging_tracker: HangingTracker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "callsheet"), trainer(tmp_path, loggers=[hanging_tracker]) as training:
        start = time.monotonic()
        training.fit()
        trained = time.monotonic()
    ended = time.monotonic()
    assert training.run.outcome is Outcome.FINISHED
    assert trained - start < 20
    assert ended - trained < 20  # its call hangs for 60 s
    (message,) = [message for message in caplog.messages if "a lane has not delivered all events" in message]
    assert message.endswith("and one has not returned")


def test_two_trackers_of_one_package_open_one_after_the_other(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    class Slow(HangingTracker):
        def _open(self, ctx: Context, run_id: str | None) -> Opened:
            inside.append(1)
            time.sleep(0.1)
            most.append(len(inside))
            inside.pop()
            return super()._open(ctx, run_id)

    first, second = Slow(), Slow()
    second.name = "second"
    with trainer(tmp_path, loggers=[first, second]) as training:
        training.fit()
    assert most == [1, 1]


def test_it_can_run_inline_or_in_a_lane_with_other_options(tmp_path: Path) -> None:
    inline, other = HangingTracker(), HangingTracker()
    inline.lane, other.name = "inline", "other"
    with trainer(tmp_path, loggers=[inline], callbacks=[Background(other, queue=7)]) as training:
        training.fit()
    assert {thread for _, thread, _ in inline.calls} == {"MainThread"}
    assert {thread for _, thread, _ in other.calls} == {"callsheet-lane-other"}
    assert [call[0] for call in inline.calls] == [call[0] for call in other.calls]


# --- settings, and secrets ---


def test_flat_returns_settings_by_dotted_name() -> None:
    values = {
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.95)},
        "callbacks": [{"class_path": "a.B", "init_args": {"keep": 3}}, {"class_path": "a.C", "init_args": {}}],
        "matrix": [[1, 2], [3]],
        "names": {"b", "a"},
        "folder": Path("x"),
        "scale": torch.tensor(2.0),
        "none": None,
        3: numpy.int64(4),
    }
    assert flatten(values) == {  # type: ignore[arg-type]  # a key that is no string
        "optimizer.lr": 0.1,
        "optimizer.betas": [0.9, 0.95],
        "callbacks.0.class_path": "a.B",
        "callbacks.0.init_args.keep": 3,
        "callbacks.1.class_path": "a.C",
        "callbacks.1.init_args": "{}",
        "matrix.0": [1, 2],
        "matrix.1": [3],
        "names": ["a", "b"],
        "folder": "x",
        "scale": 2.0,
        "none": None,
        "3": 4,
    }


def test_nested_restores_dictionaries_from_dotted_names() -> None:
    values = {"optimizer": {"lr": 0.1, "more": {"eps": 1}}, "seed": 3}
    assert unflatten(flatten(values)) == values
    assert unflatten({"a": 1, "a.b": 2}) == {"a": {"b": 2}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1), (None, None), ("a", "a"), (True, True), (numpy.float32(0.5), 0.5), (torch.tensor([1]), 1), (Path("x"), "x")],
)
def test_the_cells_of_a_table_become_plain_values(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    assert type(plain(value)) is type(expected)


def test_an_array_in_a_cell_becomes_text() -> None:
    assert plain(numpy.arange(2)) == "[0 1]"


@pytest.mark.parametrize(
    "url",
    [
        "https://me:word@host/path",
        "https://word@host",
        "postgresql://me:word@host/db",
        "https://host/?write_token=word",
        "https://host/?api_key=word",
    ],
)
def test_a_secret_in_a_url_is_rejected_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="give it as SOMETHING instead") as found:
        check_no_secret("server", url, "SOMETHING")
    assert "word" not in str(found.value)


@pytest.mark.parametrize(
    "url", [None, "https://host:80/path?page=2", "sqlite:///runs/mlflow.db", "postgresql://me@host/db", "offline"]
)
def test_other_urls_are_accepted(url: str | None) -> None:
    check_no_secret("server", url, "SOMETHING")


# --- checkpoints ---


@pytest.mark.parametrize("hanging_tracker", ["write"], indirect=True)
def test_a_hanging_tracker_does_not_block_checkpoints_that_have_its_run(
    hanging_tracker: HangingTracker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging_tracker.lane_options = LaneOptions(deadline=40.0)
    with trainer(tmp_path, loggers=[hanging_tracker]) as training:
        training.fit()
        while ("write", "callsheet-lane-HangingTracker", 1) not in hanging_tracker.calls:
            time.sleep(0.01)
        began = time.monotonic()
        state = training.callbacks.state_dict()
        seconds = time.monotonic() - began
        hanging_tracker.is_released.set()
    assert seconds < 20
    assert state["callbacks"]["HangingTracker"] == {"run": training.run.name, "run_id": "an id"}
    assert "is out of date" not in caplog.text


def test_checkpoints_wait_for_state_beyond_the_run_id(tmp_path: Path) -> None:
    class Counts(HangingTracker):
        writes = 0

        def _write(self, ctx: Context, values: Mapping[str, float]) -> None:
            time.sleep(0.05)
            self.writes += 1

        def state_dict(self) -> Mapping[str, Any]:
            return {**super().state_dict(), "writes": self.writes}

    with trainer(tmp_path, loggers=[Counts()]) as training:
        training.fit()
        assert training.callbacks.state_dict()["callbacks"]["Counts"]["writes"] == 4


def test_checkpoints_wait_for_the_run_id(tmp_path: Path) -> None:
    class SlowToOpen(HangingTracker):
        lane_options = LaneOptions(deadline=40.0)

        def _open(self, ctx: Context, run_id: str | None) -> Opened:
            time.sleep(0.5)
            return super()._open(ctx, run_id)

    with trainer(tmp_path, loggers=[SlowToOpen()]) as training:
        training.fit()
        assert training.callbacks.state_dict()["callbacks"]["SlowToOpen"]["run_id"] == "an id"
