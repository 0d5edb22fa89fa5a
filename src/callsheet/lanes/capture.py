"""When an event is fired, copies the context's fields for callbacks that run in lanes, which are other threads or processes.

The training thread captures the fields in a tuple, and the lane's thread builds a snapshot from it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections import UserDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from callsheet.core.context import Context
from callsheet.core.events import Event, as_event
from callsheet.core.lane_options import FIELDS_NOT_IN_LANES
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, FIELDS, fields_available
from callsheet.core.page_locked import keep_if_device_failed, page_locked
from callsheet.core.run_state import TrainState
from callsheet.errors import FieldNotAvailable
from callsheet.lanes.snapshot import FIELDS_ON_REQUEST, Inbox, LaneControl, Snapshot

if TYPE_CHECKING:
    from callsheet.core.call_sheet import Registration
    from callsheet.lanes.queue import Lane

_DEFAULT_FIELDS = tuple(name for name in FIELDS if name not in (*ALWAYS_AVAILABLE, *FIELDS_NOT_IN_LANES, *FIELDS_ON_REQUEST))
_STATE_ATTRIBUTES = ("timestamp", "previous_timestamp", "constants")
"""Attributes of `TrainState` that every snapshot contains.

They need no copy, because they are replaced and never changed in place.
"""
_NEW_FIELDS = frozenset({"loss", "grad_norm"})
"""Fields that a snapshot need not copy if the loop makes new tensors for these fields in each step: see `Context.loss_is_new`."""
_UNCHANGING_FIELDS = frozenset({"step_skipped", "boundary", "eval_name", "standalone", "span", "exception"})
_PLAIN_TYPES = frozenset({int, float, str, bool, type(None), Event})
_UNAVAILABLE = object()
_FIRST_FIELD_PLACE = 4 + len(_STATE_ATTRIBUTES)

Values = tuple[Any, ...] | list[Any]
"""The captured values of one event: the function that delivers the event, the snapshot class, and the values of the fields.

The captured values are in a list if they include copies, otherwise in a tuple.
"""

Deliver = Callable[[Values], None]


class DeviceNumbers:
    """Copies the scalar tensors of one event from the device to the host, for callbacks that run in lanes (other threads).

    All lanes that handle the event share one copy, and the training thread does not wait for the device.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        """The names of the fields that at least one lane reads at this event."""
        # Each tensor that was copied, with its `_version` at that time. A tensor whose version has changed is copied again.
        self._tensors: list[tuple[Any, int | None]] = []
        self._copies: dict[int, Any] = {}
        # The step in which the tensors were copied, and the lanes that have received these copies. If such a lane asks for copies
        # again, the event was fired a second time. Then the tensors are copied again, even if their `_version` is the same, because
        # some changes in place, such as those of a collective, do not increase it.
        self._step = -1
        self._served: set[int] = set()

    def of(self, ctx: Context, lane: object) -> dict[int, Any]:
        """Copy the scalar tensors in the available fields to the CPU. Return a dict of the copies by the `id` of the original tensor.

        For a scalar on an accelerator, the copy is a `Pending`. Each `lane` calls this method once for every event.
        """
        tensors: list[Any] = []
        for name in sorted(self.names):
            if ctx.has(name):
                _collect(getattr(ctx, name), tensors)
        now = [(tensor, None if tensor.is_inference() else tensor._version) for tensor in tensors]
        is_known = self._step == ctx.step and id(lane) not in self._served and len(now) == len(self._tensors)
        if not is_known or not all(a[0] is b[0] and a[1] == b[1] is not None for a, b in zip(now, self._tensors, strict=True)):
            self._tensors, self._step = now, ctx.step
            self._served.clear()
            self._copies = {id(tensor): made for tensor, made in zip(tensors, _copies(tensors), strict=True)}
        self._served.add(id(lane))
        return self._copies


class Pending:
    """A scalar that is being copied from a device to the host. The copy may still be running."""

    __slots__ = ("_arrived", "_buffer", "_place", "_shape", "_type")

    def __init__(self, buffer: Any, arrived: Any, place: int, tensor: Any) -> None:
        self._buffer, self._arrived, self._place = buffer, arrived, place
        self._type, self._shape = tensor.dtype, tensor.shape

    def read(self) -> Any:
        """Wait until the copy is complete, and return the scalar as a tensor on the host."""
        try:
            self._arrived.synchronize()
        except Exception:
            keep_if_device_failed()
            raise
        return self._buffer[self._place].to(self._type).reshape(self._shape)


