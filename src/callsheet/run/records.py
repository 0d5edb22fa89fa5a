"""Metrics records: every few steps, `on_log` receives the values that were logged since the last record."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from callsheet.core.context import Context
from callsheet.core.events import Event
from callsheet.core.manager import CallbackManager
from callsheet.core.optional import load
from callsheet.core.run_state import MetricsRecord
from callsheet.core.time import Interval
from callsheet.run.costs import publish_costs
from callsheet.run.metrics import MetricLog, Series, scalar
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.tally import Tally


class Records:
    """Collects the run's metrics and counts, and every few steps makes a metrics record that is the same on all ranks."""

    def __init__(self, manager: CallbackManager, every: Interval, device: torch.device, groups: ProcessGroups) -> None:
        self.metrics = MetricLog(groups if groups.size > 1 else None)
        self.train_loss = self.metrics.series("train/loss", "mean", "mean")
        """The losses of the steps since the last record."""
        self._others: dict[str, Series] = {}  # the series of the losses other than `train/loss`, by name
        self.tally = Tally(groups)
        self.learning_rate: Any = None
        """The learning rate of the last step. None before the first step, and between a discarded record and the next step."""
        self.last_loss: Tensor | None = None
        """The mean loss of the last step on this rank. The loss of the step is the mean of this value over the ranks."""
        self.every = every
        self._manager = manager
        self._has_listeners = manager.has_listeners
        self._device = device
        self._groups = groups
        self._process: Any = None
        # Make a psutil `Process` for each run, because in a forked process, one that was made before the fork describes the parent.
        if device.type != "cuda":
            self._process = load("psutil", extra="train", wanted_by="Trainer").Process()
        self._passed = 0  # the number of log intervals that had passed when the last record was made
        self._recorded_step = 0  # the step of the last record

    @property
    def are_read(self) -> bool:
        """Whether a callback may listen to `on_log`. With several ranks this is always True, because other ranks' callbacks may listen."""
        return self._groups.size > 1 or self._has_listeners.on_log

    def add(self, losses: dict[str, Tensor], scale: Any = None, *, moved: bool = True) -> None:
        """Add the mean losses of one step by name. If no callback reads records, keep only the last loss, for checkpoints.

        `scale` is the weight of this rank's mean relative to those of the other ranks. `moved` is False if the optimizer skipped
        the step.
        """
        if scale is not None:
            losses = {name: loss * scale for name, loss in losses.items()}
        loss = losses["loss"]
        if moved:  # after a skipped step, keep the earlier loss, because the loss of a skipped step may have overflowed
            self.last_loss = loss
        if not self.are_read:
            return
        self.train_loss.add(loss)
        if len(losses) > 1:
            for name, each in losses.items():
                if name != "loss":
                    series = self._others.get(name)
                    if series is None:
                        series = self._others[name] = self.metrics.series(f"train/{name}", "mean", "mean")
                    series.add(scalar(name, each))

    def change_interval(self, every: Interval, ctx: Context) -> None:
        """Change how often metrics records are made."""
        self.every, self._passed = every, every.index(ctx.state.timestamp)

    def are_due(self, ctx: Context) -> bool:
        """Return whether a new metrics record is due."""
        return self.every.index(ctx.state.timestamp) > self._passed

    def fire_log(self, ctx: Context) -> None:
        """Fire `on_log` with the values that were logged since the last record, if there are any.

        `tally.update_timestamp` must have been called before. This is a collective.
        """
        self._passed = self.every.index(ctx.state.timestamp)
        if not self.are_read:
            self._recorded_step, self.learning_rate = ctx.step, None
            self.tally.since_record()
            self.metrics.clear()  # nothing reads the values, so discard them instead of waiting for the device
            return
        # If the last record was made at this step, and no rank has logged anything since then, make no second record.
        if self._recorded_step == ctx.step and not self._groups.max([bool(self.metrics)])[0]:
            return
        self._recorded_step = ctx.step
        samples, tokens, seconds = self.tally.since_record()
        now = ctx.state.timestamp
        logged: dict[str, float] = {"train/learning_rate": self.learning_rate} if self.learning_rate is not None else {}
        if tokens and seconds:
            logged["train/tokens_per_second"] = tokens / seconds
        logged |= {"time/epoch": now.epoch, "time/batch": now.batch, "time/sample": now.sample, "time/token": now.token}
        self.metrics.log(logged, across="same")
        self._fire(ctx, self.metrics.take(), samples / seconds if seconds else 0.0, tokens / seconds if seconds else 0.0)

    def fire_evaluation(self, ctx: Context, values: dict[str, float]) -> None:
        """Fire `on_log` with the values that were logged during an evaluation, if there are any."""
        if values:
            self._fire(ctx, values, 0.0, 0.0)

    def mean_loss(self) -> float | None:
        """Return the mean loss of the last step over all ranks, or None before the first step.

        This is a collective that waits for the device.
        """
        if self.last_loss is None:
            return None
        here = self.last_loss.item()
        return here if self._groups.size == 1 else self._groups.sum([here])[0] / self._groups.size

    def _fire(self, ctx: Context, values: dict[str, float], samples_per_second: float, tokens_per_second: float) -> None:
        if not self._has_listeners.on_log:
            return
        ctx.record = MetricsRecord(
            ctx.step,
            values,
            elapsed_seconds=ctx.state.timestamp.seconds,
            samples_per_second=samples_per_second,
            tokens_per_second=tokens_per_second,
            memory_bytes=self._memory_bytes(),
        )
        self._manager.fire(Event.LOG, ctx)
        ctx.close("on_log")
        publish_costs(self._manager, ctx)

    def _memory_bytes(self) -> int:
        """Return the peak of allocated device memory since the process began. On the CPU, return the process's current memory."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return int(self._process.memory_info().rss)

    def state_dict(self) -> dict[str, Any]:
        """Return the logged values that are not part of a metrics record yet, and when the last record was made."""
        return {
            "metrics": self.metrics.state_dict(),
            "passed": self._passed,
            "recorded_step": self._recorded_step,
            "learning_rate": self.learning_rate,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.metrics.load_state_dict(state["metrics"])
        self.train_loss, self._others = self.metrics.series("train/loss", "mean", "mean"), {}
        self._passed, self.learning_rate = state["passed"], state["learning_rate"]
        # Earlier versions of callsheet saved the step of the last record under the key `told_at`.
        self._recorded_step = state["recorded_step"] if "recorded_step" in state else state["told_at"]
