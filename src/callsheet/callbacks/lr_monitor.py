"""The learning rate of every parameter group."""

from __future__ import annotations

from callsheet.callback import Callback
from callsheet.context import Context


class LRMonitor(Callback):
    """Log the learning rate of every parameter group.

    Logs `lr/<optimizer class>/<group>`, where `<group>` is the group's `name`, or its index: the rate that the step used, the same on
    every rank. A record holds the rate of its last step.
    """

    def on_optimizer_step_end(self, ctx: Context) -> None:
        """Log the rates, before the scheduler moves on."""
        kind = type(ctx.optimizer).__name__
        rates = {f"lr/{kind}/{group.get('name', i)}": group["lr"] for i, group in enumerate(ctx.optimizer.param_groups)}
        for name, rate in rates.items():
            if hasattr(rate, "clone"):  # a tensor (capturable optimizers), which the scheduler overwrites where it stands
                rates[name] = rate.clone()
        ctx.log(rates, across="same")
