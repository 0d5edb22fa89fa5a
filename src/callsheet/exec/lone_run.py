"""The run of a training loop that is observed on one rank only, and the check that its callbacks work on one rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from callsheet.bridges.boundary_order import HostedBoundaries
from callsheet.bridges.hosted_run import HostedRun
from callsheet.callbacks import MemoryMonitor, SpeedMonitor, SystemMetricsMonitor
from callsheet.core.background import inner
from callsheet.core.callback import label_of
from callsheet.core.context import Boundary, Context
from callsheet.core.ranks import read_ranks
from callsheet.core.time import Interval, Timestamp
from callsheet.errors import NotSupported
from callsheet.exec.log_pace import PacedRecords

_GATHERING_CALLBACKS = (SpeedMonitor, MemoryMonitor, SystemMetricsMonitor)
"""Callbacks whose only collective is `ctx.gather`. They work on one rank, because `LoneContext.gather` needs no other rank."""


class LoneContext(Context):
    """The context of callbacks that run on one rank only, although the training runs on several ranks."""

    __slots__ = ()

    def gather(self, value: Any) -> list[Any]:
        """Return the value in a list, because the callbacks run on no other rank."""
        return [value]


class LoneBoundaries(HostedBoundaries):
    """Never fires `on_checkpoint_due`, because callsheet cannot save in a loop that it only observes."""

    def fire_checkpoint_due(self, boundary: Boundary) -> None: ...


class LoneRun(HostedRun):
    """A run that is observed on this rank only."""

    CONTEXT = LoneContext
    RECORDS = PacedRecords
    BOUNDARIES = LoneBoundaries
    records: PacedRecords

    def count_unreported_step(self, optimizer: Optimizer, loss: Tensor | None, samples: int, tokens: int) -> int:
        """Count a step that no handler listens to, and whose start was not reported to the lifecycle driver.

        This does the same as `start_step` of the driver and then `end_step` of this class, but in one function. Each function call
        takes several microseconds, because the operations of the training step push callsheet's code out of the processor's caches.

        Args:
            optimizer: the optimizer that has stepped.
            loss: the loss of the step, or None if nothing reads it.
            samples: the number of samples of the step, summed over the ranks.
            tokens: the number of tokens of the step, summed over the ranks.

        Returns:
            The number of steps so far.
        """
        ctx, state, records = self.ctx, self.state, self.records
        ctx.step = step = ctx.step + 1
        self._order.fired = ""  # empty: a step has ended, and no event was fired since (see `BoundaryOrder`)
        state.previous_timestamp = now = state.timestamp
        # For speed, these lines replace `state.timestamp = now.next_batch()`.
        rounds, epoch, batch, sample, token, seconds, nth_epoch, nth_batch, nth_sample, nth_token, since = now
        after = rounds, epoch, batch + 1, sample, token, seconds, nth_epoch, nth_batch + 1, nth_sample, nth_token, since
        state.timestamp = tuple.__new__(Timestamp, after)
        tally = records.tally
        tally.samples += samples
        tally.tokens += tokens
        # Store the learning rate for the next metrics record. Leave `ctx.learning_rate` unset: no handler listens to this step.
        rate = optimizer.param_groups[0].get("lr")
        records.learning_rate = rate.clone() if isinstance(rate, Tensor) else rate
        if loss is not None:
            records.last_loss = loss
            if self.driver.is_read:
                records.train_loss.add(loss)
        if step >= self._next_boundary or self.control.pending or self.signals.received is not None:
            self.boundaries.reach("step")
            self._next_boundary = self.boundaries.next_step()
        return step

    def keep_pace(self) -> None:
        """If the last metrics record was made long ago, because steps have become slow, let the next record come earlier."""
        records = self.records
        if records.pace.shorten(records.tally.seconds_since_record()):
            records.change_interval(Interval(records.pace.steps), self.ctx)
            self._next_boundary = self.boundaries.next_step()


def check_observers(run: LoneRun) -> None:
    """Check that the callbacks of the run only observe, need no other rank, and need nothing that the loop cannot do.

    Raises:
        NotSupported: the message names the callback and what it needs.
    """
    able, is_alone = run.control.able, read_ranks().world_size == 1
    for each in run.manager.callbacks:
        if each.collective and not is_alone and not isinstance(each, _GATHERING_CALLBACKS):
            raise NotSupported(f"{label_of(each)} calls collectives, and only one rank is observed here; leave the callback out")
        if asked := ", ".join(f"ctx.control.{request}" for request in inner(each).requests if request not in able):
            raise NotSupported(
                f"{label_of(each)} asks for {asked}, which a loop written by hand cannot carry out without a change; use callsheet.attach"
            )
        if inner(each).phase == "change":
            raise NotSupported(
                f"{label_of(each)} changes the training (its phase is `change`), so the script would print and save other results than without "
                "callsheet; use callsheet.attach"
            )
