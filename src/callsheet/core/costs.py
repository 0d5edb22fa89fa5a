"""Measures the time that callbacks take, and records timelines of a few steps.

Events inside a step are fired many times a second, so they are timed only in *windows*: groups of a few consecutive steps, from
time to time. In a window the manager dispatches from a second table, in which each handler is timed and the start and end of
every span are recorded. Outside windows the handlers are called directly. All other events, such as those of logging, evaluation
and checkpoints, are rare, and every one of them is timed.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from callsheet.core.callback import one_of
from callsheet.core.lifecycle import SPAN_OF, SPANS, names_in
from callsheet.errors import ConfigError

if TYPE_CHECKING:
    from callsheet.core.call_sheet import HandlerEntry, Registration
    from callsheet.core.context import Context
    from callsheet.core.wrappers import Handler

logger = logging.getLogger("callsheet")

CostMode = Literal["sampled", "all", "off"]
MODES: tuple[CostMode, ...] = get_args(CostMode)

WINDOW_STEPS = 4
_UNTIMED_STEPS = 2  # the first steps are not timed, since they include memory allocation and compilation
_STEPS_PER_TIMED_STEP = 16  # on average, at most one in `_STEPS_PER_TIMED_STEP` steps is timed
# The pause between timing windows: `_MAX_PAUSE_SECONDS` or `_PAUSE_SHARE` of the run's time so far, whichever is less.
_MAX_PAUSE_SECONDS, _PAUSE_SHARE = 5.0, 0.25
# If costs are sent to the loggers at the run's time `t`, they are sent again at `_PUBLISH_GROWTH * t + _PUBLISH_SECONDS`.
_PUBLISH_GROWTH, _PUBLISH_SECONDS = (1.1, 2.0)
_MAX_SLICES = 20_000  # the most slices (timed spans and calls) to keep of one timing window
_COSTLY_SHARE = 0.05
_COSTLY_SECONDS = 50e-6  # a callback that takes fewer seconds per step than this limit is never costly
_MIN_TIMED_STEPS = 20
# If fewer than `_MIN_TIMED_STEPS` steps were timed, a callback is costly only if it takes more than the fraction `_CLEAR_SHARE`
# of the step's time, and also more than `_CLEAR_SECONDS` per step.
_CLEAR_SHARE, _CLEAR_SECONDS = 0.25, 10e-3

_STEP_SPANS = ("fetch", "train_step")
"""The names of the spans that make up one training step."""
# The event `on_checkpoint_due` is fired after the step, but its time counts as part of the step.
_STEP_PARTS = (*_STEP_SPANS, "on_checkpoint_due")


def _path_events() -> frozenset[str]:
    """Return the events that are fired for every batch.

    These are the events of the spans in a step, and `on_checkpoint_due`, which is fired after each step.
    """
    spans = [*_STEP_SPANS, "eval_step", "test_step", "predict_step"]
    # The body appends the spans inside each span to `spans`, and the loop then visits these too.
    for name in spans:
        spans += [inner for inner in names_in(SPANS[name].order) if inner in SPANS and inner not in spans]
    return frozenset(
        {event for name in spans for event in (SPANS[name].start_event, SPANS[name].end_event)} | {"on_checkpoint_due"}
    )


PATH_EVENTS = _path_events()
"""Events that are fired for every batch. Their handlers are timed only in timing windows."""


class Cost(NamedTuple):
    """The seconds that one callback took at one event in this process.

    If `is_sampled`, only calls in timing windows are included.
    """

    callback: str
    event: str
    calls: int
    seconds: float
    worst_seconds: float
    is_sampled: bool


class Failures(NamedTuple):
    """How often a callback has failed in this process, and how many of its events were not delivered.

    `last` is the message of the last error. `is_off` is True if the callback was disabled. `dropped` counts the events that its
    lane dropped, and `undelivered` those that were still in the lane's queue at the run's end.
    """

    callback: str
    count: int  # type: ignore[assignment]  # hides the method `tuple.count`, which is not needed
    is_off: bool
    last: str
    dropped: int = 0
    undelivered: int = 0


def failures_of(
    registrations: Iterable[Registration], dropped: Mapping[Registration, int], undelivered: Mapping[Registration, int]
) -> tuple[Failures, ...]:
    """Return the failures and lost events of each callback that has any. A removed callback is included if it lost events.

    An event is lost if the callback's lane dropped or did not deliver it.
    """
    return tuple(
        Failures(each.label, each.failures, each.is_off, each.last_failure, dropped.get(each, 0), undelivered.get(each, 0))
        for each in dict.fromkeys([*registrations, *dropped])
        if each.failures or dropped.get(each) or undelivered.get(each)
    )


class CostReport(NamedTuple):
    """How much time the callbacks of this process have taken so far, and how often they failed.

    Attributes:
        mode: which calls are timed: `sampled`, `all` or `off`.
        steps: the number of steps so far.
        seconds: the time that these steps took, including evaluations and saves.
        window_steps: how many of the steps were timed.
        window_seconds: the time of these timed steps, from the fetch of the batch to the step's end.
        costs: one item for each callback and event, with `callback`, `event`, `calls`, `seconds`, `worst_seconds` and `is_sampled`
            (whether only calls in the timed steps are included).
        failures: one item for each callback that failed or lost events, with `callback`, `count`, `is_off` (whether it was
            disabled), `last` (the last error), and the number of events that its lane has `dropped` or left `undelivered`.
    """

    mode: str
    steps: int
    seconds: float
    window_steps: int
    window_seconds: float
    costs: tuple[Cost, ...]
    failures: tuple[Failures, ...] = ()

    def share(self, cost: Cost) -> float:
        """Return the fraction of time that `cost` takes: of the timing windows if only calls in these were timed, else of the run.

        Args:
            cost: one of `costs`.
        """
        whole = self.window_seconds if cost.is_sampled else self.seconds
        return cost.seconds / whole if whole else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        costs, failures = ([each._asdict() for each in part] for part in (self.costs, self.failures))
        return self._asdict() | {"costs": costs, "failures": failures}


class Slice(NamedTuple):
    """The start and the duration of a span, or of one callback's call at an event. `callback` is empty for a span.

    Times are in seconds from the start of the window. A slice whose times lie within those of another is nested in it.
    """

    name: str
    begin: float
    seconds: float
    step: int
    callback: str = ""


class Window(NamedTuple):
    """A timing window: a few consecutive steps in which the handlers were timed.

    `began` is in seconds since 1970. `is_whole` is False if slices were left out.
    """

    first_step: int
    last_step: int
    began: float
    seconds: float
    slices: tuple[Slice, ...]
    is_whole: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the window as plain data. Each slice becomes the list of its fields."""
        return self._asdict() | {"slices": [list(each) for each in self.slices]}


