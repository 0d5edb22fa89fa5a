"""The callbacks that observe a script by default."""

from __future__ import annotations

from torch import nn

from callsheet.callbacks import (
    HangDetector,
    LRMonitor,
    MemoryMonitor,
    NaNMonitor,
    OptimizerMonitor,
    SpeedMonitor,
    SystemMetricsMonitor,
)
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.loggers import JSONLLogger


class GradientNorm(OptimizerMonitor):
    """Log `l2_norm/grad/global` at the log interval. Sharded gradients are left out, since their norm needs all ranks."""

    collective = False

    def __init__(self, interval: int) -> None:
        super().__init__(batch_log_interval=interval, per_parameter=False, log_optimizer_metrics=False)

    def on_train_start(self, ctx: Context) -> None:
        """Stay silent if a parameter is sharded."""
        super().on_train_start(ctx)
        if any(hasattr(each, "placements") or hasattr(each, "_is_flat_param") for each in nn.Module.parameters(ctx.model)):
            ctx.mute(self, "on_forward_backward_end")


def default_observers(log_interval: int) -> list[Callback]:
    """Return new callbacks that only observe, and that no loop needs to support specially.

    Args:
        log_interval: how many steps there are from one metrics record to the next.
    """
    return [
        SpeedMonitor(count_flops=False),
        MemoryMonitor(),
        LRMonitor(),
        GradientNorm(log_interval),
        NaNMonitor(action="warn"),
        HangDetector(min_seconds=600),  # scripts save and evaluate between steps, which callsheet does not see
        SystemMetricsMonitor(),
        JSONLLogger(),
    ]
