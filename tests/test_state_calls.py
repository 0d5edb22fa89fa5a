"""The states of callbacks in lanes: none of them can make a checkpoint hang or fail."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from callsheet import Background, Callback, CallbackManager, Context, Process, RunInfo, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.checkpoint import plain_copy
from callsheet.core.callback import OnError


class Counts(Callback):
    """Counts steps inline."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


class Tracker(Callback):
    """A handler that waits for a server while it holds the lock that its state needs."""

    def __init__(self) -> None:
        self.lock, self.server_answers = threading.Lock(), threading.Event()

    def on_train_step_end(self, ctx: Context) -> None:
        with self.lock:
            self.server_answers.wait(60)

    def state_dict(self) -> dict[str, Any]:
        with self.lock:
            return {"run": "abc"}


class HangsInItsState(Callback):
    """`state_dict` never returns after the first event."""

    has_begun = False

    def on_train_step_end(self, ctx: Context) -> None:
        self.has_begun = True

    def state_dict(self) -> dict[str, Any]:
        if self.has_begun:
            threading.Event().wait()
        return {}


class RaisesInItsState(Callback):
    """`state_dict` and `load_state_dict` raise."""

    def on_train_step_end(self, ctx: Context) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        raise OSError("no connection")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise OSError("no connection")


class Leaves(RaisesInItsState):
    """`state_dict` raises SystemExit."""

    def state_dict(self) -> dict[str, Any]:
        raise SystemExit(3)


def opened(*callbacks: Callback) -> tuple[CallbackManager, Context]:
    manager, ctx = CallbackManager(callbacks), Context(RunInfo("test"))
    manager.open(ctx)
    return manager, ctx


def test_a_state_whose_lock_a_handler_holds_is_missing_after_the_lane_s_deadline(caplog: pytest.LogCaptureFixture) -> None:
    tracker, counts = Tracker(), Counts()
    manager, ctx = opened(Background(tracker, deadline=0.3), counts)
    manager.fire("on_train_step_end", ctx)
    began = time.monotonic()
    state = manager.state_dict()
    assert time.monotonic() - began < 10
    assert state["callbacks"] == {"Counts": {"steps": 1}}
    assert "no answer within" in state["missing"]["Tracker"]
    assert "The state of callback Tracker" in caplog.text
    # No second thread is started while the first one hangs.
    assert "an earlier call has still not returned" in manager.state_dict()["missing"]["Tracker"]
    tracker.server_answers.set()
    manager.close()


@pytest.mark.parametrize(
    ("kind", "reason"), [(HangsInItsState, "no answer"), (RaisesInItsState, "no connection"), (Leaves, "SystemExit")]
)
def test_the_other_states_are_saved_if_one_state_dict_hangs_or_fails(kind: type[Callback], reason: str) -> None:
    manager, ctx = opened(Background(kind(), deadline=1.0), Counts())
    manager.fire("on_train_step_end", ctx)
    state = manager.state_dict()
    assert state["callbacks"] == {"Counts": {"steps": 1}}
    assert reason in state["missing"][kind.__name__]
    manager.close()


@pytest.mark.test_all
def test_saving_does_not_wait_for_a_process_that_hangs_in_state_dict(caplog: pytest.LogCaptureFixture) -> None:
    manager, ctx = opened(Process(HangsInItsState(), deadline=2.0), Counts())
    manager.fire("on_train_step_end", ctx)
    began = time.monotonic()
    assert manager.state_dict()["callbacks"] == {"Counts": {"steps": 1}}
    assert time.monotonic() - began < 30
    assert "HangsInItsState" in caplog.text
    manager.close()


def test_states_that_hang_are_waited_for_at_the_same_time() -> None:
    lanes = [Background(HangsInItsState(), deadline=0.5) for _ in range(20)]
    for number, each in enumerate(lanes):
        each.name = f"hangs-{number}"
    manager, ctx = opened(*lanes)
    manager.fire("on_train_step_end", ctx)
    began = time.monotonic()
    assert len(manager.state_dict()["missing"]) == 20
    assert time.monotonic() - began < 8  # waiting for one after the other would take ten seconds
    manager.close()


def test_an_error_in_load_state_dict_of_a_lane_is_logged_and_the_run_continues(caplog: pytest.LogCaptureFixture) -> None:
    counts = Counts()
    manager, _ = opened(Background(RaisesInItsState()), counts)
    manager.load_state_dict({"callbacks": {"RaisesInItsState": {"run": 1}, "Counts": {"steps": 7}}, "user_state": {}})
    assert counts.steps == 7
    assert "Callback RaisesInItsState" in caplog.text
    assert "starts without its saved state: OSError: no connection" in caplog.text
    manager.close()


def test_an_error_in_state_dict_of_an_isolated_inline_callback_is_isolated() -> None:
    isolated, counts = RaisesInItsState(), Counts()
    isolated.on_error = "isolate"
    manager, _ = opened(isolated, counts)
    assert manager.state_dict()["missing"] == {"RaisesInItsState": "OSError: no connection"}


def test_an_error_in_the_state_calls_of_a_callback_that_is_not_isolated_is_raised() -> None:
    manager, _ = opened(RaisesInItsState())
    with pytest.raises(OSError, match="no connection"):
        manager.state_dict()
    with pytest.raises(OSError, match="no connection"):
        manager.load_state_dict({"callbacks": {"RaisesInItsState": {}}, "user_state": {}})


