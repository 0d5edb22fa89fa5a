"""Parts of the host in Composer's Trainer: evaluation requests, the logger, the loss. This module imports Composer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from composer import Event
from composer.loggers import LoggerDestination
from torch import Tensor

from callsheet.bridges.hosted_run import HostedRun

_LOGGED_ELSEWHERE = frozenset({"loss/train/total", "trainer/device_train_microbatch_size"})
"""Metrics of the Trainer that metrics records have under other names or from another source."""


class EvaluationRequests:
    """Wrap the intervals of Composer's evaluators, so that all of them evaluate when a callback has requested an evaluation."""

    def __init__(self) -> None:
        self.is_pending = False

    def ask(self) -> None:
        """Request an evaluation. It begins when Composer next checks the intervals."""
        self.is_pending = True

    def install(self, evaluators: Iterable[Any]) -> None:
        """Wrap the intervals that are not wrapped yet."""
        for evaluator in evaluators:
            if getattr(evaluator.eval_interval, "requests", None) is not self:
                evaluator.eval_interval = _Interval(evaluator.eval_interval, self)


class _Interval:
    def __init__(self, own: Callable[[Any, Any], bool], requests: EvaluationRequests) -> None:
        self.own, self.requests = own, requests

    def __call__(self, state: Any, event: Any) -> bool:
        return self.own(state, event) or (self.requests.is_pending and event is not Event.FIT_END)


class Listener(LoggerDestination):  # type: ignore[misc]  # Composer's types are not read
    """Log everything that is logged to Composer's Logger in our metrics records too."""

    def __init__(self, run: HostedRun) -> None:
        self._records, self._log, self._driver = run.records, run.ctx.log, run.driver
        self._names: dict[str, str] = {}  # our name by Composer's; a metric whose name is empty is not logged

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log metrics, except those of times and evaluations, which our records have from other sources."""
        if self._records.are_read:
            try:
                self._take(metrics)
            except Exception as error:
                self._driver.give_up(error)

    def _take(self, metrics: dict[str, Any]) -> None:
        names = self._names
        for name, value in metrics.items():
            ours = names.get(name)
            if ours is None:
                ours = names[name] = _our_name(name)
            if ours and is_one_number(value):
                self._log({ours: value})


def _our_name(name: str) -> str:
    family, _, rest = name.partition("/")
    if family == "time" or name in _LOGGED_ELSEWHERE or (family == "metrics" and not rest.startswith("train/")):
        return ""
    return f"train/{rest.removeprefix('train/')}" if family == "metrics" or name.startswith("loss/train/") else f"composer/{name}"


def is_one_number(value: Any) -> bool:
    """Return whether the value is a single number, which can be logged."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def trained_on(loss: Any) -> Tensor:
    """Return the loss from which Composer runs the backward: the `total` of a dictionary, or the sum of all losses."""
    if isinstance(loss, Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    if isinstance(loss, Mapping) and "total" in loss:
        total: Tensor = loss["total"]
        return total if total.dim() == 0 else total.mean()
    return sum((each.mean() for each in (loss.values() if isinstance(loss, Mapping) else loss)), start=Tensor([0.0]).squeeze())
