"""The callbacks with which `callsheet exec` observes a script by default."""

from __future__ import annotations

import logging
import math
import sys

from torch import nn

from callsheet.callbacks import (
    HangDetector,
    LRMonitor,
    MemoryMonitor,
    OptimizerMonitor,
    SpeedMonitor,
    SystemMetricsMonitor,
)
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.exec.log_pace import LogPace
from callsheet.loggers import JSONLLogger

logger = logging.getLogger("callsheet")


class GradientNorm(OptimizerMonitor):
    """Log the global gradient norm at the log interval. If a parameter is sharded, log nothing, because the norm would need all ranks.

    Args:
        pace: the log interval.
    """

    collective = False

    def __init__(self, pace: LogPace) -> None:
        super().__init__(batch_log_interval=pace.steps, per_parameter=False, log_optimizer_metrics=False)
        self._pace = pace

    def on_train_start(self, ctx: Context) -> None:
        """If a parameter is sharded, stop calling the handler that logs the gradient norm."""
        super().on_train_start(ctx)
        if any(map(_is_sharded, nn.Module.parameters(ctx.model))):
            ctx.mute(self, "on_forward_backward_end")

    def on_forward_backward_end(self, ctx: Context) -> None:
        """If a metrics record is made after this step, log the gradient norm. Then skip this handler until the step of the next record."""
        self._interval = self._pace.steps
        super().on_forward_backward_end(ctx)
        if not ctx.step % self._interval:
            ctx.mute(self, "on_forward_backward_end", until=ctx.step + self._interval)

    def on_log(self, ctx: Context) -> None:
        """Unmute the handler that logs the gradient norm, if metrics records have become more frequent since it was muted."""
        if self._pace.steps < self._interval:
            self._interval = self._pace.steps
            ctx.unmute(self, "on_forward_backward_end")


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Return whether this rank has only a part of the parameter: it is a DTensor, or a flat parameter of FSDP's first version."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # None if it was not imported: then no parameter is a `FlatParameter`
    return hasattr(parameter, "placements") or (fsdp is not None and isinstance(parameter, fsdp.FlatParameter))


class LossCheck(Callback):
    """Log an error, once, when the mean loss of a metrics record is NaN or infinite.

    Unlike `NaNMonitor`, it does not check single steps, so no handler is called in the steps between two records.
    """

    phase = "decide"
    ranks = "zero"

    def __init__(self) -> None:
        self._checked = 0  # step of the last metrics record that had a loss
        self._has_warned = False

    def on_log(self, ctx: Context) -> None:
        loss = ctx.record.values.get("train/loss")
        if loss is None:
            return
        if not math.isfinite(loss) and not self._has_warned:
            self._has_warned = True
            logger.error("LossCheck: the mean loss of steps %d to %d is %s", self._checked + 1, ctx.step, loss)
        self._checked = ctx.step


def default_observers(pace: LogPace) -> list[Callback]:
    """Return new instances of the default callbacks. These callbacks only observe, and they work in every loop.

    Args:
        pace: the log interval.
    """
    return [
        SpeedMonitor(count_flops=False),
        MemoryMonitor(),
        LRMonitor(),
        GradientNorm(pace),
        LossCheck(),
        HangDetector(min_seconds=600),  # long, because callsheet does not notice if a script saves or evaluates between steps
        SystemMetricsMonitor(),
        JSONLLogger(),
    ]
