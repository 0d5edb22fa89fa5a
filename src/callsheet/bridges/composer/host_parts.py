"""What the host in Composer's Trainer is made of beside its events; it needs Composer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from composer import Event
from composer.loggers import LoggerDestination
from torch import Tensor

from callsheet.bridges.hosted_run import HostedRun

_LOGGED_ELSEWHERE = frozenset({"loss/train/total", "trainer/device_train_microbatch_size"})
"""What the Trainer logs, and records have by other names or from elsewhere."""


class EvaluationRequests:
    """Stands before the intervals of Composer's evaluators: when a callback has asked for an evaluation, it is time for all of them."""

    def __init__(self) -> None:
        self.is_one = False

    def ask(self) -> None:
        """One is wished for, as soon as Composer looks."""
        self.is_one = True

    def stand_in(self, evaluators: Iterable[Any]) -> None:
        """Stand before those that it does not stand before yet."""
        for evaluator in evaluators:
            if getattr(evaluator.eval_interval, "wishes", None) is not self:
                evaluator.eval_interval = _Interval(evaluator.eval_interval, self)


class _Interval:
    def __init__(self, own: Callable[[Any, Any], bool], wishes: EvaluationRequests) -> None:
        self.own, self.wishes = own, wishes

    def __call__(self, state: Any, event: Any) -> bool:
        return self.own(state, event) or (self.wishes.is_one and event is not Event.FIT_END)


class Listener(LoggerDestination):  # type: ignore[misc]  # Composer's types are not read
    """What is logged to Composer's Logger goes into our records too."""

    def __init__(self, run: HostedRun) -> None:
        self._records, self._log, self._driver = run.records, run.ctx.log, run.driver
        self._names: dict[str, str] = {}  # Composer's, and ours; the empty one is not logged

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Numbers by name; those of times and evaluations are told in their own ways."""
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
    """Whether it can be logged."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def trained_on(loss: Any) -> Tensor:
    """What Composer goes backward from: the total of a dictionary, or the sum of all."""
    if isinstance(loss, Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    if isinstance(loss, Mapping) and "total" in loss:
        total: Tensor = loss["total"]
        return total if total.dim() == 0 else total.mean()
    return sum((each.mean() for each in (loss.values() if isinstance(loss, Mapping) else loss)), start=Tensor([0.0]).squeeze())
