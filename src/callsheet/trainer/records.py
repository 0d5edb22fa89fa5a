"""Records: what was logged between two boundaries, told as one `on_log`."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from torch import Tensor

from callsheet.context import Context, MetricsRecord
from callsheet.events import Event
from callsheet.manager import CallbackManager
from callsheet.metrics import MetricLog, Series, scalar
from callsheet.time import Interval
from callsheet.trainer.process_groups import ProcessGroups
from callsheet.trainer.tally import Tally


class Records:
    """Collects the run's metrics and counts, and makes a record of them every so often, the same on all ranks."""

    def __init__(self, manager: CallbackManager, every: Interval, device: torch.device, world: ProcessGroups) -> None:
        self.metrics = MetricLog(world if world.size > 1 else None)
        self._train_loss = self.metrics.series("train/loss", "mean", "mean")
        self._others: dict[str, Series] = {}  # of the losses beside it, by their names
        self.tally = Tally(world)
        self.learning_rate: Any = None
        """The last step's; None where nobody has said it since a record that nobody read."""
        self.last_loss: Tensor | None = None
        """The last step's mean, of this rank; its mean over the ranks is the step's."""
        self.every = every
        self._manager = manager
        self._has_listeners = manager.has_listeners
        self._device = device
        self._world = world
        self._process = psutil.Process()  # this one: a fork would take an earlier one's for its own
        self._passed = 0  # intervals
        self._told_at = 0  # the step

    @property
    def are_read(self) -> bool:
        """Whether anybody waits for records; of several ranks it may be another than this."""
        return self._world.size > 1 or self._has_listeners.on_log

    def add(self, losses: dict[str, Tensor], scale: Any = None, *, moved: bool = True) -> None:
        """One step's mean losses by name; of those that nobody will read only the last is kept, for a checkpoint to name.

        `scale` is what this rank's mean weighs against the others'; `moved` is false for a step that was skipped.
        """
        if scale is not None:
            losses = {name: loss * scale for name, loss in losses.items()}
        loss = losses["loss"]
        if moved:  # what overflowed under a loss scale says nothing about the weights
            self.last_loss = loss
        if not self.are_read:
            return
        self._train_loss.add(loss)
        if len(losses) > 1:
            for name, each in losses.items():
                if name != "loss":
                    series = self._others.get(name)
                    if series is None:
                        series = self._others[name] = self.metrics.series(f"train/{name}", "mean", "mean")
                    series.add(scalar(name, each))

    def are_due(self, ctx: Context) -> bool:
        """Whether a log boundary has been reached since the last record."""
        return self.every.index(ctx.state.timestamp) > self._passed

    def tell(self, ctx: Context) -> None:
        """Tell the record of what was logged since the last one, if anything was; the counts must have been settled: a collective."""
        self._passed = self.every.index(ctx.state.timestamp)
        if not self.are_read:
            self._told_at, self.learning_rate = ctx.step, None
            self.tally.since_record()
            self.metrics.clear()  # nobody waits for the device, and neither do we
            return
        if self._told_at == ctx.step and not self._world.max([bool(self.metrics)])[0]:  # nothing more on any rank
            return
        self._told_at = ctx.step
        samples, tokens, seconds = self.tally.since_record()
        now = ctx.state.timestamp
        logged: dict[str, float] = {"train/learning_rate": self.learning_rate} if self.learning_rate is not None else {}
        if tokens and seconds:
            logged["train/tokens_per_second"] = tokens / seconds
        logged |= {"time/epoch": now.epoch, "time/batch": now.batch, "time/sample": now.sample, "time/token": now.token}
        self.metrics.log(logged, across="same")
        self._tell(ctx, self.metrics.take(), samples / seconds if seconds else 0.0, tokens / seconds if seconds else 0.0)

    def fire_evaluation(self, ctx: Context, values: dict[str, float]) -> None:
        """Tell the record of what was logged in an evaluation, if anything was."""
        if values:
            self._tell(ctx, values, 0.0, 0.0)

    def mean_loss(self) -> float | None:
        """The last step's mean loss over all ranks, or None where there has been none: a collective, which waits for the device."""
        if self.last_loss is None:
            return None
        here = self.last_loss.item()
        return here if self._world.size == 1 else self._world.sum([here])[0] / self._world.size

    def _tell(self, ctx: Context, values: dict[str, float], samples_per_second: float, tokens_per_second: float) -> None:
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
        self._manager.publish_costs(ctx)

    def _memory_bytes(self) -> int:
        """The device's peak of allocated memory since the process began; on the CPU the process's resident memory now."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return int(self._process.memory_info().rss)

    def state_dict(self) -> dict[str, Any]:
        """What has been collected and not told."""
        return {
            "metrics": self.metrics.state_dict(),
            "passed": self._passed,
            "told_at": self._told_at,
            "learning_rate": self.learning_rate,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.metrics.load_state_dict(state["metrics"])
        self._train_loss, self._others = self.metrics.series("train/loss", "mean", "mean"), {}
        self._passed, self._told_at, self.learning_rate = state["passed"], state["told_at"], state["learning_rate"]
