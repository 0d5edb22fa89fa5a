"""How what is told reaches a callback in a lane: a snapshot is taken here, and read there."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from callsheet.background import END_SECONDS, inner
from callsheet.callback import Callback
from callsheet.capture import DeviceNumbers, SnapshotCapture, Values, copied
from callsheet.context import Context
from callsheet.errors import text_of
from callsheet.lanes import Lane, close
from callsheet.sheet import HandlerEntry, Registration, failed
from callsheet.snapshot import Inbox, Snapshot

if TYPE_CHECKING:
    import asyncio

    from callsheet.process import Process


class LaneExit(Exception):
    """A callback in a lane raised SystemExit or the like, which would have ended a program."""


class CallbackLane:
    """The lane of one callback."""

    def __init__(self, member: Registration, inbox: Inbox) -> None:
        self.member = member
        owner = member.thing if isinstance(member.thing, Callback) else Callback
        self.needs: tuple[str, ...] = owner.snapshot_fields
        self.inbox = inbox
        self.lane = Lane(member.label, None, owner.lane_options, kind=_kind, finish=self._finish)
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

    def bound(self, method: Callable[..., Any], /, **payload: Any) -> Callable[[Snapshot], Any]:
        """What calls a method on the lane's thread, here or in its process, with a snapshot and the payload."""
        if (process := self._process) is not None:
            return lambda snapshot: process.tell(method.__name__, snapshot, payload)
        return partial(method, **payload) if payload else method

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


class LaneDelivery:
    """One callback's hearing of one event, or one call of a logger's method, off the training thread.

    Args:
        event: what it is called where it fails.
        kind: by which a lane that keeps the latest alone tells one from another.
        member: whose it is.
        lane: that it goes through.
        handler: called there, with a snapshot.
        taker: of snapshots.
    """

    def __init__(
        self,
        event: str,
        kind: object,
        member: Registration,
        lane: CallbackLane,
        handler: Callable[[Snapshot], Any],
        capture: SnapshotCapture,
    ) -> None:
        self._event, self._member, self._lane, self._capture = event, member, lane, capture
        self._tell = capture.telling(event, member, handler, lane.answered, self._fails)
        self._tell.kind = kind  # type: ignore[attr-defined]  # what the lane finds in its queue

    @classmethod
    def of_line(cls, entry: HandlerEntry, lane: CallbackLane, numbers: DeviceNumbers) -> Callable[[Context], None]:
        """What is told, on the training thread, of a line of the call sheet whose handler runs in a lane."""
        capture = SnapshotCapture(entry.event, lane.needs, entry.member.label, lane.inbox, numbers)
        made = cls(str(entry.event), entry.event, entry.member, lane, lane.bound(entry.handler), capture)
        return capture.handing(made._tell, entry.member, lane.lane, made.put)

    @classmethod
    def put_call(cls, lane: CallbackLane, method: str, ctx: Context, payload: dict[str, Any]) -> None:
        """Hand over one call of a logger's method, such as `log_table`."""
        assert isinstance(lane.member.thing, Callback)
        called = getattr(inner(lane.member.thing), method)
        capture = SnapshotCapture(ctx.event, lane.needs, lane.member.label, lane.inbox, DeviceNumbers())
        try:
            handler = lane.bound(called, **copied(payload, {}))
        except Exception as error:
            failed(lane.member, method, ctx, error)
        else:
            cls(method, (method, payload.get("name")), lane.member, lane, handler, capture).put(ctx)

    def put(self, ctx: Context) -> None:
        """On the training thread, where something has to be copied, or may not be told."""
        if self._member.is_off and self._member.is_silent_at(self._event):
            return
        try:
            values = self._capture.take(self._tell, ctx)
        except Exception as error:  # what cannot be copied is the callback's failure, and not the run's
            failed(self._member, self._event, ctx, error)
        else:
            self._lane.lane.put(values)

    def _fails(self, ctx: Snapshot, error: BaseException) -> None:
        """On the lane's thread: what `isolated` does, for what may end a program."""
        failed(self._member, self._event, ctx, error if isinstance(error, Exception) else as_failure(error))


def _kind(values: Values) -> object:
    return values[0].kind


def as_failure(error: BaseException) -> LaneExit:
    """What would have ended a program, as a failure of the callback."""
    failure = LaneExit(f"{type(error).__name__}: {text_of(error)}")
    failure.__cause__ = error
    return failure