class _Cell:
    """The total time that one handler has taken, updated at each call of the handler."""

    __slots__ = ("callback", "calls", "event", "seconds", "window_seconds", "worst")

    def __init__(self, callback: str, event: str) -> None:
        self.callback, self.event = callback, event
        self.calls = 0
        self.seconds = self.worst = 0.0
        self.window_seconds = 0.0  # the part of `seconds` that was measured in timing windows


class _Open(NamedTuple):
    """A timing window that is being recorded.

    A mark is (time, event, step); a slice is (begin, seconds, event, step, callback).
    """

    first_step: int
    began: float
    start: float
    marks: list[tuple[float, str, int]]
    slices: list[tuple[float, float, str, int, str]]


class Costs:
    """Measures the time that the handlers of one manager take.

    Args:
        mode: `sampled`, the default; `all` times every call, which costs 0.2 microseconds each; `off` times nothing.
        warn_share: warn once about each callback that takes more than this fraction of a step. None: never warn.

    Raises:
        ConfigError: the mode is unknown, or the share is not above zero.
    """

    def __init__(self, mode: CostMode = "sampled", warn_share: float | None = _COSTLY_SHARE) -> None:
        self.mode = one_of("mode of costs", mode, MODES)
        if warn_share is not None and not warn_share > 0:
            raise ConfigError(f"warn_share={warn_share!r}: give a fraction of the step above zero, or None")
        self._warn_share = warn_share
        self._open: _Open | None = None
        self.reset()

    def reset(self) -> None:
        """Delete all measurements, because a new run begins."""
        self._cells: dict[tuple[int, str, str], _Cell] = {}
        self._named: set[str] = set()
        self._open = None
        self.has_begun = False
        self._first = self._window_steps = 0
        self._window_seconds = 0.0
        self._began = perf_counter()
        self._latest: Window | None = None
        self._publish_at = 0.0
        self.next_step = sys.maxsize
        """The step after which the next timing window begins, or after which the open one ends."""

    def advance(self, step: int, *, is_needed: bool) -> bool:
        """Begin or end a timing window, if one is due to begin or end after `step`. Return whether one has begun or ended.

        Args:
            step: the number of completed steps. The first call decides after which step the first timing window begins.
            is_needed: whether there are callbacks.
        """
        if not is_needed:
            self.next_step = sys.maxsize
        elif not self.has_begun:
            self.has_begun, self._first = True, step
            if self.mode != "off":
                self.next_step = step + _UNTIMED_STEPS
        elif step >= self.next_step:
            self._switch(step)
            return True
        return False

    @property
    def is_window(self) -> bool:
        """Whether a timing window is open. In a window, all handlers are called through wrappers that measure their time."""
        return self._open is not None

    def wraps(self, event: str, *, in_window: bool) -> bool:
        """Return whether handlers of `event` are timed. Some handlers are timed only in a timing window (`in_window`)."""
        return self.mode == "all" or (self.mode == "sampled" and (in_window or event not in PATH_EVENTS))

    def time_calls(self, handler: Handler, entry: HandlerEntry) -> Handler:
        """Return a function that calls `handler` and adds the time of the call to the costs."""
        label, event = entry.registration.label, entry.event
        cell = self._cells.setdefault((entry.registration.number, label, event), _Cell(label, event))

        def run(ctx: Context) -> None:
            begin = perf_counter()
            try:
                handler(ctx)
            finally:
                seconds = perf_counter() - begin
                cell.calls += 1
                cell.seconds += seconds
                if seconds > cell.worst:
                    cell.worst = seconds
                if self._open is not None:
                    cell.window_seconds += seconds
                    self._open.slices.append((begin, seconds, event, ctx.step, label))

        return run

    def mark(self, ctx: Context) -> None:
        """Record the time at which a span starts or ends, if a timing window is open."""
        if self._open is not None:
            self._open.marks.append((perf_counter(), str(ctx.event), ctx.step))

    def _switch(self, step: int) -> None:
        """Begin a timing window after `step`, or end the current one."""
        now = perf_counter()
        if self._open is None:
            self._open = _Open(step + 1, time.time(), now, [], [])
            self.next_step = step + WINDOW_STEPS
            return
        opened, self._open = self._open, None
        slices = _nest_slices(opened)
        in_steps = sum(each.seconds for each in slices if each.name in _STEP_PARTS)
        self._window_steps += step + 1 - opened.first_step
        self._window_seconds += in_steps
        self._latest = Window(
            opened.first_step, step, opened.began, now - opened.start, tuple(slices[:_MAX_SLICES]), len(slices) <= _MAX_SLICES
        )
        self._warn()
        pause = min(_MAX_PAUSE_SECONDS, _PAUSE_SHARE * (now - self._began))
        apart = int(pause * self._window_steps / self._window_seconds) if self._window_seconds else 0
        self.next_step = step + max((_STEPS_PER_TIMED_STEP - 1) * WINDOW_STEPS, apart)

    def should_publish(self, *, is_last: bool) -> bool:
        """Return whether it is time to send the costs to the loggers.

        They are always sent at the run's end, unless the mode is `off`. During the run, they are sent less and less often.
        """
        now = perf_counter() - self._began
        if is_last:
            self._warn(is_last=True)
        if self.mode == "off" or (now < self._publish_at and not is_last):
            return False
        self._publish_at = now * _PUBLISH_GROWTH + _PUBLISH_SECONDS
        return True

    def take_window(self) -> Window | None:
        """Return the timing window that ended last, or None if an earlier call has already returned it."""
        latest, self._latest = self._latest, None
        return latest

    def report(self, step: int, failures: tuple[Failures, ...] = ()) -> CostReport:
        """Return the time that the handlers took up to the end of `step`, and how often they failed."""
        return CostReport(
            mode=self.mode,
            steps=step - self._first,
            seconds=perf_counter() - self._began,
            window_steps=self._window_steps,
            window_seconds=self._window_seconds,
            costs=tuple(
                Cost(cell.callback, cell.event, cell.calls, cell.seconds, cell.worst, self._is_sampled(cell.event))
                for cell in self._cells.values()
                if cell.calls
            ),
            failures=failures,
        )

    def _is_sampled(self, event: str) -> bool:
        return self.mode == "sampled" and event in PATH_EVENTS

    def _warn(self, *, is_last: bool = False) -> None:
        """Warn once about each callback that takes more than `warn_share` of a step, if enough steps were timed."""
        steps = self._window_steps
        if self._warn_share is None or not steps or (steps < _MIN_TIMED_STEPS and not is_last):
            return
        taken: dict[str, float] = {}
        for cell in self._cells.values():
            if cell.event in PATH_EVENTS:
                taken[cell.callback] = taken.get(cell.callback, 0.0) + cell.window_seconds
        for label, seconds in taken.items():
            share, each = seconds / self._window_seconds, seconds / steps
            if label not in self._named and is_costly(share, each, steps, least=self._warn_share):
                self._named.add(label)
                logger.warning(
                    "Callback %s takes %.0f %% of the step, %.2g ms of %.2g ms; give it an interval, or make it do less at each step",
                    label,
                    100 * share,
                    1000 * each,
                    1000 * self._window_seconds / steps,
                )


