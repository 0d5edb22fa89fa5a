"""The learning rate of every parameter group."""

from __future__ import annotations

from typing import Any

from callsheet.callback import Callback
from callsheet.context import Context


class LRMonitor(Callback):
    """Add the learning rate of every parameter group to every record.

    Adds `lr/<optimizer class>/<group>`, where `<group>` is the group's `name`, or its index: the rate that the last step before the
    record used, the same on every rank.
    """

    def __init__(self) -> None:
        self._rates: list[Any] = []

    def on_optimizer_step_end(self, ctx: Context) -> None:
        """Keep the rates, before the scheduler moves on. A tensor it would overwrite where it stands."""
        self._rates = [
            rate if type(rate := group["lr"]) is float or not hasattr(rate, "clone") else rate.clone()
            for group in ctx.optimizer.param_groups
        ]

    def on_log(self, ctx: Context) -> None:
        """Add them to the record that is being told."""
        rates, self._rates = self._rates, []  # none are left for an evaluation's record
        for i, (group, rate) in enumerate(zip(ctx.optimizer.param_groups, rates, strict=False)):
            ctx.record.values[f"lr/{type(ctx.optimizer).__name__}/{group.get('name', i)}"] = float(rate)
