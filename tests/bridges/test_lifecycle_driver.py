"""The lifecycle driver fires events in order, whatever a loop reports about its steps."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.core.context import Context
from callsheet.core.lifecycle import EVENTS
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import RunInfo
from callsheet.testing.grammar import check_events

PARTS = ("forward_backward", "microbatch", "forward", "loss", "backward", "clip_gradients", "optimizer_step")

words = st.tuples(st.sampled_from(("start", "end")), st.sampled_from(PARTS))


def drive(manager: CallbackManager, steps: list[list[tuple[str, str]]]) -> LifecycleDriver:
    """Run a loop that reports a fetch, the start and end of each step, and the given calls in between."""
    ctx = Context(RunInfo("small"))
    fields = {"on_forward_backward_end": "loss", "on_clip_gradients_end": "grad_norm"}
    driver = LifecycleDriver(manager.spans(ctx), {event: partial(setattr, ctx, field, None) for event, field in fields.items()})
    for step in steps:
        driver.listen()
        driver.start("fetch")
        driver.start_step()
        for word, name in step:
            if (word, name) == ("end", "forward") and driver.is_open("forward"):
                ctx.outputs = None
            getattr(driver, word)(name)
        driver.end_step()
    driver.end("train")
    return driver


@given(st.lists(st.lists(words, max_size=12), min_size=1, max_size=3))
def test_events_are_in_order_for_any_sequence_of_reports(steps: list[list[tuple[str, str]]]) -> None:
    manager, recorded = CallbackManager(), list[str]()
    manager.register("*", lambda ctx: recorded.append(str(ctx.event)))
    drive(manager, steps)
    check_events(["on_run_start", "on_data_init_start", "on_data_init_end", *recorded, "on_run_end"])


@given(st.lists(words, max_size=12), st.sets(st.sampled_from(EVENTS), max_size=4))
def test_a_callback_receives_the_same_events_and_fields_as_one_that_listens_to_all(
    step: list[tuple[str, str]], received: set[str]
) -> None:
    some, everything = list[tuple[str, list[str]]](), list[tuple[str, list[str]]]()

    def record(ctx: Context, *, recorded: list[tuple[str, list[str]]]) -> None:
        recorded.append((str(ctx.event), [field for field in ("outputs", "loss", "grad_norm") if ctx.has(field)]))

    for recorded, events in ((some, received), (everything, set(EVENTS))):
        manager = CallbackManager()
        for event in events:
            manager.register(event, partial(record, recorded=recorded))
        drive(manager, [[*((word, name) for word in ("start", "end") for name in PARTS), *step]])
    assert some == [(event, fields) for event, fields in everything if event in received]


def test_a_forward_after_the_optimizer_s_step_starts_no_microbatch() -> None:
    manager, recorded = CallbackManager(), list[str]()
    manager.register("on_microbatch_start", lambda ctx: recorded.append("microbatch"))
    manager.register("on_optimizer_step_end", lambda ctx: recorded.append("optimizer step"))
    loop = [("start", "forward"), ("start", "optimizer_step"), ("end", "optimizer_step"), ("start", "forward")]
    driver = drive(manager, [loop])
    assert recorded == ["microbatch", "optimizer step"]
    assert "optimizer_step" not in driver.synthesized


def test_listen_returns_whether_the_spans_with_listeners_have_changed() -> None:
    manager = CallbackManager()
    driver = LifecycleDriver(manager.spans(Context(RunInfo("small"))), {})
    assert driver.listen()
    assert not driver.listens_to("forward")
    assert not driver.listen()
    listener = manager.register("on_forward_end", lambda ctx: None)
    assert driver.listen()
    assert driver.listens_to("forward")
    assert driver.listens_to("backward")
    assert driver.listens_to("optimizer_step")  # the driver fires the end of the backward when the optimizer's step starts
    assert not driver.listens_to("fetch")
    assert not driver.listen()
    manager.remove(listener)
    assert driver.listen()
    assert not driver.listens_to("forward")
    before = driver.has_listeners
    manager.register("on_train_step_end", lambda ctx: None)
    assert driver.listen()
    assert (before, driver.has_listeners) == (False, True)
    assert not driver.listens_to("optimizer_step")


def test_a_handler_that_is_added_at_the_end_of_the_backward_pass_receives_the_next_event() -> None:
    manager, recorded = CallbackManager(), list[str]()
    manager.register(
        "on_forward_backward_end", lambda ctx: manager.register("on_clip_gradients_start", lambda ctx: recorded.append("clip"))
    )
    driver = LifecycleDriver(manager.spans(Context(RunInfo("small"))), {})
    driver.listen()
    driver.start("fetch")
    driver.start_step()
    driver.start("backward")
    driver.start_and_end("clip_gradients")
    assert recorded == ["clip"]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([], {"forward_backward", "microbatch"}),
        ([("start", "forward_backward")], {"microbatch"}),
        ([("start", "microbatch"), ("end", "microbatch"), ("start", "microbatch")], set()),
    ],
)
def test_spans_that_the_host_has_not_reported_are_noticed(reports: list[tuple[str, str]], expected: set[str]) -> None:
    manager = CallbackManager()
    manager.register("on_forward_backward_end", lambda ctx: None)
    driver = drive(manager, [reports])
    assert driver.synthesized & {"forward_backward", "microbatch"} == expected
