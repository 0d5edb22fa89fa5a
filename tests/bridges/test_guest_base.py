"""The base class of guests: shared state, and the order in which it is updated."""

from typing import Any

import pytest

from callsheet import CallbackManager, Context, RunInfo, TrainState
from callsheet.bridges.guest_base import Common, Guest
from callsheet.core.ranks import Ranks
from callsheet.core.wrappers import Handler


def context() -> Context:
    return Context(RunInfo("test", ranks=Ranks()), state=TrainState())


def train(manager: CallbackManager, ctx: Context, steps: int) -> None:
    """Complete this many steps."""
    for _ in range(steps):
        ctx.step += 1
        ctx.state.timestamp = ctx.state.timestamp.next_batch()
        manager.fire("on_train_step_end", ctx)


class Tally(Common):
    """Counts steps once for all guests that share it."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, ctx: Context) -> None:
        self.steps += 1


class HandlesNothing:
    """A foreign callback that handles no event."""


class HandlesStepEnd:
    """A foreign callback that handles the end of a step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def after_step(self, steps: int) -> None:
        self.seen.append(steps)


class Reader(Guest):
    """Passes the shared count to the foreign callback."""

    COMMON = Tally
    EVENTS = {"on_train_step_end": ("after_step",)}

    def handler(self, theirs: str, method: Any) -> Handler:
        return lambda ctx: method(self.common.steps)


def reader(name: str) -> Reader:
    return Reader(HandlesStepEnd(), name=name)


def test_shared_state_is_updated_once_and_before_the_guests() -> None:
    plain, first, second = Reader(HandlesNothing(), name="plain"), reader("first"), reader("second")
    manager = CallbackManager([plain, first, second])
    train(manager, context(), 3)
    assert first.common is second.common is plain.common
    assert first.foreign.seen == second.foreign.seen == [1, 2, 3]
    manager.remove(plain)
    manager.remove(first)
    train(manager, context(), 1)
    assert second.foreign.seen == [1, 2, 3, 4]


def test_each_call_sheet_has_its_own_shared_state() -> None:
    one, other = reader("one"), reader("other")
    here, there = CallbackManager([one]), CallbackManager([other])
    train(here, context(), 3)
    train(there, context(), 1)
    assert (one.foreign.seen, other.foreign.seen) == ([1, 2, 3], [1])


def test_a_guest_with_is_alone_keeps_its_own_state() -> None:
    one, other = reader("one"), reader("other")
    other.common.is_alone, own = True, other.common
    train(CallbackManager([one, other]), context(), 2)
    assert other.common is own
    assert one.foreign.seen == other.foreign.seen == [1, 2]


def test_a_guest_in_a_lane_does_not_share_its_state() -> None:
    here, away = reader("here"), reader("away")
    away.lane = "background"
    manager, ctx = CallbackManager([here, away]), context()
    manager.open(ctx)
    train(manager, ctx, 3)
    manager.close()
    assert here.common is not away.common
    assert here.foreign.seen == away.foreign.seen == [1, 2, 3]


def test_an_error_in_the_shared_state_ends_the_run_and_names_its_class() -> None:
    class RaisesError(Tally):
        def on_train_step_end(self, ctx: Context) -> None:
            raise ValueError("no count")

    guest = reader("guest")
    guest.common, guest.on_error = RaisesError(), "isolate"
    with pytest.raises(ValueError, match="no count") as caught:
        train(CallbackManager([guest]), context(), 1)
    assert any("raised by callback RaisesError (test_guest_base.py" in note for note in caught.value.__notes__)
    assert guest.foreign.seen == []


def test_a_guest_that_is_added_to_another_call_sheet_gets_a_new_shared_state() -> None:
    first, second = reader("first"), reader("second")
    train(CallbackManager([first, second]), context(), 2)
    train(CallbackManager([second]), context(), 1)
    assert first.common is not second.common
    assert second.foreign.seen == [1, 2, 1]
