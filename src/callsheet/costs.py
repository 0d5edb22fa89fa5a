"""What callbacks cost, and where the time of a few steps went.

Events of the step's path are told many times a second, so they are timed in *windows*: a few steps in a row, now and then, for which the
manager tells from a second table of handlers, in which each is timed and every edge of a span is marked. Between windows their handlers
run bare. Everything else, such as records, evaluations and checkpoints, is rare, and each telling of it is timed.
"""

from __future__ import annotations

import logging
import sys
import time
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from callsheet.callback import one_of
from callsheet.errors import ConfigError
from callsheet.lifecycle import SPAN_OF, SPANS, names_in

if TYPE_CHECKING:
    from callsheet.context import Context
    from callsheet.sheet import Handler, HandlerEntry

logger = logging.getLogger("callsheet")

MODES = ("sampled", "all", "off")

WINDOW_STEPS = 4
_FIRST_STEP = 2  # steps that are left out at the beginning: they allocate, and compile
_SPARSE = 16  # windows are at most one step in so many,
_APART_SECONDS, _APART_SHARE = 1.0, 0.25  # and begin at most so often, or after so much more of the time that has passed
_TOLD_GROWTH, _TOLD_SECONDS = 1.1, 2.0  # after so many times the time of the last telling, and seconds: few lines in a long run
_SLICES = 20_000  # a window with a long evaluation in it keeps so many
_SURE = 20  # steps that must have been timed before a callback is named
_NOTICEABLE = 50e-6  # seconds a step below which nobody is named

_STEP = ("fetch", "train_step")
"""The spans that a step is made of."""
_STEP_PARTS = (*_STEP, "on_checkpoint_due")  # with what callbacks are asked after it


def _path_events() -> frozenset[str]:
    """The events of every batch: the edges of what a step is made of, and the question whether to save, which is asked after each."""
    spans = [*_STEP, "eval_step", "test_step", "predict_step"]
    for name in spans:  # grows with what stands inside
        spans += [inner for inner in names_in(SPANS[name].order) if inner in SPANS and inner not in spans]
    return frozenset(
        {event for name in spans for event in (SPANS[name].start_event, SPANS[name].end_event)} | {"on_checkpoint_due"}
    )


PATH_EVENTS = _path_events()
"""Events whose handlers are timed in windows."""


class Cost(NamedTuple):
    """What one callback has taken at one event, in seconds of this process; where `is_sampled`, in the windows alone."""

    callback: str
    event: str
    calls: int
    seconds: float
    worst_seconds: float
    is_sampled: bool


class Failures(NamedTuple):
    """How often an isolated callback failed in this process, what it said last, whether it has been switched off, how many events its
    lane dropped, and how many the lane had not told when the end was."""

    callback: str
    count: int  # type: ignore[assignment]  # not tuple.count: nobody counts equal fields
    is_off: bool
    last: str
    dropped: int = 0
    undelivered: int = 0


class CostReport(NamedTuple):
    """What this process has come to so far.

    `steps` were made in `seconds`, evaluations and saves included; of them `window_steps` were timed, which took `window_seconds`, from
    the fetch of their batch to their end.
    """

    mode: str
    steps: int
    seconds: float
    window_steps: int
    window_seconds: float
    costs: tuple[Cost, ...]
    failures: tuple[Failures, ...] = ()

    def share(self, cost: Cost) -> float:
        """The fraction of the time that it takes: of a step, where it is told at every step, else of the whole."""
        whole = self.window_seconds if cost.is_sampled else self.seconds
        return cost.seconds / whole if whole else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        costs, failures = ([each._asdict() for each in part] for part in (self.costs, self.failures))
        return self._asdict() | {"costs": costs, "failures": failures}


class Slice(NamedTuple):
    """A span (`callback` is empty) or a callback at an event, in seconds from its window's start. Slices nest by their times."""

    name: str
    begin: float
    seconds: float
    step: int
    callback: str = ""


