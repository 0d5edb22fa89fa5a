"""Compares callsheet's counts of steps and epochs with another framework's counts, and corrects callsheet's counts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from callsheet.core.context import Context

logger = logging.getLogger("callsheet")


class Counts(NamedTuple):
    """How many steps and epochs the framework has completed, by its own count.

    None: the framework does not count them, or not in a way that can be compared.
    """

    steps: int | None = None
    epochs: int | None = None


class CountCheck:
    """Compares callsheet's counts with the framework's, at the ends of epochs, at checkpoints and at the end of training.

    If the framework has not fired its events as the host expects, callsheet's counts may be wrong. The first time that the counts
    differ, a warning is logged and recorded in `ctx.run.inexact_counts`. Each time, callsheet's counts are set to the framework's.
    A missing and a repeated event may cancel out in the counts, so a host that notices one of them calls `doubt`.

    Args:
        host: the name of the framework in messages.
        ctx: the context of the training.
    """

    def __init__(self, host: str, ctx: Context) -> None:
        self._host = host
        self._ctx = ctx
        self._counted: Callable[[], Counts] = Counts
        self._ahead = Counts(0, 0)
        self._partial_epochs = 0
        self._last_equal_step = 0

    def follow(self, counted: Callable[[], Counts]) -> None:
        """From now on, compare callsheet's counts with the counts that `counted` returns.

        The framework may have trained before this run, so the present difference between the two counts is accepted. If a count
        is None now, the framework must later begin it at callsheet's count.

        Args:
            counted: returns the counts of the framework. At the end of an epoch, the counts include this epoch. The function must not
                keep the host or the framework's trainer alive.
        """
        now, (steps, epochs) = self._ctx.state.timestamp, counted()
        self._counted = counted
        self._ahead = Counts(0 if steps is None else steps - now.batch, 0 if epochs is None else epochs - now.epoch)
        self._partial_epochs, self._last_equal_step = 0, now.batch

    def leave_epoch(self) -> None:
        """Record that the loop has left an epoch before its end. callsheet does not count such an epoch, but some frameworks do."""
        self._partial_epochs += 1

    def doubt(self) -> None:
        """Record in `ctx.run.inexact_counts` that the host has noticed a missing or repeated event, and log a warning."""
        if not self._ctx.run.inexact_counts:
            self._record(f"{self._host} has left out, repeated or reordered events")
            logger.warning("%s. Training continues", self._ctx.run.inexact_counts)

    def check(self, *, epochs: bool = True) -> None:
        """Set callsheet's counts to the framework's counts if they differ. With `epochs=False`, compare only the steps."""
        ctx, now, counted = self._ctx, self._ctx.state.timestamp, self._counted()
        steps = now.batch if counted.steps is None else counted.steps - (self._ahead.steps or 0)
        done = now.epoch if counted.epochs is None or not epochs else counted.epochs - (self._ahead.epochs or 0)
        if now.epoch < done <= now.epoch + self._partial_epochs:
            done = now.epoch
        if steps == now.batch and done == now.epoch:
            if epochs or counted.epochs is None:
                self._last_equal_step = steps
            return
        if not ctx.run.inexact_counts:
            theirs, ours = (f"{steps} steps", now.batch) if steps != now.batch else (f"{done} epochs", now.epoch)
            self._record(
                f"{self._host} has counted {theirs}, and callsheet {ours}, because events were missing, repeated or in another order"
            )
            logger.warning("%s. callsheet continues with the count of %s. Training continues", ctx.run.inexact_counts, self._host)
        ctx.state.timestamp = now._replace(
            batch=steps,
            batch_in_epoch=max(0, now.batch_in_epoch + steps - now.batch),
            epoch=done,
            epoch_in_round=max(0, now.epoch_in_round + done - now.epoch),
        )
        ctx.step, self._last_equal_step = steps, steps
        if done != now.epoch:
            ctx.epoch = done

    def _record(self, what: str) -> None:
        self._ctx.run.inexact_counts = f"{what}; figures per step or epoch may be wrong from step {self._last_equal_step + 1} on"
