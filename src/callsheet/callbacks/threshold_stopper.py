"""Training ends when a metric reaches a value."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from callsheet.callback import Callback, label_of, one_of
from callsheet.callbacks.early_stopper import evaluated
from callsheet.context import Context
from callsheet.errors import ConfigError, did_you_mean

logger = logging.getLogger("callsheet")

RECORDS = ("all", "epoch", "none")


class ThresholdStopper(Callback):
    """Stop training, on all ranks together, when a metric of a record or of an evaluation reaches a value.

    What is compared has been reduced over the ranks, and is what the loggers see. NaN reaches nothing; an infinity reaches what lies on
    its side. Evaluations by hand decide nothing. A run that is resumed from where it was stopped ends before its first step, unless the
    threshold has moved. Several stand side by side if each has a `name` of its own.

    Args:
        monitor: a name in the records, such as `"train/loss"`, or `<dataset>/<metric>` of the evaluation.
        threshold: the value; reached is also to be equal to it.
        mode: `"min"` stops at or below the threshold, `"max"` at or above it. `"auto"` is `"min"` for a name with loss, error or
            perplexity in it, else `"max"`, as Composer has it.
        records: which records are compared: `"all"`, those of every log boundary; `"epoch"`, the last that told the metric before an
            epoch's end; `"none"`. Evaluations always are.

    Raises:
        ConfigError: an argument that cannot work; at an evaluation that has the dataset, when nothing tells the metric.
    """

    phase = "decide"
    collective = True  # it asks on behalf of all ranks

    def __init__(self, *, monitor: str, threshold: float, mode: str = "auto", records: str = "all") -> None:
        if not monitor:
            raise ConfigError("monitor='': name a metric, such as 'validation/accuracy' or 'train/loss'")
        if not math.isfinite(threshold):
            raise ConfigError(f"threshold={threshold!r}: give a finite number")
        falls = any(word in monitor.lower() for word in ("loss", "error", "perplexity"))
        self._is_min = {"min": True, "max": False, "auto": falls}[one_of("mode", mode, ("auto", "min", "max"))]
        self._records = one_of("records", records, RECORDS)
        self._monitor = monitor
        self._threshold = threshold
        self._begin()

    def _begin(self) -> None:
        self._is_training = self._is_resumed = False
        self._last: float | None = None  # of the records
        self._reached: float | None = None  # with which value it was stopped
        self._told: set[str] | None = set()  # until the metric has been told, or somebody warned

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Forget an earlier run."""
        self._begin()

    def on_train_start(self, ctx: Context) -> None:
        """A run that was stopped before it was resumed has nothing left to train."""
        self._is_training = True
        is_resumed, self._is_resumed = self._is_resumed, False
        if is_resumed and self._reached is not None:
            self._look(ctx, self._reached)

    def on_log(self, ctx: Context) -> None:
        """Compare what a record tells, if all are to be compared."""
        value = ctx.record.values.get(self._monitor)
        self._note(ctx.record.values, value)
        if value is not None and self._is_training:
            self._last = value
            if self._records == "all":
                self._look(ctx, value)

    def on_eval_all_end(self, ctx: Context) -> None:
        """Compare what an evaluation found."""
        if ctx.standalone or not self._is_training:
            return
        value = evaluated(ctx, self._monitor)
        self._note([f"{name}/{metric}" for name, result in ctx.eval_results.items() for metric in result], value)
        if value is not None:
            self._look(ctx, value)

    def on_epoch_end(self, ctx: Context) -> None:
        """Compare the epoch's last record; name a metric that nobody tells."""
        if self._records == "epoch" and self._last is not None:
            self._look(ctx, self._last)
        if self._told:
            near = did_you_mean(self._monitor, self._told)
            told = ", ".join(sorted(self._told))
            logger.warning(
                "%s waits for %r, which nothing has told so far%s (told: %s)", label_of(self), self._monitor, near, told
            )
            self._told = None

    def on_train_end(self, ctx: Context) -> None:
        """What is evaluated from here on decides nothing."""
        self._is_training = False

    def _note(self, names: Any, value: float | None) -> None:
        if value is not None:
            self._told = None
        elif self._told is not None:
            self._told.update(names)

    def _look(self, ctx: Context, value: float) -> None:
        if not (value <= self._threshold if self._is_min else value >= self._threshold) or ctx.state.is_complete:
            return
        self._reached = value
        side = "at or below" if self._is_min else "at or above"
        ctx.control.stop(f"{self._monitor} is {value:g}, {side} the threshold {self._threshold:g}", replicated=True)

    def state_dict(self) -> Mapping[str, Any]:
        """The last value of a record, and the one that stopped the run."""
        return {"last": self._last, "reached": self._reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._last, self._reached = state["last"], state["reached"]
        self._is_resumed = True