def _copies(tensors: list[Any]) -> list[Any]:
    groups: dict[Any, list[int]] = {}  # by device and dtype: the indices of the tensors that are copied together
    for place, tensor in enumerate(tensors):
        if tensor.device.type == "cuda":
            groups.setdefault((tensor.device, _wide(tensor)), []).append(place)
    found: dict[int, Any] = {}
    for (device, wide), here in groups.items():
        torch = sys.modules["torch"]
        stacked = torch.stack([tensors[place].detach().reshape(()).to(wide) for place in here])
        buffer = page_locked(len(here), wide).copy_(stacked, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(device))
        found |= {place: Pending(buffer, arrived, i, tensors[place]) for i, place in enumerate(here)}
    return [found[place] if place in found else tensor.detach().clone() for place, tensor in enumerate(tensors)]


def _wide(tensor: Any) -> Any:
    """Return a dtype that represents all values of the tensor's dtype exactly."""
    torch = sys.modules["torch"]
    return torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else torch.int64


class SnapshotCapture:
    """Captures the context's fields when one event is fired. A lane later builds its callback's snapshot from the captured values.

    Args:
        event: the event's name; None outside events.
        needs: the callback's `snapshot_fields`; empty for the fields that need no copy.
        by: the callback's name, for its requests.
        inbox: receives the callback's messages.
        numbers: copies scalars from the device to the host; all captures of the event share this object.
    """

    def __init__(self, event: str | None, needs: tuple[str, ...], by: str, inbox: Inbox, numbers: DeviceNumbers) -> None:
        available = fields_available(event) if event is not None else ()
        self._event = as_event(event) if event is not None else None
        self._is_last = self._event is Event.RUN_END  # only at `on_run_end` does `ctx.run` contain the run's outcome
        self._by, self._inbox, self._numbers = by, inbox, numbers
        wanted = [
            name
            for name in dict.fromkeys(needs or _DEFAULT_FIELDS)
            if name not in (*FIELDS_NOT_IN_LANES, "event", "run", "state", "step", "epoch", "control")
        ]
        self._names = tuple(name for name in wanted if name in available or name in ALWAYS_AVAILABLE)
        self._changing = tuple(
            place for place, name in enumerate(self._names, _FIRST_FIELD_PLACE) if name not in _UNCHANGING_FIELDS
        )
        numbers.names.update(name for name in self._names if name not in _UNCHANGING_FIELDS)
        self._state: TrainState | None = None  # the `TrainState` for which the snapshot class `_kind` is valid
        self._kind: type[Snapshot] = Snapshot
        new = tuple(place for place, name in enumerate(self._names, _FIRST_FIELD_PLACE) if name in _NEW_FIELDS)
        self._functions = _compile_functions(self._names, self._changing, new)

    def enqueuer(
        self, deliver: Deliver, registration: Registration, queue: Lane, otherwise: Callable[[Context], object]
    ) -> Callable[[Context], None]:
        """Return the function with which the training thread puts the event into the queue of the callback's lane (thread).

        Args:
            deliver: the first element of the tuple that is put into the queue; the lane calls it with the whole tuple.
            registration: the callback, which receives nothing while it is switched off.
            queue: the callback's lane.
            otherwise: called instead if a value must be copied, a field is not available, or the callback is switched off.
        """
        enqueue: Callable[[Context], None] = self._functions["enqueuer"](
            self.snapshot_class_for, deliver, registration, queue, otherwise
        )
        return enqueue

    def deliverer(
        self,
        event: str,
        registration: Registration,
        handler: Callable[[Snapshot], Any],
        await_answer: Callable[[Any], None],
        fails: Callable[[Snapshot, BaseException], None],
    ) -> Deliver:
        """Return a function that builds a snapshot from the captured values and calls the handler with it. It runs on the lane's thread.

        Args:
            event: the event or logger method; nothing is delivered if the callback is disabled or muted for it.
            registration: the callback, whose failures are counted.
            handler: called with the snapshot.
            await_answer: called with what the handler returns, unless that is None.
            fails: called with the snapshot, which may be incomplete, and the error.
        """
        deliver: Deliver = self._functions["deliverer"](self, event, registration, handler, await_answer, fails)
        return deliver

    def take(self, deliver: Deliver, ctx: Context) -> Values:
        """Capture the fields, and copy values that may change later. The training thread calls this method."""
        always = [getattr(ctx.state, name) for name in _STATE_ATTRIBUTES]
        fields = [getattr(ctx, name) if ctx.has(name) else _UNAVAILABLE for name in self._names]
        values = [deliver, self.snapshot_class_for(ctx)[0], ctx.step, ctx.epoch, *always, *fields]
        numbers = self._numbers.of(ctx, self)
        for place in self._changing:
            values[place] = copy_value(values[place], numbers)
        return values

    def resolve_pending(self, values: Values) -> Values:
        """Wait for the copies from the device, and return the captured values with every `Pending` scalar replaced by its tensor."""
        return (*values[:_FIRST_FIELD_PLACE], *map(_resolve_pending, values[_FIRST_FIELD_PLACE:]))

    def drop_unavailable(self, made: Snapshot) -> None:
        """Delete from a snapshot the fields that were not available when the event was fired."""
        for name in self._names:
            if getattr(made, name) is _UNAVAILABLE:
                delattr(made, name)

    def snapshot_class_for(self, ctx: Context) -> tuple[type[Snapshot], TrainState | None]:
        """Return the class for snapshots of this run, and the `TrainState` from which the class was made.

        The caller may use the class again as long as `ctx.state` is the returned `TrainState`. If None is returned instead of a
        `TrainState`, the caller may use the class only once.
        """
        if self._state is None or self._state is not ctx.state:
            # `LaneControl` has only the requests that a callback in a lane (another thread) may make.
            control = LaneControl(ctx.control, self._inbox, self._by)
            self._kind = Snapshot.of_run(control, self._event, copy.copy(ctx.run))
            self._state = ctx.state if not self._is_last else None
        return self._kind, self._state


