"""Snapshots: what a callback in a lane (another thread or process) receives instead of the context.

A snapshot is a context in which only a few fields are available, captured when the event was fired. Values that training may change are
copied. Scalars on a device are copied without waiting, and the lane waits for the copy when it reads them. The model, the optimizer and
the scheduler are in no snapshot.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Never, NoReturn

from callsheet.core.callback import Callback
from callsheet.core.context import NO_VALUES, Across, Context, Over, check_logged
from callsheet.core.control import Control, Request, SaveKind
from callsheet.core.events import Event
from callsheet.core.lane_options import FIELDS_NOT_IN_LANES
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, ANYWHERE_EVENTS, fields_available
from callsheet.core.run_state import RunInfo
from callsheet.errors import FieldNotAvailable, RequestRejected, did_you_mean, text_of

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("callsheet")

FIELDS_ON_REQUEST = ("user_state", "batch", "microbatch", "outputs", "loss", "loss_dict", "grad_norm", "eval_losses")
"""Fields that a snapshot holds only if the callback names them in `snapshot_fields`, because they must be copied."""


class LaneMessage(NamedTuple):
    """A message from a callback in a lane (another thread or process) to the training thread.

    `what` is `log`, `ask`, `switch off`, or the name of a logger's method. `by` is the name of the callback.
    """

    what: str
    arguments: dict[str, Any]
    by: str = ""

    def do(self, ctx: Context) -> None:
        """Carry out the message on the training thread, for example log the values that the message contains."""
        if self.what == "log":
            ctx.log(**self.arguments)
        elif self.what == "ask":
            if not ctx.control.host or ctx.control.supports(self.arguments["request"]):
                ctx.control.ask(**self.arguments)
        elif self.what == "switch off":
            ctx.control.switch_off(**self.arguments)
        else:
            ctx._to_loggers(self.what, **self.arguments)


class Inbox:
    """Holds the messages of callbacks in lanes (other threads) until the end of the training step."""

    def __init__(self) -> None:
        self._messages: deque[LaneMessage] = deque()
        self._lost: Counter[tuple[str, str]] = Counter()  # by callback and kind, the messages that came too late

    def put(self, message: LaneMessage) -> None:
        """Add a message. Any thread may call this method."""
        self._messages.append(message)

    def empty(self, ctx: Context, *, is_logging_over: bool = False) -> None:
        """Carry out all messages and remove them. Called on the training thread.

        With `is_logging_over`, no metrics record follows, so values for a record are lost; see `log_lost`.
        """
        while self._messages:
            message = self._messages.popleft()
            if is_logging_over and message.what == "log":
                self._lost[message.by, message.what] += 1
                continue
            try:
                message.do(ctx)
            except Exception as error:  # an error of a callback in another thread or process must not stop training
                logger.error("The message %r from the lane of %s failed: %s", message.what, message.by, text_of(error))

    def log_lost(self) -> None:
        """Log, for each callback, how many of its messages to the training thread arrived too late and had no effect.

        Requests are not counted, because after the run's end there is nothing left to request.
        """
        self._lost.update((each.by, each.what) for each in self._messages.copy() if each.what not in ("ask", "switch off"))
        for (by, what), times in self._lost.items():
            logger.error(
                "Messages from the lane of %s came at the run's end, too late for the loggers: %s, %d times", by, what, times
            )


class LaneControl:
    """The `ctx.control` of a callback in a lane (another thread or process), through which the callback makes requests to the loop.

    The requests are those of this rank alone, and take effect after the training thread has read them.

    The properties show the requests at this moment. In another process, they show the requests at the time when the event was
    sent.
    """

    def __init__(self, control: Control, inbox: Inbox, by: str) -> None:
        self._control, self.inbox, self.by = control, inbox, by

    @property
    def able(self) -> frozenset[str]:
        """The requests that the loop supports now."""
        return frozenset(self._control.able)

    @property
    def is_shared(self) -> bool:
        """Whether the run has several ranks, which must agree on requests."""
        return self._control.is_shared

    @property
    def stop_requested(self) -> Request | None:
        """The first request to stop training; see `Control.stop_requested`."""
        return self._control.stop_requested

    @property
    def save_requested(self) -> Request | None:
        """The save request that decides the kind of the next checkpoint; see `Control.save_requested`."""
        return self._control.save_requested

    @property
    def save_requests(self) -> tuple[Request, ...]:
        """All requests for the next checkpoint; see `Control.save_requests`."""
        return self._control.save_requests

    @property
    def evaluate_requested(self) -> Request | None:
        """The request for an evaluation that the loop will carry out; see `Control.evaluate_requested`."""
        return self._control.evaluate_requested

    @property
    def accumulation(self) -> int | None:
        """The number of batches per step that was requested with `Control.set_gradient_accumulation`."""
        return self._control.accumulation

    @property
    def load_path(self) -> str | None:
        """The path of the checkpoint that was requested with `Control.load`."""
        return self._control.load_path

    def values(self) -> dict[str, Any]:
        """Return the contents of this control as plain data, from which `control_of` makes a control in another process."""
        requests = (self.stop_requested, self.evaluate_requested, *self.save_requests)
        return {
            "able": self.able,
            "host": self._control.host,
            "is_shared": self.is_shared,
            "requests": [request for request in requests if request is not None],
            "accumulation": self.accumulation,
            "load_path": self.load_path,
        }

    def forward(self, message: LaneMessage) -> None:
        """Pass a message from a callback in another process on to the training thread."""
        self.inbox.put(message)
        if message.what == "ask":
            self.request_boundary()

    def request_boundary(self) -> None:
        """Ask the loop to process, after the current step, the messages and requests of callbacks in other threads."""
        self._control.is_boundary_requested = True
        self._control.pending = True

    def switch_off(self, callback: str, number: int, failures: int) -> None:
        """Request that all ranks disable the callback; see `Control.switch_off`. Called by the manager."""
        self.inbox.put(LaneMessage("switch off", {"callback": callback, "number": number, "failures": failures}, self.by))

    def stop(self, why: str, *, replicated: bool = False, resumable: bool = False) -> None:
        """Request the end of training; see `Control.stop`."""
        self._ask(Request("stop", why, self.by, resumable=resumable), replicated)

    def save(self, why: str, *, kind: SaveKind = "requested", by: str = "", metric: str = "", replicated: bool = False) -> None:
        """Request a checkpoint; see `Control.save`."""
        self._ask(Request("save", why, by or self.by, kind, metric), replicated)

    def evaluate(self, why: str, *, replicated: bool = False) -> None:
        """Request an evaluation; see `Control.evaluate`."""
        self._ask(Request("evaluate", why, self.by), replicated)

    def set_gradient_accumulation(self, batches: int) -> NoReturn:
        """Raise `RequestRejected`: all ranks must make this request before the same step, which a lane cannot ensure."""
        raise RequestRejected(
            f"control.set_gradient_accumulation({batches}) does not work in a lane, where ranks are at different steps; call it inline, on "
            "every rank"
        )

    def load(self, path: str | os.PathLike[str]) -> NoReturn:
        """Raise `RequestRejected`: callbacks in lanes handle `on_checkpoint_load_start` too late to choose the checkpoint."""
        raise RequestRejected(
            f"control.load({os.fspath(path)!r}) does not work in a lane, which handles on_checkpoint_load_start too late; call it inline"
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in dir(Control) and not name.startswith("_"):
                raise FieldNotAvailable(
                    f"control.{name} is not available in a lane; stop, save, evaluate and the properties such as stop_requested are"
                )
            raise AttributeError(f"the control has no {name!r}{did_you_mean(name, dir(LaneControl))}")

    def _ask(self, request: Request, replicated: bool) -> None:
        if replicated:
            raise RequestRejected(
                f"control.{request.what}(replicated=True) does not work in a lane, where ranks are at different steps; leave replicated out"
            )
        if not self._control.host:
            # In callsheet's own loop, an unsupported request raises an error now.
            # In another framework's loop, the training thread logs this error later.
            self._control.supports(request)
        self.inbox.put(LaneMessage("ask", {"request": request}, self.by))
        self.request_boundary()


def control_of(values: Mapping[str, Any]) -> Control:
    """Return a `ctx.control` with the requests in `values`, which `LaneControl.values` returned in another process."""
    control = Control(values["able"], is_shared=values["is_shared"], host=values["host"])
    for request in values["requests"]:
        control.agree(request)
    control.accumulation, control.load_path = values["accumulation"], values["load_path"]
    return control


class Snapshot(Context):
    """The context that a callback in another thread receives: fields that do not change, and methods to log values and make requests.

    Logged values become part of the next metrics record; requests act after a later step.

    Raises:
        FieldNotAvailable: on reading a field that the snapshot does not hold; the message says how to get the field.
    """

    __slots__ = ("_lane", "event")

    event: Event | None
    _lane: LaneControl
    """The same object as `control`, typed as a `LaneControl`. All messages to the run go through this object."""

    @classmethod
    def of_run(cls, control: LaneControl, event: Event | None, run: RunInfo | None) -> type[Snapshot]:
        """Return the snapshot class for one event of a run. Values that all its snapshots share are attributes of the class."""
        same = {"__slots__": (), "__module__": cls.__module__, "_lane": control, "control": control}
        return type(cls.__name__, (cls,), same | {"event": event, "run": run})

    def mute(self, callback: Callback, *events: str, until: int | None = None) -> None:
        """Raise `RequestRejected`, because only the training thread may change which handlers are called."""
        raise RequestRejected("a callback in a lane cannot mute or unmute an event; run the callback inline")

    unmute = mute

    def log(
        self,
        values: Mapping[str, Any] = NO_VALUES,
        *misplaced: Never,
        over: Over = "last",
        across: Across = "mean",
        weight: float | Tensor | None = None,
        **misnamed: Never,
    ) -> None:
        check_logged(values, misplaced, misnamed)
        self._lane.inbox.put(
            LaneMessage("log", {"values": dict(values), "over": over, "across": across, "weight": weight}, self._lane.by)
        )

    def gather(self, value: Any) -> NoReturn:
        """Raise `RequestRejected`, because a collective in another thread would mix with the collectives of training."""
        raise RequestRejected(
            "ctx.gather() in a lane would mix with the collectives of training; gather inline, and write in a lane"
        )

    def has(self, name: str) -> bool:
        return name in _ALWAYS_HELD_FIELDS or super().has(name)

    def _to_loggers(self, method: str, **payload: Any) -> None:
        self._lane.inbox.put(LaneMessage(method, payload, self._lane.by))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in FIELDS_NOT_IN_LANES:
                raise FieldNotAvailable(
                    f"ctx.{name} is not available in a lane, since training keeps changing it; use it inline, and log numbers"
                )
            if name in FIELDS_ON_REQUEST and (
                self.event in ANYWHERE_EVENTS or name in (*ALWAYS_AVAILABLE, *fields_available(self.event))
            ):
                raise FieldNotAvailable(
                    f"ctx.{name} is not in this snapshot; to get it, set snapshot_fields = ({name!r}, ...) in the callback's class"
                )
            return super().__getattr__(name)


_ALWAYS_HELD_FIELDS = frozenset({"control", "event", "run"})


def snapshot_of(fields: Mapping[str, Any], control: LaneControl) -> Snapshot:
    """Return a snapshot with these values as its fields."""
    made = Snapshot.__new__(Snapshot)
    made.control = control  # type: ignore[assignment]  # a LaneControl has only the part of `Control` that a lane may use
    made._lane = control
    for name, value in fields.items():
        setattr(made, name, value)
    return made
