"""`ctx.control` in a lane: every name works there, or its error says why not."""

from __future__ import annotations

import copy
import os
import threading
import time
from typing import Any

import pytest

from callsheet import Background, Callback, CallbackManager, Context, Process, RunInfo
from callsheet.core.control import Control, Request
from callsheet.core.run_state import TrainState
from callsheet.core.time import Timestamp
from callsheet.errors import FieldNotAvailable, RequestRejected

READ = (
    "able",
    "is_shared",
    "stop_requested",
    "save_requested",
    "save_requests",
    "evaluate_requested",
    "accumulation",
    "load_path",
)
REQUESTS = {"stop": ("why",), "save": ("why",), "evaluate": ("why",)}
REJECTED: dict[str, tuple[Any, ...]] = {"set_gradient_accumulation": (2,), "load": ("a/checkpoint",)}
OF_THE_LOOP = (
    *(
        "agree",
        "ask",
        "done",
        "hints",
        "host",
        "in_gate",
        "is_boundary_requested",
        "is_rescheduled",
        "look_again",
        "pending",
        "supports",
        "switch_off",
        "switched_off",
    ),
    *("take_requests", "local_requests"),
)


class Tries(Callback):
    """Calls a function with `ctx.control`, and keeps its result or its exception."""

    def __init__(self, does: Any) -> None:
        self.does = does
        self.came: Any = None

    def on_train_step_end(self, ctx: Context) -> None:
        try:
            self.came = self.does(ctx.control)
        except Exception as error:
            self.came = error


class ReadsInProcess(Callback):
    """Reads every readable name of `ctx.control` in its process."""

    def __init__(self) -> None:
        self.read: dict[str, Any] = {}

    def on_train_step_end(self, ctx: Context) -> None:
        self.read = {name: getattr(ctx.control, name) for name in READ} | {"pid": os.getpid()}
        ctx.control.stop("over there")

    def state_dict(self) -> dict[str, Any]:
        return self.read


def filled() -> Control:
    control = Control(("stop", "save", "evaluate", "set_gradient_accumulation", "load"))
    control.stop("enough")
    control.save("now", kind="best", metric="loss")
    control.save("now and then", kind="periodic")
    control.evaluate("to see")
    control.set_gradient_accumulation(4)
    control.load("a/checkpoint")
    return control


def tried(does: Any, control: Control) -> Any:
    tries = Tries(does)
    manager = CallbackManager([Background(tries)])
    ctx = Context(RunInfo("by hand"), control=control)
    manager.open(ctx)
    manager.fire("on_train_step_end", ctx)
    manager.drain(ctx)  # this makes the requests of the lane on the loop's control
    manager.close()
    return tries.came


def test_the_tables_of_this_file_have_every_name_of_control() -> None:
    here = {name for name in dir(Control) if not name.startswith("_")}
    assert here == {*READ, *REQUESTS, *REJECTED, *OF_THE_LOOP} | {"switch_off"}


@pytest.mark.parametrize("name", READ)
def test_what_can_be_read_inline_can_be_read_in_a_lane(name: str) -> None:
    control = filled()
    expected = getattr(control, name)
    assert expected is not None
    assert tried(lambda lane: getattr(lane, name), control) == expected


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_made_in_a_lane_reaches_the_loop_s_control(name: str) -> None:
    control = Control()
    assert tried(lambda lane: getattr(lane, name)(*REQUESTS[name]), control) is None
    request = getattr(control, f"{name}_requested")
    assert (request.what, request.why, request.by) == (name, "why", "Tries")


@pytest.mark.parametrize(
    ("name", "hint"), [("set_gradient_accumulation", "call it inline, on every rank"), ("load", "call it inline")]
)
def test_a_request_that_a_lane_cannot_make_is_rejected_with_a_hint(name: str, hint: str) -> None:
    control = Control(("stop", "set_gradient_accumulation", "load"))
    error = tried(lambda lane: getattr(lane, name)(*REJECTED[name]), control)
    assert isinstance(error, RequestRejected)
    assert f"control.{name}(" in str(error)
    assert hint in str(error)
    assert (control.accumulation, control.load_path) == (None, None)


@pytest.mark.parametrize("name", sorted({*OF_THE_LOOP} - {"switch_off"}))
def test_a_name_that_only_the_loop_uses_is_not_available_in_a_lane(name: str) -> None:
    error = tried(lambda lane: getattr(lane, name), Control())
    assert isinstance(error, FieldNotAvailable)
    assert f"control.{name} is not available in a lane" in str(error)


