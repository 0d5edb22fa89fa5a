"""A callback that writes down what it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from callsheet.callback import Callback, one_of
from callsheet.context import Context
from callsheet.lifecycle import ALWAYS, FIELDS


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event as it was told: the step in hand, the completed batches, and the fields of windows that could be read."""

    event: str
    step: int
    epoch: int
    batch: int
    fields: frozenset[str]


class Recorder(Callback):
    """Records every event; `callsheet.testing.check_events(recorder.events)` holds them against the lifecycle's grammar.

    Args:
        fields: names of fields whose values to keep, in `values`: by field, a list of (event, value) where it could be read.
    """

    phase = "report"

    def __init__(self, *, fields: tuple[str, ...] = ()) -> None:
        for name in fields:
            one_of("field", name, tuple(FIELDS))
        self.told: list[RecordedEvent] = []
        self.values: dict[str, list[tuple[str, Any]]] = {name: [] for name in fields}

    @property
    def events(self) -> list[str]:
        """The names of the events, in the order in which they were told."""
        return [told.event for told in self.told]

    def on_event(self, ctx: Context) -> None:
        """Write the event down."""
        readable = frozenset(name for name in FIELDS if name not in ALWAYS and ctx.has(name))
        self.told.append(RecordedEvent(str(ctx.event), ctx.step, ctx.epoch, ctx.state.timestamp.batch, readable))
        for name, values in self.values.items():
            if ctx.has(name):
                values.append((str(ctx.event), getattr(ctx, name)))
