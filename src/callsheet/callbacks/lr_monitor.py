"""Logs the learning rate of every parameter group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.core.callback import Callback
from callsheet.core.context import Context

_LEARNING_RATE_METRIC = "train/learning_rate"  # metric of every training record: the learning rate of the first parameter group


class LRMonitor(Callback):
    """Add the learning rate of every parameter group to every metrics record.

    It adds `lr/<optimizer class>/<group>`, where `<group>` is the group's `name` or its index. The value, which is the same on
    every rank, is the rate of the last step before the record.
    """

    required_fields = ("optimizer",)

    def __init__(self) -> None:
        self._rates: list[Any] = []
        self._last_step = 0  # the step of the last record to which rates were added
        self._is_resumed = False

    def on_train_start(self, ctx: Context) -> None:
        """Store the step at which training starts. Learning rates are added only to metrics records of later steps."""
        if not self._is_resumed:
            self._last_step = ctx.step
        self._is_resumed = False

    def on_optimizer_step_end(self, ctx: Context) -> None:
        """Store the learning rates of this step. A rate that is a tensor is copied, because the scheduler changes it in place."""
        groups = ctx.optimizer.param_groups
        if len(groups) == 1:
            # If there is only one group, every training record already has the group's rate as `train/learning_rate`.
            ctx.mute(self, "on_optimizer_step_end")
            return
        self._rates = [
            rate if type(rate := group.get("lr")) is float or not hasattr(rate, "clone") else rate.clone() for group in groups
        ]

    def on_log(self, ctx: Context) -> None:
        groups, values = ctx.optimizer.param_groups, ctx.record.values
        rates, self._rates = self._rates, []  # clear the rates, so that the record of an evaluation gets none
        if len(groups) > 1:
            ctx.unmute(self, "on_optimizer_step_end")  # the handler was muted while the optimizer had only one group
        # If no step was trained since the last record, the new record is about an evaluation, so it gets no rate.
        if not rates and _LEARNING_RATE_METRIC in values and ctx.step != self._last_step:
            rates = [values[_LEARNING_RATE_METRIC]]
        if rates:
            self._last_step = ctx.step
        names = (f"lr/{type(ctx.optimizer).__name__}/{group.get('name', i)}" for i, group in enumerate(groups))
        ctx.log({name: rate for name, rate in zip(names, rates, strict=False) if rate is not None}, across="same")

    def state_dict(self) -> Mapping[str, Any]:
        """Return the learning rates of the last step, and the step of the last record that has rates, for a resumed run."""
        return {"rates": [None if rate is None else float(rate) for rate in self._rates], "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates, self._last_step, self._is_resumed = list(state["rates"]), state["last_step"], True
