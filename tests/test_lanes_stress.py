"""With random delays, exceptions, cancellations and forks, the manager delivers every fired event once and in order, except for those
that are counted as dropped."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from callsheet import Background, Callback, CallbackManager, Context, RunInfo
from callsheet.core.costs import Failures
from callsheet.core.lane_options import Overflow

EVENTS = ("on_train_step_start", "on_train_step_end")
FAILING = ("raise", "exit", "cancelled", "cancel")
ACTIONS = st.sampled_from(["fine"] * 6 + ["sleep"] * 2 + [*FAILING])


class Acts(Callback):
    """Records the steps that it receives, and performs the action that is planned for the step."""

    def __init__(self, actions: list[str]) -> None:
        self.actions = actions
        self.received: list[int] = []
        self.inside = 0
        self.was_disturbed = False

    def act(self, step: int) -> str:
        self.was_disturbed |= self.inside > 0
        self.received.append(step)
        action = self.actions[step]
        if action == "sleep":
            time.sleep(0.003)
        if action == "raise":
            raise ValueError("broken")
        if action == "exit":
            raise SystemExit(2)
        if action == "cancelled":
            raise asyncio.CancelledError
        return action

    def on_train_step_start(self, ctx: Context) -> None:
        if self.act(ctx.step) == "cancel":
            raise KeyboardInterrupt  # an inline handler has no task to cancel

    def on_train_step_end(self, ctx: Context) -> None:
        self.on_train_step_start(ctx)


class AsyncActs(Acts):
    """Does the same in async handlers."""

    async def on_train_step_start(self, ctx: Context) -> None:  # type: ignore[override]  # what calls it awaits it
        action = self.act(ctx.step)
        self.inside += 1
        try:
            await asyncio.sleep(0)
            if action == "cancel":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            await asyncio.sleep(0.002 if action == "sleep" else 0)
        finally:
            self.inside -= 1

    async def on_train_step_end(self, ctx: Context) -> None:  # type: ignore[override]
        await self.on_train_step_start(ctx)


@pytest.fixture(autouse=True, scope="module")
def no_log_messages() -> Iterator[None]:
    """Disable logging, because these tests cause hundreds of failures."""
    logging.getLogger("callsheet").disabled = True
    yield
    logging.getLogger("callsheet").disabled = False


def forked_child_is_inert(manager: CallbackManager, ctx: Context, acts: Acts) -> bool:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    code = 1  # the child exits here even if an assertion fails
    try:
        signal.alarm(20)
        assert manager._table.lanes is not None
        lanes = [each.lane for each in manager._table.lanes]
        before = len(acts.received)
        manager.fire("on_train_step_end", ctx)
        manager.close()
        fine = bool(lanes) and all(lane.is_inert and lane.waiting == 0 for lane in lanes) and len(acts.received) == before
        own = Acts(["fine"] * len(acts.actions))
        mine = CallbackManager([Background(own)])
        mine.fire("on_train_step_end", ctx)
        mine.close()
        code = 0 if fine and own.received == [ctx.step] else 1
    finally:
        os._exit(code)


def expected_in_full(actions: list[str]) -> list[int]:
    """Return what is received if nothing is dropped: all steps, until three in a row have failed."""
    in_a_row = 0
    for step, action in enumerate(actions):
        in_a_row = in_a_row + 1 if action in FAILING else 0
        if in_a_row == 3:
            return list(range(step + 1))
    return list(range(len(actions)))


@pytest.mark.test_all
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@settings(max_examples=250, deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=1, max_size=40),
    kinds=st.lists(st.integers(0, 1), min_size=40, max_size=40),
    pauses=st.sets(st.integers(0, 39), max_size=4),
    forks=st.sets(st.integers(0, 39), max_size=1) if hasattr(os, "fork") else st.just(set()),
    drains=st.sets(st.integers(0, 39), max_size=2),
    is_async=st.booleans(),
    queue=st.sampled_from([1, 1, 2, 3, 8]),
    overflow=st.sampled_from(["block", "drop_oldest", "latest"]),
)
def test_all_fired_events_are_delivered_in_order_or_counted_as_dropped(
    actions: list[str],
    kinds: list[int],
    pauses: set[int],
    forks: set[int],
    drains: set[int],
    is_async: bool,
    queue: int,
    overflow: Overflow,
) -> None:
    acts = (AsyncActs if is_async else Acts)(actions)
    manager = CallbackManager([Background(acts, queue=queue, overflow=overflow, deadline=60)])
    ctx = Context(RunInfo("stress"))
    manager.open(ctx)
    for ctx.step in range(len(actions)):
        manager.fire(EVENTS[kinds[ctx.step]], ctx)
        if ctx.step in pauses:
            time.sleep(0.004)
        if ctx.step in forks:
            event("forked")
            assert forked_child_is_inert(manager, ctx, acts)
        if ctx.step in drains:
            manager.drain(ctx)
    manager.close()

    received, fired = acts.received, len(actions)
    assert received == sorted(set(received))
    assert not acts.was_disturbed
    recorded = manager.cost_report(fired).failures
    (fared,) = recorded or (Failures("Acts", 0, False, ""),)
    assert fared.count == sum(actions[step] in FAILING for step in received)
    assert fared.undelivered == 0
    if overflow == "block":
        assert received == expected_in_full(actions)
        assert fared.dropped == 0
    if fared.is_off:
        event("switched off")
        assert all(actions[step] in FAILING for step in received[-3:])
        assert len(received) + fared.dropped <= fired
        return
    assert len(received) + fared.dropped == fired
    if fared.dropped:
        event(f"{overflow} dropped")
    newest = [max((step for step in range(fired) if kinds[step] == kind), default=None) for kind in (0, 1)]
    for last in newest if overflow == "latest" else [fired - 1]:
        assert last is None or last in received


@settings(max_examples=25, deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=10, max_size=60),
    removed=st.integers(0, 59),
    back=st.integers(0, 20),
    is_async=st.booleans(),
)
def test_a_callback_removed_and_added_again_misses_the_events_in_between(
    actions: list[str], removed: int, back: int, is_async: bool
) -> None:
    # Failures are counted from zero when the callback is added again.
    actions = ["sleep" if action in FAILING else action for action in actions]
    acts = (AsyncActs if is_async else Acts)(actions)
    manager = CallbackManager([Background(acts)])
    ctx = Context(RunInfo("stress"))
    manager.open(ctx)
    is_away = False
    expected = []
    for ctx.step in range(len(actions)):
        if ctx.step == removed:
            manager.remove(acts)
            is_away = True
        if is_away and ctx.step >= removed + back:
            manager.add(Background(acts))
            is_away = False
        manager.fire("on_train_step_end", ctx)
        expected += [] if is_away else [ctx.step]
    manager.close()
    assert acts.received == expected
    assert not acts.was_disturbed
