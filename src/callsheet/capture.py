"""Taking snapshots: what a callback off the training thread is to read is noted when an event is told, and built where it is read."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from callsheet.context import Context, TrainState
from callsheet.errors import FieldNotAvailable
from callsheet.events import Event, as_event
from callsheet.lifecycle import ALWAYS, FIELDS, fields_available
from callsheet.snapshot import NEVER, ON_REQUEST, Inbox, LaneControl, Snapshot

if TYPE_CHECKING:
    from callsheet.lanes import Lane
    from callsheet.sheet import Registration

_BY_DEFAULT = tuple(name for name in FIELDS if name not in (*ALWAYS, *NEVER, *ON_REQUEST))
_OF_STATE = ("timestamp", "previous_timestamp", "course")
"""What every snapshot holds of the state; it is written anew, never changed."""
_STILL_FIELDS = frozenset({"step_skipped", "boundary", "eval_name", "standalone", "span", "exception"})
_PLAIN = frozenset({int, float, str, bool, type(None), Event})
_NOT_TOLD = object()
_BEFORE_FIELDS = 4 + len(_OF_STATE)

Values = tuple[Any, ...] | list[Any]
"""What was taken: what tells it, the kind of snapshots to build, and the fields; a tuple of what cannot change, or a list with copies in it."""

Tell = Callable[[Values], None]


class DeviceNumbers:
    """The scalar tensors of one event on the host: one copy for all lanes that hear it, which nobody waits for here."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        """The fields that any lane wants."""
        self._tensors: list[tuple[Any, int | None]] = []  # and their versions: one that was written to is copied anew
        self._copies: dict[int, Any] = {}

    def of(self, ctx: Context) -> dict[int, Any]:
        """Copies of the scalars that are told now, by the identity of their tensors; on their way, where they lie on an accelerator."""
        tensors: list[Any] = []
        for name in sorted(self.names):
            if ctx.has(name):
                _collect(getattr(ctx, name), tensors)
        now = [(tensor, None if tensor.is_inference() else tensor._version) for tensor in tensors]
        known = len(now) == len(self._tensors) and all(
            a[0] is b[0] and a[1] == b[1] is not None for a, b in zip(now, self._tensors, strict=True)
        )
        if not known:
            self._tensors = now
            self._copies = {id(tensor): made for tensor, made in zip(tensors, _copies(tensors), strict=True)}
        return self._copies


class Pending:
    """Scalars that are on their way from a device."""

    __slots__ = ("_arrived", "_buffer", "_place", "_type")

    def __init__(self, buffer: Any, arrived: Any, place: int, type_: Any) -> None:
        self._buffer, self._arrived, self._place, self._type = buffer, arrived, place, type_

    def read(self) -> Any:
        """The scalar, as a tensor on the host; waits for its copy."""
        self._arrived.synchronize()
        return self._buffer[self._place].to(self._type)


def _copies(tensors: list[Any]) -> list[Any]:
    torch = sys.modules["torch"]
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    found: dict[int, Any] = {}
    for device in devices:
        here = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        stacked = torch.stack([tensors[place].detach().reshape(()).double() for place in here])
        buffer = torch.empty(len(here), dtype=stacked.dtype, pin_memory=True).copy_(stacked, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(device))
        found |= {place: Pending(buffer, arrived, i, tensors[place].dtype) for i, place in enumerate(here)}
    return [found[place] if place in found else tensor.detach().clone() for place, tensor in enumerate(tensors)]


class SnapshotCapture:
    """Takes snapshots at one event for one callback.

    Args:
        event: at which.
        needs: the fields that the callback named, or none for those that cost nothing to take.
        by: the callback's name, for its requests.
        inbox: where what it says goes.
        numbers: shared by all takers of the event.
    """

    def __init__(self, event: str | None, needs: tuple[str, ...], by: str, inbox: Inbox, numbers: DeviceNumbers) -> None:
        told = fields_available(event) if event is not None else ()
        self._event = as_event(event) if event is not None else None
        self._is_last = self._event is Event.RUN_END  # at which the run has its outcome
        self._by, self._inbox, self._numbers = by, inbox, numbers
        wanted = [
            name
            for name in dict.fromkeys(needs or _BY_DEFAULT)
            if name not in (*NEVER, "event", "run", "state", "step", "epoch", "control")
        ]
        self._names = tuple(name for name in wanted if name in told or name in ALWAYS)
        self._changing = tuple(place for place, name in enumerate(self._names, _BEFORE_FIELDS) if name not in _STILL_FIELDS)
        numbers.names.update(name for name in self._names if name not in _STILL_FIELDS)
        self._state: TrainState | None = None  # the run's, of what was taken last; None where the next needs a kind of its own
        self._kind: type[Snapshot] = Snapshot
        new = self._names.index("loss") + _BEFORE_FIELDS if "loss" in self._names else None
        self._written = _written(self._names, self._changing, new)

    def handing(
        self, tell: Tell, member: Registration, queue: Lane, otherwise: Callable[[Context], object]
    ) -> Callable[[Context], None]:
        """What puts, on the training thread, what is told now into the queue.

        Args:
            tell: stands in front of it there.
            member: which is told nothing while it is off.
            otherwise: called instead where that is not all: there is something to copy, the loop does not tell every field, the member is
                off.
        """
        hand: Callable[[Context], None] = self._written["handing"](self.snapshot_class_for, tell, member, queue, otherwise)
        return hand

    def telling(
        self,
        event: str,
        member: Registration,
        handler: Callable[[Snapshot], Any],
        answered: Callable[[Any], None],
        fails: Callable[[Snapshot, BaseException], None],
    ) -> Tell:
        """What builds, on the lane's thread, a snapshot of what was taken, and calls the handler with it.

        Args:
            event: what it is called where the member is off.
            member: whose failures are counted.
            handler: called with the snapshot.
            answered: is given what it returns, if that is anything.
            fails: is given the snapshot, as far as it was built, and what has gone wrong.
        """
        tell: Tell = self._written["telling"](self, event, member, handler, answered, fails)
        return tell

    def take(self, tell: Tell, ctx: Context) -> Values:
        """On the training thread: what is told now, with copies of what may change."""
        always = [getattr(ctx.state, name) for name in _OF_STATE]
        fields = [getattr(ctx, name) if ctx.has(name) else _NOT_TOLD for name in self._names]
        values = [tell, self.snapshot_class_for(ctx)[0], ctx.step, ctx.epoch, *always, *fields]
        numbers = self._numbers.of(ctx)
        for place in self._changing:
            values[place] = copied(values[place], numbers)
        return values

    def arrived(self, values: Values) -> Values:
        """What has copies in it, with those that were on their way."""
        return (*values[:_BEFORE_FIELDS], *map(_arrived, values[_BEFORE_FIELDS:]))

    def forget_untold(self, made: Snapshot) -> None:
        """Leave out of a snapshot the fields that the loop has not told."""
        for name in self._names:
            if getattr(made, name) is _NOT_TOLD:
                delattr(made, name)

    def snapshot_class_for(self, ctx: Context) -> tuple[type[Snapshot], TrainState | None]:
        """The kind of snapshots in this run, and its state, while which is the same the kind is."""
        if self._state is None or self._state is not ctx.state:
            control = LaneControl(ctx.control, self._inbox, self._by)  # the part of it that a lane has
            self._kind = Snapshot.of_run(control, self._event, copy.copy(ctx.run))
            self._state = ctx.state if not self._is_last else None
        return self._kind, self._state


@functools.cache
def _written(names: tuple[str, ...], changing: tuple[int, ...], new: int | None) -> dict[str, Callable[..., Any]]:
    """What takes these fields, of which those places may hold what changes, and what puts them into a snapshot and tells it.

    The place `new` holds the step's loss, which is not copied where the loop makes a new one each step: on the CPU, without a graph.

    Every event that is handed over goes through both: with a loop over names they take three times as long. Nothing is put into the source but names of
    the lifecycle's table.
    """
    of_state = [f"state.{name}" for name in _OF_STATE]
    taken = ["ctx.step", "ctx.epoch", *of_state, *(f"ctx.{name}" for name in names)]
    filled = ["made.step", "made.epoch", *of_state, *(f"made.{name}" for name in names)]
    is_new = {new: f" and not (loss_is_new and is_lone(values[{new}]))"}
    are_changing = "".join(f" or type(values[{place}]) not in plain{is_new.get(place, '')}" for place in changing)
    source = f"""
