"""The learning rate of every parameter group."""

from __future__ import annotations

from typing import Any

from callsheet.callback import Callback
from callsheet.context import Context

_RECORDED = "train/learning_rate"  # of every record of training: the first group's


class LRMonitor(Callback):
    """Add the learning rate of every parameter group to every record.

    Adds `lr/<optimizer class>/<group>`, where `<group>` is the group's `name`, or its index: the rate that the last step before the
    record used, the same on every rank.
    """

    def __init__(self) -> None:
        self._rates: list[Any] = []
        self._told_at = 0  # the step of the last record that was told them

    def on_train_start(self, ctx: Context) -> None:
        """What an earlier run has told does not count."""
        self._told_at = ctx.step

    def on_optimizer_step_end(self, ctx: Context) -> None:
        """Keep the rates of several groups, before the scheduler moves on. A tensor it would overwrite where it stands."""
        groups = ctx.optimizer.param_groups
        if len(groups) == 1:
            ctx.mute(self, "on_optimizer_step_end")  # the record says it
            return
        self._rates = [
            rate if type(rate := group["lr"]) is float or not hasattr(rate, "clone") else rate.clone() for group in groups
        ]

    def on_log(self, ctx: Context) -> None:
        """Add them to the record that is being told."""
        groups, values = ctx.optimizer.param_groups, ctx.record.values
        rates, self._rates = self._rates, []  # none are left for an evaluation's record
        if len(groups) > 1:
            ctx.unmute(self, "on_optimizer_step_end")  # there may have been one until now
        if not rates and _RECORDED in values and ctx.step != self._told_at:  # else nothing was trained since
            rates = [values[_RECORDED]]
        if rates:
            self._told_at = ctx.step
        for i, (group, rate) in enumerate(zip(groups, rates, strict=False)):
            values[f"lr/{type(ctx.optimizer).__name__}/{group.get('name', i)}"] = float(rate)