def is_costly(share: float, seconds: float, steps: int, *, least: float = _COSTLY_SHARE) -> bool:
    """Return whether a callback takes so much of a step's time that the user should be warned.

    Args:
        share: the fraction of the step's time that the callback takes.
        seconds: the time that it takes in each step.
        steps: the number of steps that were timed. If only few were timed, a single interrupted call could make a callback look
            costly, so higher limits apply.
        least: a callback that takes less than this fraction is not costly.
    """
    if steps < _MIN_TIMED_STEPS:
        return share > max(least, _CLEAR_SHARE) and seconds > _CLEAR_SECONDS
    return share > least and seconds > _COSTLY_SECONDS


def _nest_slices(opened: _Open) -> list[Slice]:
    """Return the timing window's slices (spans and calls of callbacks) in the order of their starts.

    Spans that began before the window or have not ended are left out.
    """
    slices = [
        Slice(event, begin - opened.start, seconds, step, callback) for begin, seconds, event, step, callback in opened.slices
    ]
    stack: list[tuple[str, float]] = []
    for moment, event, step in opened.marks:
        name = SPAN_OF[event]
        if event == SPANS[name].start_event:
            stack.append((name, moment))
        elif stack and stack[-1][0] == name:  # a span that began before the timing window is not on the stack, and is left out
            slices.append(Slice(name, stack[-1][1] - opened.start, moment - stack[-1][1], step))
            stack.pop()
    return sorted(slices, key=lambda each: (each.begin, -each.seconds))
