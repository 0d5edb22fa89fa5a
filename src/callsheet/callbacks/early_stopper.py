"""Stops training when an evaluated metric no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from callsheet.callbacks.support.metric_mode import Mode, sign_of
from callsheet.core.callback import Callback, label_of, one_of
from callsheet.core.context import Context
from callsheet.core.time import Time, Timestamp, TimeUnit, elapsed_fraction
from callsheet.errors import ConfigError, did_you_mean

logger = logging.getLogger("callsheet")


class EarlyStopper(Callback):
    """Stop training, on all ranks together, when a metric of the evaluation has not improved for a while.

    A value is better if it is more than `min_delta` below the best value so far. With `mode="max"`, a value is better if it is
    more than `min_delta` above the best. NaN and infinity are never better, so they use up patience. Evaluations outside training
    are ignored, and so are evaluations that skipped the monitored dataset. The best value and the used part of the patience
    survive a resume. A run that is resumed after its patience ran out ends before its first step; raise `patience` to continue
    it. To use several stoppers, give each its own `name`.

    Args:
        monitor: `<dataset>/<metric>` of the evaluation, such as `"validation/loss"`.
        mode: whether the best is the `"min"` or the `"max"`.
        patience: a whole number means that the run stops after this many evaluations of the dataset in a row without improvement.
            A time, such as `"2ep"`, means that it stops at the first evaluation that is at least this long after the best one.
        min_delta: the smallest difference that counts as an improvement, in the metric's own unit.

    Raises:
        ConfigError: an argument is invalid, or an evaluation of the dataset does not have the metric.
    """

    phase = "decide"
    transport_ignore = ("_is_resumed",)
    collective = True  # every rank makes the same stop requests
    requests = ("stop",)

    def __init__(self, *, monitor: str, mode: Mode = "min", patience: int | str | Time = 3, min_delta: float = 0.0) -> None:
        self._monitor = _check_monitor(monitor)
        self._sign = sign_of(mode)
        self._patience = Time.parse(patience) if not isinstance(patience, int) else patience
        if isinstance(patience, bool) or (self._patience.value if isinstance(self._patience, Time) else self._patience) <= 0:
            raise ConfigError(f"patience={patience!r}: must be at least one evaluation, or a time such as '2ep'")
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise ConfigError(f"min_delta={min_delta!r}: must be 0 or more")
        self._min_delta = min_delta
        self._begin()

    def _begin(self) -> None:
        self._best = math.inf  # best value of `monitor` so far, multiplied by `_sign` so that lower is better
        self._waited = 0  # the number of evaluations in a row without improvement
        # `_best_at`: when the best value was measured or, if no value was finite so far, when the first value was measured.
        # `_seen_at`: when the last value was measured.
        self._best_at: Timestamp | None = None
        self._seen_at: Timestamp | None = None
        self._is_warned = self._is_resumed = False

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run."""
        self._begin()

    def on_train_start(self, ctx: Context) -> None:
        """Request the stop again if the patience had already run out before the run was resumed."""
        is_resumed, self._is_resumed = self._is_resumed, False
        if is_resumed and self._seen_at is not None and self._has_run_out(ctx):
            self._stop(ctx)
            if ctx.run.is_world_process_zero:
                logger.warning(
                    "%s: the patience had run out before the run was resumed at step %d, so no further step is taken. To train on, give a longer "
                    "patience, or remove the callback",
                    label_of(self),
                    ctx.step,
                )

    def on_eval_all_end(self, ctx: Context) -> None:
        """Compare the monitored value with the best so far, and stop if the patience has run out."""
        if ctx.standalone:  # ignore an evaluation that the user called directly, because it may use other data
            return
        value = find_result(ctx, self._monitor)
        if value is None:
            # `eval_results` is empty if a signal interrupted the evaluation. Do not warn about the missing metric then.
            if not self._is_warned and ctx.eval_results:
                self._is_warned = True
                _warn_of_absence(self, ctx, self._monitor)
            return
        score, now = self._sign * value, ctx.state.timestamp
        self._seen_at = now
        if math.isfinite(score) and score < self._best - self._min_delta:
            self._best, self._best_at, self._waited = score, now, 0
            return
        self._best_at = self._best_at or now
        self._waited += 1
        # If the run has reached its maximum duration, it ends anyway, so no request is needed.
        if self._has_run_out(ctx) and not ctx.state.is_complete:
            self._stop(ctx)

    def on_train_end(self, ctx: Context) -> None:
        """Warn if no evaluation had the monitored metric."""
        if self._seen_at is None and not self._is_warned and ctx.state.timestamp.batch > ctx.state.baseline.batch:
            logger.warning("%s: no evaluation of the whole run had the metric %r", label_of(self), self._monitor)

    def _has_run_out(self, ctx: Context) -> bool:
        if not isinstance(self._patience, Time):
            return self._waited >= self._patience
        assert self._best_at is not None
        assert self._seen_at is not None
        if self._waited == 0:
            return False
        if self._patience.unit is not TimeUnit.DURATION:
            return self._seen_at - self._patience >= self._best_at.get(self._patience.unit)
        since, now = (elapsed_fraction(at, ctx.state.max_duration) for at in (self._best_at, self._seen_at))
        return since is not None and now is not None and now - since >= self._patience.value

    def _stop(self, ctx: Context) -> None:
        evaluations = "1 evaluation" if self._waited == 1 else f"{self._waited} evaluations"
        best = (
            f"{self._monitor} = {self._sign * self._best:g}"
            if math.isfinite(self._best)
            else f"{self._monitor}, which was never finite,"
        )
        more = f" by more than {self._min_delta:g}" if self._min_delta else ""
        why = f"no improvement on {best}{more} in {evaluations}"
        ctx.control.stop(why, replicated=True)

    def state_dict(self) -> Mapping[str, Any]:
        times = {"best_at": self._best_at, "seen_at": self._seen_at}
        return {
            "best": self._best,
            "waited": self._waited,
            **{name: at.to_dict() if at is not None else None for name, at in times.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._waited = state["best"], state["waited"]
        self._best_at, self._seen_at = (
            Timestamp.from_dict(state[name]) if state[name] is not None else None for name in ("best_at", "seen_at")
        )
        self._is_resumed = True


def find_result(ctx: Context, monitor: str) -> float | None:
    """Return the value of `<dataset>/<metric>` in the current evaluation, or None if the dataset was not evaluated this time.

    Raises:
        ConfigError: the dataset has no such metric; the message lists its metrics.
    """
    values = {f"{name}/{metric}": value for name, result in ctx.eval_results.items() for metric, value in result.items()}
    if monitor not in values and not any(monitor.startswith(f"{name}/") for name in ctx.eval_results):
        return None
    return values[one_of("monitor", monitor, tuple(values))]


def _check_monitor(monitor: str) -> str:
    if not all(monitor.partition("/")):
        raise ConfigError(f"monitor={monitor!r}: write <dataset>/<metric>, such as 'validation/loss'")
    return monitor


def _warn_of_absence(callback: Callback, ctx: Context, monitor: str) -> None:
    """Warn that the evaluation did not produce the monitored metric.

    A missing metric is not an error, because an evaluator with a longer interval may have the metric.
    """
    found = [f"{name}/{metric}" for name, result in ctx.eval_results.items() for metric in result]
    logger.warning(
        "%s: this evaluation does not have the metric %r, only %s%s; ignore this if an evaluator with a longer interval has it",
        label_of(callback),
        monitor,
        ", ".join(found) or "none",
        did_you_mean(monitor, found),
    )