@functools.cache
def _compile_functions(names: tuple[str, ...], changing: tuple[int, ...], new: tuple[int, ...]) -> dict[str, Callable[..., Any]]:
    """Compile the functions that `SnapshotCapture.enqueuer` and `SnapshotCapture.deliverer` return, for these fields.

    Args:
        names: the fields to capture.
        changing: the indices at which a value may change later, and must be copied unless it is a plain value such as a number.
        new: the indices of fields that need no copy if the loop makes new tensors for them, on the CPU and without autograd graph.

    The functions are generated because both run for every event in a lane, and loops over the names cost more
    (`benchmarks/results/shortcuts.md`). The source contains only names from the lifecycle's table.
    """
    of_state = [f"state.{name}" for name in _STATE_ATTRIBUTES]
    taken = ["ctx.step", "ctx.epoch", *of_state, *(f"ctx.{name}" for name in names)]
    filled = ["made.step", "made.epoch", *of_state, *(f"made.{name}" for name in names)]
    is_new = {place: f" and not (are_new and is_lone(values[{place}]))" for place in new}
    are_changing = "".join(f" or type(values[{place}]) not in plain{is_new.get(place, '')}" for place in changing)
    source = f"""
def enqueuer(snapshot_class_for, deliver, registration, queue, otherwise):
    items, append, kind, known, are_new = queue.items, queue.items.append, None, None, False
    def enqueue(ctx):
        nonlocal kind, known, are_new
        try:
            state = ctx.state
            if state is not known:
                kind, known = snapshot_class_for(ctx)
                are_new = ctx.loss_is_new
            values = (deliver, kind, {", ".join(taken)})
        except FieldNotAvailable:
            return otherwise(ctx)
        if registration.is_off{are_changing}:
            otherwise(ctx)
        elif len(items) < queue.room:
            append(values)
        else:
            queue.put(values)
    return enqueue

def deliverer(capture, event, registration, handler, await_answer, fails):
    def deliver(values):
        if registration.is_off and registration.is_silent_at(event):
            return
        made = new(values[1])
        try:
            made.state = state = new(TrainState)
            if type(values) is tuple:
                _, _, {", ".join(filled)} = values
            else:
                _, _, made.step, made.epoch, *_ = values  # the report of a failed copy reads these
                _, _, {", ".join(filled)} = capture.resolve_pending(values)
                capture.drop_unavailable(made)
            if (answer := handler(made)) is not None:
                await_answer(answer)
        except BaseException as error:
            fails(made, error)
        else:
            if registration.failures_in_a_row:  # an unneeded write would slow down the training thread's next read
                registration.failures_in_a_row = 0
    return deliver
"""
    scope: dict[str, Any] = {
        "plain": _PLAIN_TYPES, "FieldNotAvailable": FieldNotAvailable, "new": object.__new__, "TrainState": TrainState,
        "is_lone": _is_lone,
    }  # fmt: skip
    exec(source, scope)
    return scope


