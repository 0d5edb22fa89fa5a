"""Detects ranks that are slower than the others."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch

from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.errors import ConfigError

logger = logging.getLogger("callsheet")

_STAGES = ("fetch", "forward")
_COMPARISON_EVENTS = ("on_fetch_start", "on_fetch_end", "on_forward_start", "on_forward_end", "on_log")


class SlowRankDetector(Callback):
    """Warn about ranks that take longer than other ranks to fetch data or to compute the forward pass.

    The time of a whole step does not show a slow rank, because ranks wait for each other in the backward pass. With FSDP, ranks
    also wait for each other in the forward pass, where the slow rank then has the shortest time: look only at `fetch`.

    Adds to every metrics record, for the stages `fetch` and `forward`: `slow_rank/<stage>/seconds`, the median over the ranks of
    their mean time per step since the last record; `slow_rank/<stage>/ratio`, the slowest rank's time divided by that median; and
    `slow_rank/<stage>/slowest`, the number of the slowest rank. If the detector has a `name`, the name is used instead of
    `slow_rank`. A warning is logged if a rank is slower than `factor` allows in `patience` records in a row, and again only after
    the rank was normal in between. The number of records in a row survives a resume.

    Nothing waits for the device: on CUDA the forward pass is timed by events, which are read when a metrics record is made. With
    one rank the detector does nothing.

    Args:
        factor: the limit, as a multiple of the median (with two ranks, of the faster rank's time).
        min_seconds: the shortest delay per step that causes a warning.
        patience: the number of records in a row after which a warning is logged.

    Raises:
        ConfigError: an argument is invalid.
    """

    collective = True

    def __init__(self, *, factor: float = 1.5, min_seconds: float = 0.005, patience: int = 3) -> None:
        if not factor > 1:
            raise ConfigError(f"factor={factor}: give more than 1")
        if not min_seconds >= 0 or patience < 1:
            raise ConfigError(f"min_seconds={min_seconds}, patience={patience}: give 0 or more, and 1 or more")
        self._factor = factor
        self._min_seconds = min_seconds
        self._patience = patience
        # "<stage> <rank>" -> number of consecutive metrics records in which the rank was slow
        self._in_a_row: dict[str, int] = {}
        self._is_on_cuda = False
        self._start: Any = None
        self._forget(0)

    def on_train_start(self, ctx: Context) -> None:
        """Start to measure this rank's times. If a resumed run has fewer ranks, discard how often the removed ranks were slow."""
        self._is_on_cuda = ctx.run.device.startswith("cuda")
        self._in_a_row = {key: count for key, count in self._in_a_row.items() if int(key.split()[1]) < ctx.run.world_size}
        self._forget(ctx.step)
        (ctx.mute if ctx.run.world_size == 1 else ctx.unmute)(self, *_COMPARISON_EVENTS)

    def on_fetch_start(self, ctx: Context) -> None:
        self._began = perf_counter()

    def on_fetch_end(self, ctx: Context) -> None:
        self._fetching += perf_counter() - self._began

    def on_forward_start(self, ctx: Context) -> None:
        if self._is_on_cuda:
            self._start = _record_event()
        else:
            self._began = perf_counter()

    def on_forward_end(self, ctx: Context) -> None:
        if self._is_on_cuda:
            self._events.append((self._start, _record_event()))
        else:
            self._forwarding += perf_counter() - self._began

    def on_log(self, ctx: Context) -> None:
        """Compare the times of the ranks since the last record, and warn of slow ranks."""
        for start, end in self._events:
            if end.query():  # count only forward passes that the device has finished
                self._forwarding += start.elapsed_time(end) / 1000
        taken = ctx.step - self._first
        here = (taken, self._fetching / max(1, taken), self._forwarding / max(1, taken))
        self._forget(ctx.step)
        there = ctx.gather(here)
        # If a rank has trained no step since the last record, the new record is about an evaluation, so compare nothing.
        if not all(rank[0] for rank in there):
            return
        for i, stage in enumerate(_STAGES, start=1):
            self._compare(ctx, stage, [rank[i] for rank in there])

    def state_dict(self) -> Mapping[str, Any]:
        """Return, for each stage and rank, in how many consecutive records the rank has been slow."""
        return {"in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_a_row = dict(state["in_a_row"])

    def _compare(self, ctx: Context, stage: str, seconds: list[float]) -> None:
        median = statistics.median_low(seconds)
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        family = f"{self.name or 'slow_rank'}/{stage}"
        ratio = seconds[slowest] / median if median > 0 else 1.0
        ctx.log({f"{family}/seconds": median, f"{family}/ratio": ratio, f"{family}/slowest": slowest}, across="same")
        for rank, taken in enumerate(seconds):
            key = f"{stage} {rank}"
            if taken > self._factor * median and taken - median > self._min_seconds:
                self._in_a_row[key] = self._in_a_row.get(key, 0) + 1
                if self._in_a_row[key] == self._patience and ctx.run.is_world_process_zero:
                    each = f"{taken:.3g} s a step, the median rank {median:.3g} s"
                    logger.warning("%s: rank %d is slow in its %s: %s (step %d)", label_of(self), rank, stage, each, ctx.step)
            else:
                self._in_a_row.pop(key, None)

    def _forget(self, step: int) -> None:
        self._first = step  # the last step before the current measurement
        self._fetching = self._forwarding = self._began = 0.0
        self._events: list[tuple[Any, Any]] = []


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
