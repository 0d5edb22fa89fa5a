"""Stops training when a metric reaches a value."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from callsheet.callbacks.early_stopper import find_result
from callsheet.callbacks.support.metric_mode import ModeOrAuto, is_lower_better
from callsheet.core.callback import Callback, label_of, one_of
from callsheet.core.context import Context
from callsheet.errors import ConfigError, did_you_mean

logger = logging.getLogger("callsheet")

Records = Literal["all", "epoch", "none"]
RECORD_CHOICES: tuple[Records, ...] = get_args(Records)


class ThresholdStopper(Callback):
    """Stop training, on all ranks together, when a metric of a record or an evaluation reaches a value.

    The values that are compared are those that the loggers receive, reduced over the ranks. NaN never reaches the threshold. In
    mode `"max"` plus infinity reaches it, in mode `"min"` minus infinity does. Evaluations outside training are ignored. If a run
    that this callback stopped is resumed, the callback stops it again before its first step; change the threshold to continue it.
    To use several stoppers, give each its own `name`.

    Args:
        monitor: a name in the records, such as `"train/loss"`, or `<dataset>/<metric>` of the evaluation.
        threshold: the value; a metric that equals it has reached it.
        mode: `"min"` stops at or below the threshold, `"max"` at or above it. `"auto"` is `"min"` if the name contains loss, error or
            perplexity, otherwise `"max"`, as in Composer.
        records: which records are compared. `"all"`: those of every log boundary. `"epoch"`: the last one before an epoch's end
            that has the metric. `"none"`: none. Evaluations are always compared.

    Raises:
        ConfigError: an argument is invalid, or an evaluation of the dataset does not have the metric.
    """

    phase = "decide"
    collective = True  # every rank makes the same stop requests
    requests = ("stop",)

    def __init__(self, *, monitor: str, threshold: float, mode: ModeOrAuto = "auto", records: Records = "all") -> None:
        if not monitor:
            raise ConfigError("monitor='': name a metric, such as 'validation/accuracy' or 'train/loss'")
        if not math.isfinite(threshold):
            raise ConfigError(f"threshold={threshold!r}: give a finite number")
        self._is_min = is_lower_better(mode, monitor)
        self._records = one_of("records", records, RECORD_CHOICES)
        self._monitor = monitor
        self._threshold = threshold
        self._begin()

    def _begin(self) -> None:
        self._is_training = self._is_resumed = False
        self._last: float | None = None  # value of the monitored metric in the last record that has it
        self._reached: float | None = None  # value of the monitored metric that stopped the run
        # Names of the metrics logged so far, for a warning if `monitor` is not among them. None if no warning is needed.
        self._other_metrics: set[str] | None = set()

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run."""
        self._begin()

    def on_train_start(self, ctx: Context) -> None:
        """Request the stop again if this callback already stopped the run before the run was resumed."""
        self._is_training = True
        is_resumed, self._is_resumed = self._is_resumed, False
        if is_resumed and self._reached is not None:
            self._stop_if_reached(ctx, self._reached)

    def on_log(self, ctx: Context) -> None:
        """Compare the metric's value with the threshold or, if `records` is "epoch", store it until the epoch's end."""
        value = ctx.record.values.get(self._monitor)
        self._note(ctx.record.values, value)
        if value is not None and self._is_training:
            self._last = value
            if self._records == "all":
                self._stop_if_reached(ctx, value)

    def on_eval_all_end(self, ctx: Context) -> None:
        if ctx.standalone or not self._is_training:
            return
        value = find_result(ctx, self._monitor)
        self._note([f"{name}/{metric}" for name, result in ctx.eval_results.items() for metric in result], value)
        if value is not None:
            self._stop_if_reached(ctx, value)

    def on_epoch_end(self, ctx: Context) -> None:
        """Compare the epoch's last value with the threshold if `records` is "epoch". Warn if nothing logged the metric so far."""
        if self._records == "epoch" and self._last is not None:
            self._stop_if_reached(ctx, self._last)
        if self._other_metrics:
            near = did_you_mean(self._monitor, self._other_metrics)
            logged = ", ".join(sorted(self._other_metrics))
            logger.warning(
                "%s: no record or evaluation has had the metric %r so far%s (logged: %s)",
                label_of(self),
                self._monitor,
                near,
                logged,
            )
            self._other_metrics = None

    def on_train_end(self, ctx: Context) -> None:
        """Record that training has ended, so that later evaluations are ignored."""
        self._is_training = False

    def _note(self, names: Any, value: float | None) -> None:
        if value is not None:
            self._other_metrics = None
        elif self._other_metrics is not None:
            self._other_metrics.update(names)

    def _stop_if_reached(self, ctx: Context, value: float) -> None:
        if not (value <= self._threshold if self._is_min else value >= self._threshold) or ctx.state.is_complete:
            return
        self._reached = value
        side = "at or below" if self._is_min else "at or above"
        ctx.control.stop(f"{self._monitor} is {value:g}, {side} the threshold {self._threshold:g}", replicated=True)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the metric's value in the last record, and the value that stopped the run."""
        return {"last": self._last, "reached": self._reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last, self._reached = state["last"], state["reached"]
        self._is_resumed = True
