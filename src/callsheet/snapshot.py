"""Snapshots: what a callback off the training thread is given to read.

A snapshot is a context of which just a few fields are told, taken when the event was told. What training goes on to change is copied;
numbers that lie on a device are copied there and then, without waiting, and read where they are wanted. The model, the optimizer and the
scheduler are in no snapshot.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from callsheet.context import Context, RunInfo
from callsheet.control import Control, Request
from callsheet.errors import FieldNotAvailable, RequestRejected, did_you_mean, text_of
from callsheet.events import Event
from callsheet.lifecycle import ALWAYS, ANYWHERE, fields_available

logger = logging.getLogger("callsheet")

NEVER = ("model", "optimizer", "scheduler")
"""Fields that no snapshot holds: training goes on with them."""

ON_REQUEST = ("user_state", "batch", "microbatch", "outputs", "loss", "loss_dict", "grad_norm", "eval_losses")
"""Fields that a snapshot holds only where the callback names them in `needs`: they have to be copied."""


class LaneMessage(NamedTuple):
    """What a lane has to say to the run, as data: `log`, `ask`, `switch off`, or a logger's method, with its arguments."""

    what: str
    arguments: dict[str, Any]
    by: str = ""

    def do(self, ctx: Context) -> None:
        """On the training thread."""
        if self.what == "log":
            ctx.log(**self.arguments)
        elif self.what == "ask":
            ctx.control.ask(**self.arguments)
        elif self.what == "switch off":
            ctx.control.switch_off(**self.arguments)
        else:
            ctx._to_loggers(self.what, **self.arguments)


class Inbox:
    """What lanes have said, until the training thread reaches a boundary."""

    def __init__(self) -> None:
        self._said: deque[LaneMessage] = deque()

    def put(self, said: LaneMessage) -> None:
        """From any thread."""
        self._said.append(said)

    def empty(self, ctx: Context) -> None:
        """On the training thread: do what was said."""
        while self._said:
            said = self._said.popleft()
            try:
                said.do(ctx)
            except Exception as error:  # a lane is isolated, and so is what it says
                logger.error("%s said %r in its lane, which cannot be done: %s", said.by, said.what, text_of(error))

    def name_lost(self) -> None:
        """The run is over: say how much of what nobody heard there is, and whose. Requests do not count: there is nothing left to stop."""
        lost = Counter((said.by, said.what) for said in self._said.copy() if said.what not in ("ask", "switch off"))
        for (by, what), times in lost.items():
            logger.error(
                "the run has ended, and what %s said in its lane came too late for the loggers: %s, %d times", by, what, times
            )