class Window(NamedTuple):
    """A few steps in a row: `began` in seconds since 1970. `is_whole` is False where there was more than is kept."""

    first_step: int
    last_step: int
    began: float
    seconds: float
    slices: tuple[Slice, ...]
    is_whole: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a slice is the list of its fields."""
        return self._asdict() | {"slices": [list(each) for each in self.slices]}


class _Cell:
    """What a handler has taken."""

    __slots__ = ("callback", "calls", "event", "seconds", "window_seconds", "worst")

    def __init__(self, callback: str, event: str) -> None:
        self.callback, self.event = callback, event
        self.calls = 0
        self.seconds = self.worst = 0.0
        self.window_seconds = 0.0  # the part of `seconds` while a window was open


class _Open(NamedTuple):
    """A window that is being recorded: marks are (time, event, step), slices (begin, seconds, event, step, callback)."""

    first_step: int
    began: float
    start: float
    marks: list[tuple[float, str, int]]
    slices: list[tuple[float, float, str, int, str]]


class Costs:
    """Times the handlers of one manager.

    Args:
        mode: `sampled`, the default; `all` times every telling, which costs a fifth of a microsecond each; `off` times nothing.
        warn_share: a callback that takes more than this fraction of the step is named in a warning, once; None: never.

    Raises:
        ConfigError: an unknown mode, or a share that is none.
    """

    def __init__(self, mode: str = "sampled", warn_share: float | None = 0.05) -> None:
        self.mode = one_of("mode of costs", mode, MODES)
        if warn_share is not None and not warn_share > 0:
            raise ConfigError(f"warn_share={warn_share!r}: give a fraction of the step above zero, or None")
        self._warn_share = warn_share
        self._open: _Open | None = None
        self.reset()

    def reset(self) -> None:
        """A run begins."""
        self._cells: dict[tuple[int, str, str], _Cell] = {}
        self._named: set[str] = set()
        self._open = None
        self.has_begun = False
        self._first = self._window_steps = 0
        self._window_seconds = 0.0
        self._began = perf_counter()
        self._latest: Window | None = None
        self._tell_at = 0.0
        self.next_step = sys.maxsize
        """The step after which a window begins or ends; a loop that does not look at every step looks then."""

    def begin(self, step: int) -> None:
        """This process trains on after `step`."""
        self.has_begun, self._first = True, step
        if self.mode != "off":
            self.next_step = step + _FIRST_STEP

    @property
    def is_window(self) -> bool:
        """A window is open: events are to be told from the table with everything timed."""
        return self._open is not None

    def wraps(self, event: str, *, in_window: bool) -> bool:
        """Whether handlers of `event` are timed in this table."""
        return self.mode == "all" or (self.mode == "sampled" and (in_window or event not in PATH_EVENTS))

    def timed(self, handler: Handler, entry: HandlerEntry) -> Handler:
        """`handler`, timed."""
        label, event = entry.member.label, entry.event
        cell = self._cells.setdefault((entry.member.number, label, event), _Cell(label, event))

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
        """Told at the edges of spans while a window is open."""
        if self._open is not None:
            self._open.marks.append((perf_counter(), str(ctx.event), ctx.step))

    def switch(self, step: int) -> None:
        """`step` has ended, with all that follows it: a window begins, or ends."""
        now = perf_counter()
        if self._open is None:
            self._open = _Open(step + 1, time.time(), now, [], [])
            self.next_step = step + WINDOW_STEPS
            return
        opened, self._open = self._open, None
        slices = _nested(opened)
        in_steps = sum(each.seconds for each in slices if each.name in _STEP_PARTS)
        self._window_steps += step + 1 - opened.first_step
        self._window_seconds += in_steps
        self._latest = Window(
            opened.first_step, step, opened.began, now - opened.start, tuple(slices[:_SLICES]), len(slices) <= _SLICES
        )
        self._warn()
        pause = min(_APART_SECONDS, _APART_SHARE * (now - self._began))
        apart = int(pause * self._window_steps / self._window_seconds) if self._window_seconds else 0
        self.next_step = step + max((_SPARSE - 1) * WINDOW_STEPS, apart)

    def is_told_now(self, *, is_last: bool) -> bool:
        """Whether the costs should be told again: always at the end, and before it at times that lie ever further apart."""
        now = perf_counter() - self._began
        if self.mode == "off" or (now < self._tell_at and not is_last):
            return False
        self._tell_at = now * _TOLD_GROWTH + _TOLD_SECONDS
        return True

    def take_window(self) -> Window | None:
        """The window that ended last, if nobody has taken it."""
        latest, self._latest = self._latest, None
        return latest

    def report(self, step: int, failures: tuple[Failures, ...] = ()) -> CostReport:
        """What it has come to after `step`."""
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

    def _warn(self) -> None:
        """Name who takes more of the step than is stated, once."""
        if self._warn_share is None or self._window_steps < _SURE:
            return
        taken: dict[str, float] = {}
        for cell in self._cells.values():
            if cell.event in PATH_EVENTS:
                taken[cell.callback] = taken.get(cell.callback, 0.0) + (cell.window_seconds)
        for label, seconds in taken.items():
            share, each = seconds / self._window_seconds, seconds / self._window_steps
            if share > self._warn_share and each > _NOTICEABLE and label not in self._named:
                self._named.add(label)
                logger.warning(
                    "callback %s takes %.0f %% of the step, %.2g ms of %.2g ms; give it an interval, or make it do less at each step",
                    label,
                    100 * share,
                    1000 * each,
                    1000 * self._window_seconds / self._window_steps,
                )


def _nested(opened: _Open) -> list[Slice]:
    """The window's slices, in the order of their beginnings; what began before the window or has not ended is left out."""
    slices = [
        Slice(event, begin - opened.start, seconds, step, callback) for begin, seconds, event, step, callback in opened.slices
    ]
    stack: list[tuple[str, float]] = []
    for moment, event, step in opened.marks:
        name = SPAN_OF[event]
        if event == SPANS[name].start_event:
            stack.append((name, moment))
        elif stack and stack[-1][0] == name:  # else it began before the window
            slices.append(Slice(name, stack[-1][1] - opened.start, moment - stack[-1][1], step))
            stack.pop()
    return sorted(slices, key=lambda each: (each.begin, -each.seconds))