def _is_lone(value: Any) -> bool:
    """Return whether a snapshot can hold the tensor without a copy, because it is on the CPU and has no autograd graph."""
    return value.is_cpu and not value.requires_grad


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _collect(value: Any, scalars: list[Any]) -> None:
    """Append the scalar tensors in `value`, also those in nested containers, to `scalars`."""
    if _is_tensor(value):
        if value.numel() == 1:
            scalars.append(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            _collect(each, scalars)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _collect(each, scalars)


def copy_value(value: Any, scalars: Mapping[int, Any]) -> Any:
    """Return `value` with its containers and tensors copied. Other objects are copied with `copy.deepcopy`, their tensors detached."""
    if type(value) in _PLAIN_TYPES or value is _UNAVAILABLE:
        return value
    if _is_tensor(value):
        return scalars[id(value)] if id(value) in scalars else value.detach().clone()
    if isinstance(value, Mapping):
        return _mapping_like(value, {name: copy_value(each, scalars) for name, each in value.items()})
    if type(value) is list or isinstance(value, tuple):
        return _sequence_like(value, [copy_value(each, scalars) for each in value])
    try:
        return copy.deepcopy(value)
    except RuntimeError:  # torch does not copy a tensor that has an autograd graph
        detached: dict[int, Any] = {}
        _detach_all(value, detached, set())
        return copy.deepcopy(value, detached)


def _mapping_like(value: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping with these items: of the type of `value` if it is a dataclass, a `UserDict` or a `defaultdict`, otherwise a dict."""
    if is_dataclass(value):  # Hugging Face's ModelOutput is a dataclass
        kind: Any = type(value)
        return kind(**items)
    if isinstance(value, UserDict):  # such as Hugging Face's BatchEncoding
        made = copy.copy(value)
        made.data = items
        return made
    # For other types, return a dict: their constructors may not accept items, and a copy may share its items with the original.
    return defaultdict(value.default_factory, items) if type(value) is defaultdict else items


def _sequence_like(value: Any, items: list[Any]) -> Any:
    """Return a list or a tuple of the type of `value` with these items."""
    if type(value) is list:
        return items
    try:
        return tuple.__new__(type(value), items)  # not the constructor, which takes other arguments in a named tuple
    except TypeError:  # `tuple.__new__` makes no types that are implemented in C, such as `torch.Size` and `torch.return_types`
        return type(value)(items)


def _detach_all(value: Any, found: dict[int, Any], seen: set[int]) -> None:
    """Add a detached copy of every tensor in an object to `found`, by the tensor's `id`. `seen` has the ids of visited objects."""
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if _is_tensor(value):
        found[id(value)] = value.detach().clone()
        return
    parts = [*value.values()] if isinstance(value, Mapping) else [*value] if isinstance(value, list | tuple | set) else []
    parts += getattr(value, "__dict__", {}).values()
    parts += [getattr(value, each.name, None) for each in fields(value)] if is_dataclass(value) else []
    for each in parts:
        _detach_all(each, found, seen)


def _resolve_pending(value: Any) -> Any:
    """Wait for the copies from the device, and return `value` with every `Pending` scalar replaced by its tensor."""
    if type(value) is Pending:
        return value.read()
    if isinstance(value, Mapping):
        return _mapping_like(value, {name: _resolve_pending(each) for name, each in value.items()})
    if type(value) is list or isinstance(value, tuple):
        return _sequence_like(value, [_resolve_pending(each) for each in value])
    return value