def handing(snapshot_class_for, tell, member, queue, otherwise):
    items, append, kind, known, loss_is_new = queue.items, queue.items.append, None, None, False
    def hand(ctx):
        nonlocal kind, known, loss_is_new
        try:
            state = ctx.state
            if state is not known:
                kind, known = snapshot_class_for(ctx)
                loss_is_new = ctx.loss_is_new
            values = (tell, kind, {", ".join(taken)})
        except FieldNotAvailable:
            return otherwise(ctx)
        if member.is_off{are_changing}:
            otherwise(ctx)
        elif len(items) < queue.room:
            append(values)
        else:
            queue.put(values)
    return hand

def telling(taker, event, member, handler, answered, fails):
    def tell(values):
        if member.is_off and member.is_silent_at(event):
            return
        made = new(values[1])
        try:
            made.state = state = new(TrainState)
            if type(values) is tuple:
                _, _, {", ".join(filled)} = values
            else:
                _, _, made.step, made.epoch, *_ = values  # for whom a copy's failure is told to
                _, _, {", ".join(filled)} = taker.arrived(values)
                taker.forget_untold(made)
            if (answer := handler(made)) is not None:
                answered(answer)
        except BaseException as error:
            fails(made, error)
        else:
            if member.failures_in_a_row:  # nothing is written that the training thread would have to fetch anew
                member.failures_in_a_row = 0
    return tell
