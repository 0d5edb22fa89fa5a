"""Detects sudden jumps of the loss."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal, get_args

from callsheet.core.callback import Callback, label_of, one_of
from callsheet.core.context import Context
from callsheet.core.control import RequestName
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

Action = Literal["warn", "save", "stop"]
ACTIONS: tuple[Action, ...] = get_args(Action)

_STD_PER_MAD = 1.4826  # standard deviation / median absolute deviation of a normal distribution
_MIN_RELATIVE_SPREAD = 0.001  # lower bound of spread / median, so that a tiny change after constant losses is no spike


class LossSpikeDetector(Callback):
    """Detect a loss far above its recent values, and then warn, save a checkpoint or stop. The weights are not changed.

    The loss of every metrics record (the mean since the previous record) is compared with the losses of the last `window`
    records. The loss is a spike if it is more than `threshold` robust standard deviations above their median. A robust standard
    deviation is 1.4826 times the median absolute deviation (Iglewicz and Hoaglin, 1993). So a spike in the window does not hide
    the next one, and after a lasting change of the loss, the new level counts as normal within half a window. A NaN or infinite
    loss is always a spike, and is not kept in the window. All ranks see the same record and act the same way.

    Each record gets `loss_spike/count`, the number of spikes so far. Once the window is half full, a record also gets
    `loss_spike/score`: by how many robust standard deviations the loss is above the median (negative if below). The window and
    the count survive a resume. If the detector has a `name`, the name is used instead of `loss_spike`.

    Args:
        monitor: the record's metric to watch.
        window: the number of earlier records to compare with.
        threshold: how many deviations above the median make a spike.
        action: `"warn"` logs a warning; `"save"` also saves a checkpoint, which is never deleted; `"stop"` also stops training.

    Raises:
        ConfigError: an argument is invalid.
    """

    phase = "decide"
    collective = True  # every rank makes the same requests
    requests: tuple[RequestName, ...] = ("stop", "save")

    def __init__(
        self, *, monitor: str = "train/loss", window: int = 50, threshold: float = 10.0, action: Action = "warn"
    ) -> None:
        if window < 4:
            raise ConfigError(f"window={window}: give at least 4 records")
        if not (math.isfinite(threshold) and threshold > 0):
            raise ConfigError(f"threshold={threshold!r}: give a number of deviations above 0")
        self._action = one_of("action", action, ACTIONS)
        if action == "warn":
            self.requests = ()
        self._monitor = monitor
        self._threshold = threshold
        self._window: deque[float] = deque(maxlen=window)
        self._count = 0

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run."""
        self._window.clear()
        self._count = 0

    def on_log(self, ctx: Context) -> None:
        """Compare the loss with its recent values. If it is far above them, warn, save or stop."""
        loss = ctx.record.values.get(self._monitor)
        if loss is None:
            return
        family = self.name or "loss_spike"
        score = self._score(loss)
        if math.isfinite(loss):
            self._window.append(loss)
        if score is not None and score > self._threshold:
            self._count += 1
            self._act(ctx, loss)
        scores = {f"{family}/score": score} if score is not None and math.isfinite(score) else {}
        ctx.log({**scores, f"{family}/count": self._count}, across="same")

    def _score(self, loss: float) -> float | None:
        if not math.isfinite(loss):
            return math.inf
        if 2 * len(self._window) < (self._window.maxlen or 0):
            return None
        middle = median(self._window)
        spread = max(_STD_PER_MAD * median(abs(each - middle) for each in self._window), _MIN_RELATIVE_SPREAD * abs(middle))
        return (loss - middle) / spread if spread else math.copysign(math.inf, loss) if loss else 0.0

    def _act(self, ctx: Context, loss: float) -> None:
        usual = f", where {median(self._window):.4g} is usual" if self._window else ""
        why = f"{self._monitor} jumped to {loss:.4g} at step {ctx.step}{usual}"
        if ctx.run.is_world_process_zero:
            logger.warning("%s: %s", label_of(self), why)
        if self._action == "save":
            ctx.control.save(why, replicated=True)
        elif self._action == "stop" and not ctx.state.is_complete:
            ctx.control.stop(why, replicated=True)

    def state_dict(self) -> Mapping[str, Any]:
        return {"window": list(self._window), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._window = deque(state["window"], maxlen=self._window.maxlen)
        self._count = state["count"]
