"""Compares what callbacks receive that listen to random subsets of the events with what a callback receives that listens to all.

The tests in the venv of Composer use this module too, so it imports no framework.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from callsheet import Callback, CallbackManager, Context
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, EVENTS, FIELDS

Train = Callable[[CallbackManager], Any]
"""Trains with the callbacks of a manager. Each call trains in the same way."""


class Seen(NamedTuple):
    """What a callback can read at an event. `loss` is None if it is not available."""

    event: str
    step: int
    epoch: int
    fields: frozenset[str]
    loss: float | None


class Listener(Callback):
    """Records what it can read at each event, and then calls `acts` with the context and the number of events before this one."""

    phase = "report"

    def __init__(self, acts: Callable[[Context, int], None]) -> None:
        self.seen: list[Seen] = []
        self.acts = acts

    def record(self, ctx: Context) -> None:
        readable = frozenset(name for name in FIELDS if name not in ALWAYS_AVAILABLE and ctx.has(name))
        loss = ctx.loss.item() if "loss" in readable else None
        self.seen.append(Seen(str(ctx.event), ctx.step, ctx.epoch, readable, loss))
        self.acts(ctx, len(self.seen) - 1)


def listener(events: Iterable[str], acts: Callable[[Context, int], None] = lambda ctx, number: None) -> Listener:
    """Return a callback that listens to `events`."""
    made: Listener = type("Listener", (Listener,), dict.fromkeys(events, Listener.record))(acts)
    return made


def compare_subsets(train: Train, not_fired: Container[str], seeds: Iterable[int]) -> None:
    """Train once for each seed, and compare what callbacks receive with what a callback receives that listens to all events.

    Each time, one callback listens to a random subset of the events. At a random event, this callback adds, removes or mutes a second
    callback, or removes itself. If it mutes the second callback, it may unmute it later.
    """
    whole = listener(event for event in EVENTS if event not in not_fired)
    train(CallbackManager([whole]))
    for seed in seeds:
        found = _difference(train, whole.seen, random.Random(seed))
        assert not found, f"seed {seed}: {found}"


def _difference(train: Train, whole: Sequence[Seen], drawn: random.Random) -> str:
    fired = sorted({each.event for each in whole})
    own, others = (drawn.sample(fired, drawn.choice([1, 2, 3, 4, 6, 10])) for _ in range(2))
    places = [place for place, each in enumerate(whole) if each.event in own]
    how = drawn.choice(["add", "remove", "mute", "remove itself"])
    acts_at = drawn.randrange(len(places))
    unmutes_at = drawn.randrange(acts_at + 1, len(places) + 3)
    muted = drawn.sample(others, drawn.randint(1, len(others)))
    second = listener(others)

    def act(ctx: Context, number: int) -> None:
        if number == acts_at:
            if how == "add":
                manager.add(second)
            elif how == "mute":
                ctx.mute(second, *muted)
            else:
                manager.remove(second if how == "remove" else first)
        elif number == unmutes_at and how == "mute":
            ctx.unmute(second, *muted)

    first = listener(own, act)
    manager = CallbackManager([first] if how == "add" else [first, second])
    train(manager)

    place = places[acts_at]
    ends = place if how == "remove itself" else len(whole)
    of_first = [(each, True) for at, each in enumerate(whole) if each.event in own and at <= ends]
    of_second: list[tuple[Seen, bool]] = []  # what the second callback receives, and whether it must receive it
    begins = places[unmutes_at] if unmutes_at < len(places) else len(whole)
    for at, each in enumerate(whole):
        if each.event not in others:
            continue
        if how == "add":
            expected, is_sure = at > place, at > _end(whole, place)
        elif how == "remove":
            expected, is_sure = at <= place, at < place
        elif how == "mute" and each.event in muted:
            expected, is_sure = at <= place or at > begins, at < place or at > _end(whole, begins)
        else:
            expected = is_sure = True
        if expected:
            of_second.append((each, is_sure))
    for name, one, wanted in (("first", first, of_first), ("second", second, of_second)):
        if found := _first_difference(one.seen, wanted):
            at_event = f"{whole[place].event} of step {whole[place].step}"
            return f"the {name} callback (to {how} at {at_event}; own {own}, others {others}, muted {muted}): {found}"
    return ""


def _end(whole: Sequence[Seen], place: int) -> int:
    """Return the index of the last event of the step or evaluation to which the event at `place` belongs.

    A host observes a part of a step, such as the forward pass, only if it had listeners when the step or evaluation began.
    """
    before = [each.event for each in whole[: place + 1]][::-1]
    for start, end in (("on_eval_all_start", "on_eval_all_end"), ("on_fetch_start", "on_train_step_end")):
        if start in before and end not in before[: before.index(start)]:
            return next((at for at in range(place, len(whole)) if whole[at].event == end), len(whole))
    return place


def _first_difference(found: Sequence[Seen], expected: Sequence[tuple[Seen, bool]]) -> str:
    left = iter(expected)
    for one in found:
        for other, is_sure in left:
            if one == other:
                break
            if is_sure:
                return f"received {one} instead of {other}"
        else:
            return f"received {one} after the last event"
    return next((f"did not receive {other}" for other, is_sure in left if is_sure), "")
