"""How what is told reaches a callback in a lane: a snapshot is taken here, and read there."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from callsheet.background import END_SECONDS, inner
from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.lanes import Lane, close
from callsheet.sheet import Entry, Member, failed, isolated
from callsheet.snapshot import Inbox
from callsheet.taker import DeviceNumbers, Taker, Values, copied

if TYPE_CHECKING:
    import asyncio

    from callsheet.process import Process


class LaneExit(Exception):
    """A callback in a lane raised SystemExit or the like, which would have ended a program."""


class CallbackLane:
    """The lane of one callback."""

    def __init__(self, member: Member, inbox: Inbox) -> None:
        self.member = member
        owner = member.thing if isinstance(member.thing, Callback) else Callback
        self.needs: tuple[str, ...] = owner.needs
        self.inbox = inbox
        self.lane = Lane(member.label, _do, owner.lane_options, kind=_kind, finish=self._finish)
        self._runner: asyncio.Runner | None = None
        self._process: Process | None = cast("Process", member.thing) if owner.lane == "process" else None
        if self._process is not None:
            self._process.begin()

    def end(self) -> None:
        """The lane takes nothing more; its process is told to end, or killed, where it has not returned. `join` waits for it."""
        is_busy = not self.lane.is_idle
        close([self.lane])
        if self._process is not None:
            self._process.end(at_once=is_busy)

    def join(self, seconds: float) -> None:
        """The lane was ended: its process is gone when this returns, killed after so long."""
        if self._process is not None:
            self._process.join(seconds)

    @property
    def is_here(self) -> bool:
        """The callback runs in this process."""
        return self._process is None

    def call(self, handler: Callable[..., Any], snapshot: Any, **payload: Any) -> None:
        """On the lane's thread: call a handler, here or in its process."""
        try:
            if self._process is not None:
                self._process.tell(handler.__name__, snapshot, payload)
            elif (answer := handler(snapshot, **payload)) is not None:
                self.answered(answer)
        except Exception:
            raise
        except BaseException as error:
            raise as_failure(error) from error

    def answered(self, answer: Any) -> None:
        """A handler has returned something: await it, where it is to be awaited."""
        if inspect.isawaitable(answer):
            self._await(answer)

    def _await(self, result: Any) -> None:
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()  # one loop for all of a callback's events, so that its clients can live on it

        async def awaited() -> None:
            await result

        self._runner.run(awaited())

    def _finish(self) -> None:
        if self._runner is not None:
            self._runner.close()


def join(lanes: Iterable[CallbackLane]) -> None:
    """Lanes were ended: wait for their processes, which end at the same time."""
    until = time.monotonic() + END_SECONDS
    for lane in lanes:
        lane.join(max(0.0, until - time.monotonic()))


class Handover:
    """One line of the call sheet whose handler runs in a lane. `hand` is told of the event on the training thread."""

    def __init__(self, entry: Entry, lane: CallbackLane, numbers: DeviceNumbers) -> None:
        self.event: object = entry.event
        self._event = str(entry.event)
        self._member, self._lane = entry.member, lane
        self._handler = entry.handler if lane.is_here else partial(lane.call, entry.handler)
        self._taker = Taker(entry.event, lane.needs, entry.member.label, lane.inbox, numbers)
        self._build = self._taker.build
        self.hand = self._taker.handing(self, entry.member, lane.lane, self._copy)

    def _copy(self, ctx: Context) -> None:
        """On the training thread."""
        if self._member.is_off and self._member.is_silent_at(self._event):
            return
        try:
            values = self._taker.take(self, ctx)
        except Exception as error:  # what cannot be copied is the callback's failure, and not the run's
            failed(self._member, self._event, ctx, error)
        else:
            self._lane.lane.put(values)

    def done(self, values: Values) -> None:
        """On the lane's thread: what `isolated` and `CallbackLane.call` do, without the calls."""
        member, ctx = self._member, values[1]
        if member.is_off and member.is_silent_at(self._event):
            return
        try:
            ctx = self._build(values)
            if (answer := self._handler(ctx)) is not None:
                self._lane.answered(answer)
        except Exception as error:
            failed(member, self._event, ctx, error)
        except BaseException as error:
            failed(member, self._event, ctx, as_failure(error))
        else:
            member.failures_in_a_row = 0


@dataclass(frozen=True, slots=True, eq=False)
class LoggerCall:
    """One call of a logger's method, such as `log_table`, that goes through its lane."""

    event: str
    method: Callable[..., Any]
    payload: dict[str, Any]
    lane: CallbackLane
    taker: Taker

    @classmethod
    def put(cls, lane: CallbackLane, method: str, ctx: Context, payload: dict[str, Any]) -> None:
        """Hand it over."""
        assert isinstance(lane.member.thing, Callback)
        handler = getattr(inner(lane.member.thing), method)
        taker = Taker(ctx.event, lane.needs, lane.member.label, lane.inbox, DeviceNumbers())
        try:
            call = cls(method, handler, copied(payload, {}), lane, taker)
            values = taker.take(call, ctx)
        except Exception as error:
            failed(lane.member, method, ctx, error)
        else:
            lane.lane.put(values)

    def done(self, values: Values) -> None:
        """On the lane's thread."""
        call = partial(self.lane.call, self.method, **self.payload)
        isolated(call, self.lane.member, self.event, self.taker.build(values))


def as_failure(error: BaseException) -> LaneExit:
    """What would have ended a program, as a failure of the callback."""
    failure = LaneExit(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _do(values: Values) -> None:
    values[0].done(values)


def _kind(values: Values) -> object:
    what = values[0]
    return what.event if isinstance(what, Handover) else (what.event, what.payload.get("name"))
