"""Training ends when an evaluated metric no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from callsheet.callback import Callback, label_of, one_of
from callsheet.context import Context
from callsheet.errors import ConfigError, did_you_mean
from callsheet.time import Time, Timestamp, TimeUnit, elapsed_fraction

logger = logging.getLogger("callsheet")


class EarlyStopper(Callback):
    """Stop training, on all ranks together, when a metric of the evaluation has not improved for a while.

    A value is better if it is by more than `min_delta` below the best so far, or above it where `mode` is `"max"`. NaN and infinity are
    never better: they are waited through like any other value. Evaluations by hand decide nothing, and one in which the dataset was not
    due is passed over. What is at its best, and since when, survives a resume; a run that is resumed after its patience ran out ends
    before its first step: raise `patience` to go on. Several stand side by side if each has a `name` of its own.

    Args:
        monitor: `<dataset>/<metric>` of the evaluation, such as `"validation/loss"`.
        mode: whether the best is the `"min"` or the `"max"`.
        patience: a whole number: how many evaluations of the dataset in a row may fail to improve; the last of them stops the run. Or a
            time, such as `"2ep"`: stopped is at the first evaluation that is at least so long after the best.
        min_delta: by how much a better value has to be better, in the metric's own unit.

    Raises:
        ConfigError: an argument that cannot work; at an evaluation that has the dataset, when it does not tell the metric.
    """

    phase = "decide"
    transport_ignore = ("_is_resumed",)
    collective = True  # it asks on behalf of all ranks

    def __init__(self, *, monitor: str, mode: str = "min", patience: int | str | Time = 3, min_delta: float = 0.0) -> None:
        self._monitor = _checked_monitor(monitor)
        self._sign = {"min": 1.0, "max": -1.0}[one_of("mode", mode, ("min", "max"))]
        self._patience = Time.parse(patience) if not isinstance(patience, int) else patience
        if isinstance(patience, bool) or (self._patience.value if isinstance(self._patience, Time) else self._patience) <= 0:
            raise ConfigError(f"patience={patience!r}: give at least one evaluation, or a time such as '2ep'")
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise ConfigError(f"min_delta={min_delta!r}: give how much better counts as better, 0 or more")
        self._min_delta = min_delta
        self._begin()

    def _begin(self) -> None:
        self._best = math.inf  # by `_sign`, less is better
        self._waited = 0  # evaluations
        self._best_at: Timestamp | None = None  # also of the first value, if none was finite
        self._seen_at: Timestamp | None = None
        self._is_warned = self._is_resumed = False

    def on_checkpoint_load_start(self, ctx: Context) -> None:
        """Forget an earlier run."""
        self._begin()

    def on_train_start(self, ctx: Context) -> None:
        """A run that ended here before it was resumed has not become better since."""
        is_resumed, self._is_resumed = self._is_resumed, False
        if is_resumed and self._seen_at is not None and self._has_run_out(ctx):
            self._stop(ctx)

    def on_eval_all_end(self, ctx: Context) -> None:
        """Compare, and stop when patience has run out."""
        if ctx.standalone:  # somebody's look at other data
            return
        value = evaluated(ctx, self._monitor)
        if value is None:
            if not self._is_warned and ctx.eval_results:  # empty where a signal cut the evaluation short
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
        if self._has_run_out(ctx) and not ctx.state.is_complete:  # else it ends here anyway
            self._stop(ctx)

    def on_train_end(self, ctx: Context) -> None:
        """Say so where it could not do its work."""
        if self._seen_at is None and not self._is_warned and ctx.state.timestamp.batch > ctx.state.baseline.batch:
            logger.warning("%s waited for %r, and no evaluation was told in the whole run", label_of(self), self._monitor)

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
        """The best value, when it was, and how long it has been waited since."""
        times = {"best_at": self._best_at, "seen_at": self._seen_at}
        return {
            "best": self._best,
            "waited": self._waited,
            **{name: at.to_dict() if at is not None else None for name, at in times.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._best, self._waited = state["best"], state["waited"]
        self._best_at, self._seen_at = (
            Timestamp.from_dict(state[name]) if state[name] is not None else None for name in ("best_at", "seen_at")
        )
        self._is_resumed = True


def evaluated(ctx: Context, monitor: str) -> float | None:
    """The value of `<dataset>/<metric>` in the evaluation that is told, or None where the dataset was not evaluated this time.

    Raises:
        ConfigError: the dataset has no such metric; the message lists those there are.
    """
    values = {f"{name}/{metric}": value for name, result in ctx.eval_results.items() for metric, value in result.items()}
    if monitor not in values and not any(monitor.startswith(f"{name}/") for name in ctx.eval_results):
        return None
    return values[one_of("monitor", monitor, tuple(values))]


def _checked_monitor(monitor: str) -> str:
    if not all(monitor.partition("/")):
        raise ConfigError(f"monitor={monitor!r}: write <dataset>/<metric>, such as 'validation/loss'")
    return monitor


def _warn_of_absence(callback: Callback, ctx: Context, monitor: str) -> None:
    """Only a warning: an evaluator with a longer interval may be the one that is meant."""
    told = [f"{name}/{metric}" for name, result in ctx.eval_results.items() for metric in result]
    logger.warning(
        "%s waits for %r, and this evaluation told only %s%s; is it of an evaluator that comes later?",
        label_of(callback),
        monitor,
        ", ".join(told) or "nothing",
        did_you_mean(monitor, told),
    )
