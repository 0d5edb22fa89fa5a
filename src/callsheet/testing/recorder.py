"""A callback that records the events of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from callsheet.core.callback import Callback, one_of
from callsheet.core.context import Context
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, FIELDS


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event that a `Recorder` has recorded.

    Attributes:
        event: the name of the event.
        step: the value of `ctx.step`.
        epoch: the value of `ctx.epoch`.
        batch: the number of completed steps.
        fields: the names of the fields that were available, without those that always are.
    """

    event: str
    step: int
    epoch: int
    batch: int
    fields: frozenset[str]


class Recorder(Callback):
    """A callback that records all events of a run, for example to check their order with `callsheet.testing.check_events`.

    Args:
        fields: names of fields whose values to keep in `values`: for each field a list of (event, value) where it was available.

    Raises:
        ConfigError: there is no such field.
    """

    phase = "report"

    def __init__(self, *, fields: tuple[str, ...] = ()) -> None:
        for name in fields:
            one_of("field", name, tuple(FIELDS))
        self.recorded: list[RecordedEvent] = []
        self.values: dict[str, list[tuple[str, Any]]] = {name: [] for name in fields}

    @property
    def events(self) -> list[str]:
        """The names of the recorded events, in the order in which they were fired."""
        return [each.event for each in self.recorded]

    def on_event(self, ctx: Context) -> None:
        readable = frozenset(name for name in FIELDS if name not in ALWAYS_AVAILABLE and ctx.has(name))
        self.recorded.append(RecordedEvent(str(ctx.event), ctx.step, ctx.epoch, ctx.state.timestamp.batch, readable))
        for name, values in self.values.items():
            if ctx.has(name):
                values.append((str(ctx.event), getattr(ctx, name)))