def test_a_run_saves_and_resumes_without_the_state_that_hung(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trained(max_duration: str) -> Counts:
        counts = Counts()
        data = [(torch.ones(2, 2), torch.ones(2, 1))] * 4
        with Trainer(
            torch.nn.Linear(2, 1),
            torch.nn.functional.mse_loss,
            train_dataloader=data,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            max_duration=max_duration,
            callbacks=[Background(HangsInItsState(), deadline=0.3), counts, CheckpointSaver(save_interval="4ba")],
            run_name="hangs",
            runs_folder=tmp_path,
            resume="auto",
        ) as trainer:
            trainer.fit()
        return counts

    trained("1ep")
    assert "The state of callback HangsInItsState" in caplog.text
    caplog.clear()
    assert trained("2ep").steps == 8
    assert "The checkpoint has no state of callback HangsInItsState" in caplog.text


@pytest.mark.test_all
def test_a_callback_whose_full_queue_makes_training_wait_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            time.sleep(0.05)

    manager, ctx = opened(Background(Slow(), queue=4))
    with caplog.at_level(logging.WARNING, logger="callsheet"):
        for ctx.step in range(40):
            manager.fire("on_train_step_end", ctx)
    manager.close()
    named = [record.getMessage() for record in caplog.records if "Training waited" in record.getMessage()]
    assert len(named) == 1
    assert "for callback Slow: its lane's queue of 4 events is full" in named[0]
    assert "drop_oldest" in named[0]


class ErrorWithoutText(Exception):
    """An error whose `__str__` raises."""

    def __str__(self) -> str:
        raise RuntimeError("nor this one")


@pytest.mark.parametrize("in_lane", [False, True])
def test_an_error_without_a_text_is_isolated_like_any_other(in_lane: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Callback):
        on_error: OnError | None = "isolate"

        def on_train_step_end(self, ctx: Context) -> None:
            raise ErrorWithoutText

    callback = Fails()
    if in_lane:
        callback.on_error = None
    manager, ctx = opened(Background(callback) if in_lane else callback)
    for _ in range(2):
        manager.fire("on_train_step_end", ctx)
    manager.drain(ctx)
    (failure,) = manager.cost_report(1).failures
    assert failure.count == 2
    assert "__str__ of ErrorWithoutText raised RuntimeError" in caplog.text
    manager.close()


def test_a_single_call_that_holds_the_interpreter_lock_for_long_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Native(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            end = time.thread_time() + 0.6
            while time.thread_time() < end:
                sum(range(200_000))  # this holds the interpreter lock

    manager, ctx = opened(Background(Native(), queue=4))
    manager.fire("on_train_step_end", ctx)
    manager.close()
    assert "Callback Native used" in caplog.text
    assert "callsheet.Process" in caplog.text


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        torch.nn.Linear(2, 1),
        torch.nn.functional.mse_loss,
        train_dataloader=[(torch.ones(2, 2), torch.ones(2, 1))] * 8,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        callbacks=callbacks,
        run_name="odd",
        runs_folder=folder,
        **options,
    )


class Odd(Callback):
    """Has a state that no checkpoint can hold, or one that changes while it is read."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def on_train_step_end(self, ctx: Context) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.state}


class Changing(dict[str, int]):
    """A mapping that grows while it is read."""


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("state", [object(), threading.Lock(), Changing(a=1), {1.5: {object()}}, torch.ones(2).to_sparse()])
def test_a_state_that_cannot_be_saved_is_missing_and_the_run_finishes(
    state: Any, in_background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = Counts()
    callbacks = [counts, Background(Odd(state)), CheckpointSaver(save_interval="4ba")]
    with trainer(tmp_path, *callbacks, save_in_background=in_background) as trained:
        trained.fit()
    assert trained.run.outcome == "finished"
    found = [message for message in caplog.messages if "The state of callback Odd" in message]
    assert found
    assert all("is missing from this checkpoint: CheckpointError: " in message for message in found)


def test_a_saved_state_shares_nothing_with_the_callback(tmp_path: Path) -> None:
    state: dict[str, Any] = {"list": [1], "tensor": torch.ones(2)}
    manager = CallbackManager([Background(Odd(state))])
    saved = manager.state_dict(copied=plain_copy)["callbacks"]["Odd"]["x"]
    state["list"].append(2)
    state["tensor"].zero_()
    assert saved["list"] == [1]
    assert saved["tensor"].tolist() == [1, 1]


class Ready(Counts):
    """Its `state_is_ready` runs its own code."""

    def __init__(self, answer: Callable[[], bool]) -> None:
        super().__init__()
        self.answer = answer

    @property
    def state_is_ready(self) -> bool:
        return self.answer()


def raises() -> bool:
    raise OSError("no connection")


def hangs() -> bool:
    return threading.Event().wait()


@pytest.mark.parametrize(("answer", "why"), [(raises, "OSError: no connection"), (hangs, "TimeoutError: ")])
def test_state_is_ready_that_raises_or_hangs_does_not_end_or_stop_a_run(
    answer: Callable[[], bool], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    with trainer(tmp_path, Background(Ready(answer), deadline=0.5), CheckpointSaver(save_interval="4ba")) as trained:
        trained.fit()
    assert time.monotonic() - began < 30
    assert trained.run.outcome == "finished"
    assert any("state_is_ready of callback Ready" in message and why in message for message in caplog.messages)