class LaneControl:
    """The control as a lane has it: its requests are one rank's own, and act once the training thread has heard of them.

    What has been asked for can be read as it is at that moment; in a process of its own, as it was when the event was sent.
    """

    def __init__(self, control: Control, inbox: Inbox, by: str) -> None:
        self._control, self.inbox, self.by = control, inbox, by

    @property
    def able(self) -> frozenset[str]:
        """What the loop can do now."""
        return frozenset(self._control.able)

    @property
    def is_shared(self) -> bool:
        """There are other ranks."""
        return self._control.is_shared

    @property
    def stop_requested(self) -> Request | None:
        """See `Control.stop_requested`."""
        return self._control.stop_requested

    @property
    def save_requested(self) -> Request | None:
        """See `Control.save_requested`."""
        return self._control.save_requested

    @property
    def save_requests(self) -> tuple[Request, ...]:
        """See `Control.save_requests`."""
        return self._control.save_requests

    @property
    def evaluate_requested(self) -> Request | None:
        """See `Control.evaluate_requested`."""
        return self._control.evaluate_requested

    @property
    def accumulation(self) -> int | None:
        """How many batches were asked for with `Control.set_gradient_accumulation`."""
        return self._control.accumulation

    @property
    def load_path(self) -> str | None:
        """Which checkpoint was asked for with `Control.load`."""
        return self._control.load_path

    def told(self) -> dict[str, Any]:
        """What can be read here, as data, for `control_of`."""
        requests = (self.stop_requested, self.evaluate_requested, *self.save_requests)
        return {
            "able": self.able,
            "is_shared": self.is_shared,
            "requests": [request for request in requests if request is not None],
            "accumulation": self.accumulation,
            "load_path": self.load_path,
        }

    def hurry(self) -> None:
        """The end of the step in hand is a boundary."""
        self._control.is_hurried = True
        self._control.pending = True

    def switch_off(self, callback: str, number: int, failures: int) -> None:
        """For the manager; see `Control.switch_off`."""
        self.inbox.put(LaneMessage("switch off", {"callback": callback, "number": number, "failures": failures}, self.by))

    def stop(self, why: str, *, replicated: bool = False, resumable: bool = False) -> None:
        """Ask that training end; see `Control.stop`."""
        self._ask(Request("stop", why, self.by, resumable=resumable), replicated)

    def save(self, why: str, *, kind: str = "requested", by: str = "", metric: str = "", replicated: bool = False) -> None:
        """Ask for a checkpoint; see `Control.save`."""
        self._ask(Request("save", why, by or self.by, kind, metric), replicated)

    def evaluate(self, why: str, *, replicated: bool = False) -> None:
        """Ask that all evaluators run; see `Control.evaluate`."""
        self._ask(Request("evaluate", why, self.by), replicated)

    def set_gradient_accumulation(self, batches: int) -> NoReturn:
        """Refused: every rank would have to ask before the same step."""
        raise RequestRejected(
            f"control.set_gradient_accumulation({batches}) in a lane, where no two ranks are at the same step; ask inline, on every rank alike"
        )

    def load(self, path: str | os.PathLike[str]) -> NoReturn:
        """Refused: the checkpoint is loaded before a lane has heard of it."""
        raise RequestRejected(
            f"control.load({os.fspath(path)!r}) in a lane, which hears of on_checkpoint_load_start when it is over; ask inline"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in dir(Control) and not name.startswith("_"):
                raise FieldNotAvailable(
                    f"control.{name} is the loop's own and not told in a lane; there are stop, save, evaluate, and stop_requested and the like"
                )
            raise AttributeError(f"the control has no {name!r}{did_you_mean(name, dir(LaneControl))}")

    def _ask(self, request: Request, replicated: bool) -> None:
        if replicated:
            raise RequestRejected(
                f"control.{request.what}(replicated=True) in a lane, where every rank is somewhere else; leave replicated out"
            )
        self._control.check(request)
        self.inbox.put(LaneMessage("ask", {"request": request}, self.by))
        self.hurry()


def control_of(told: Mapping[str, Any]) -> Control:
    """A control from which can be read what `LaneControl.told` told."""
    control = Control(told["able"], is_shared=told["is_shared"])
    for request in told["requests"]:
        control.agree(request)
    control.accumulation, control.load_path = told["accumulation"], told["load_path"]
    return control


class Snapshot(Context):
    """A context that stands still. Its methods reach the run: what is logged stands in the next record, requests act at a boundary.

    Raises:
        FieldNotAvailable: on reading what it does not hold; the message says how to ask for it.
    """

    __slots__ = ("_lane",)

    _lane: LaneControl
    """The control once more, as it is, for what is said to the run."""

    @classmethod
    def of_run(cls, control: LaneControl, event: Event | None, run: RunInfo | None) -> type[Snapshot]:
        """The kind of snapshots at one event of one run: what is the same in all of them stands in their class, and is written once."""
        same = {"__slots__": (), "__module__": cls.__module__, "_lane": control, "control": control}
        return type(cls.__name__, (cls,), same | {"event": event, "run": run})

    def mute(self, callback: Any, *events: str, until: int | None = None) -> None:
        """Refused."""
        raise RequestRejected(
            "the call sheet is the training thread's, and a lane cannot mute an event: let the callback run inline"
        )

    unmute = mute

    def log(self, values: Mapping[str, Any], *, over: str = "last", across: str = "mean", weight: Any = None) -> None:
        """Log numbers for the next record; see `Context.log`."""
        self._lane.inbox.put(
            LaneMessage("log", {"values": dict(values), "over": over, "across": across, "weight": weight}, self._lane.by)
        )

    def gather(self, value: Any) -> NoReturn:
        """Refused: a collective of a lane would meet the training's own."""
        raise RequestRejected(
            "ctx.gather() in a lane would meet the training's own collectives; gather inline, and write in a lane"
        )

    def has(self, name: str) -> bool:
        """See `Context.has`."""
        return name in _SAME or super().has(name)

    def control_told(self) -> dict[str, Any]:
        """For a lane that is elsewhere: what can be read from the control."""
        return self._lane.told()

    def say(self, said: LaneMessage) -> None:
        """For a lane that is elsewhere: pass on what was said there."""
        self._lane.inbox.put(said)
        if said.what == "ask":
            self._lane.hurry()

    def _to_loggers(self, method: str, **payload: Any) -> None:
        self._lane.inbox.put(LaneMessage(method, payload, self._lane.by))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in NEVER:
                raise FieldNotAvailable(
                    f"ctx.{name} is not told in a lane: training goes on with it; use it inline, and hand over numbers"
                )
            if name in ON_REQUEST and (self.event in ANYWHERE or name in (*ALWAYS, *fields_available(self.event))):
                raise FieldNotAvailable(
                    f"ctx.{name} is told in a lane where it is asked for: let the callback's class say snapshot_fields = ({name!r}, ...)"
                )
            return super().__getattr__(name)


_SAME = frozenset({"control", "event", "run"})


def snapshot_of(fields: Mapping[str, Any], control: LaneControl) -> Snapshot:
    """A snapshot that holds these fields."""
    made = Snapshot.__new__(Snapshot)
    made.control = control  # type: ignore[assignment]  # the part of it that a lane has
    made._lane = control
    for name, value in fields.items():
        setattr(made, name, value)
    return made