"""
    scope: dict[str, Any] = {
        "plain": _PLAIN, "FieldNotAvailable": FieldNotAvailable, "new": object.__new__, "TrainState": TrainState,
        "is_lone": _is_lone,
    }  # fmt: skip
    exec(source, scope)
    return scope


def _is_lone(value: Any) -> bool:
    """Return whether the tensor lies on the CPU and holds no graph."""
    return value.is_cpu and not value.requires_grad


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _collect(value: Any, scalars: list[Any]) -> None:
    """Find the scalar tensors in `value`."""
    if _is_tensor(value):
        if value.numel() == 1:
            scalars.append(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            _collect(each, scalars)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, scalars)


def copied(value: Any, scalars: Mapping[int, Any]) -> Any:
    """`value`, with its containers and tensors copied; objects of other kinds are copied as they copy themselves."""
    if type(value) in _PLAIN or value is _NOT_TOLD:
        return value
    if _is_tensor(value):
        return scalars[id(value)] if id(value) in scalars else value.detach().clone()
    if isinstance(value, Mapping):
        copies = {name: copied(each, scalars) for name, each in value.items()}
        return type(value)(**copies) if is_dataclass(value) else copies  # what Hugging Face's models return is both
    if type(value) in (list, tuple):
        return type(value)(copied(each, scalars) for each in value)
    if isinstance(value, tuple):
        return type(value)(*(copied(each, scalars) for each in value))
    return copy.deepcopy(value)


def _arrived(value: Any) -> Any:
    """`value`, with what was on its way from a device."""
    if type(value) is Pending:
        return value.read()
    if isinstance(value, Mapping):
        there = {name: _arrived(each) for name, each in value.items()}
        return type(value)(**there) if is_dataclass(value) else there
    if type(value) in (list, tuple):
        return type(value)(_arrived(each) for each in value)
    if isinstance(value, tuple):
        return type(value)(*map(_arrived, value))
    return value