def test_an_unknown_name_of_control_is_an_attribute_error_with_a_suggestion() -> None:
    error = tried(lambda lane: lane.stop_request, Control())
    assert isinstance(error, AttributeError)
    assert "did you mean 'stop_requested'" in str(error)


def test_reading_control_in_a_background_lane_shows_later_requests() -> None:
    begun, requested = threading.Event(), threading.Event()

    def waits(control: Any) -> list[Any]:
        seen = [control.stop_requested]
        begun.set()
        assert requested.wait(20)
        return [*seen, control.stop_requested]

    tries = Tries(waits)
    manager = CallbackManager([Background(tries)])
    ctx = Context(RunInfo("by hand"))
    manager.open(ctx)
    manager.fire("on_train_step_end", ctx)
    assert begun.wait(20)
    ctx.control.stop("requested later")
    requested.set()
    manager.close()
    assert [getattr(each, "why", None) for each in tries.came] == [None, "requested later"]


def test_reading_control_while_the_loop_changes_it_never_fails() -> None:
    is_over, was_read = threading.Event(), threading.Event()

    def reads(control: Any) -> int:
        times = 0
        while not is_over.is_set():
            for name in READ:
                getattr(control, name)
            times += 1
            if times > 10:
                was_read.set()
        return times

    tries = Tries(reads)
    manager = CallbackManager([Background(tries)])
    ctx = Context(RunInfo("by hand"))
    manager.open(ctx)
    manager.fire("on_train_step_end", ctx)
    end = time.monotonic() + 60
    while not was_read.is_set() and time.monotonic() < end:
        for number in range(10):
            ctx.control.save(f"why {number}")
        ctx.control.done("save")
    is_over.set()
    manager.close()
    assert isinstance(tries.came, int), tries.came
    assert tries.came > 10


def test_a_process_reads_control_as_it_was_when_the_event_was_sent() -> None:
    far = Process(ReadsInProcess(), deadline=60)
    control = filled()
    manager = CallbackManager([far])
    ctx = Context(RunInfo("by hand"), control=control)
    manager.open(ctx)
    manager.fire("on_train_step_end", ctx)
    read = dict(manager.state_dict()["callbacks"]["ReadsInProcess"])
    manager.close()
    assert read.pop("pid") != os.getpid()
    assert set(read.pop("able")) == control.able
    assert read == {name: getattr(control, name) for name in READ if name != "able"}
    assert isinstance(read["stop_requested"], Request)


def test_the_train_state_in_a_snapshot_does_not_change() -> None:
    class Reads(Callback):
        def __init__(self) -> None:
            self.may_continue = threading.Event()
            self.states: list[TrainState] = []

        def on_train_step_end(self, ctx: Context) -> None:
            self.may_continue.wait(30)
            self.states.append(ctx.state)

    reads = Reads()
    manager = CallbackManager([Background(reads)])
    ctx = Context(RunInfo("by hand"))
    state = ctx.state
    state.epoch_batches, state.evaluators, state.baseline = 4, ("held out",), Timestamp(batch=1)
    manager.open(ctx)
    for _ in range(2):
        manager.fire("on_train_step_end", ctx)
    before = copy.copy(state)
    state.epoch_batches, state.evaluators, state.baseline = 8, (), Timestamp(batch=2)
    state.timestamp = Timestamp(batch=3)
    reads.may_continue.set()
    manager.close()
    assert reads.states == [before, before]


@pytest.mark.parametrize("lane", [Background, Process])
def test_fields_of_every_event_are_available_in_a_lane(lane: Any) -> None:
    seen = lane(RecordsSnapshots())
    manager = CallbackManager([seen])
    for name in ("first", "second"):  # values shared by all snapshots of a run must not be in those of the next run
        ctx = Context(RunInfo(name))
        manager.open(ctx)
        for ctx.step in (1, 2):
            manager.fire("on_train_step_end", ctx)
        manager.drain(ctx)
    found = seen.state_dict()["found"]
    manager.close()
    assert found == [(name, "on_train_step_end", step, True, step == 2) for name in ("first", "second") for step in (1, 2)]


class RecordsSnapshots(Callback):
    """Records the content of every snapshot, and whether the snapshot of the previous event is unchanged."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []
        self._before: Context | None = None

    def on_train_step_end(self, ctx: Context) -> None:
        before, self._before = self._before, ctx
        is_same_run = before is not None and before.run.name == ctx.run.name and before.step == ctx.step - 1
        has_all = all(map(ctx.has, ("event", "run", "state", "step", "epoch", "control")))
        self.found.append((ctx.run.name, str(ctx.event), ctx.step, has_all, is_same_run))

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}
