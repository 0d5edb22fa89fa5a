"""Ends the run when a loss is NaN or infinite."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal, get_args

import torch

from callsheet.core.callback import Callback, one_of
from callsheet.core.context import Context
from callsheet.errors import NonFiniteError
from callsheet.run.devices import on_one_device

logger = logging.getLogger("callsheet")

Action = Literal["raise", "warn"]
ACTIONS: tuple[Action, ...] = get_args(Action)

_LOSSES_PER_TENSOR = 256  # stack this many losses into one tensor, because each separate tensor takes a block of device memory


class NaNMonitor(Callback):
    """End the run, on all ranks together, when a step's loss is NaN or infinite.

    No step waits for the device: the losses stay on it. They are checked in one transfer when a record is made, before an
    evaluation or a checkpoint, and at the end. So at most the steps since the last record are lost, and no checkpoint is written
    after a loss that is not finite. If the last step made weights NaN, its loss may still be finite; the trainer finds such
    weights, because it checks every checkpoint.

    Args:
        action: `raise` ends the run; `warn` logs an error once, on each rank that finds such a loss, and training continues.

    Raises:
        ConfigError: the action is unknown.
        NonFiniteError: a loss is NaN or infinite, and `action` is `raise`; the message names the first such step, its rank and
            its loss.
    """

    phase = "decide"

    def __init__(self, *, action: Action = "raise") -> None:
        self._action = one_of("action", action, ACTIONS)
        self.collective = self._action == "raise"  # the ranks raise the error together
        self._has_warned = False
        self._first = 0  # the step of the first loss that is not checked yet
        self._losses: list[Any] = []
        self._folded: list[torch.Tensor] = []

    def on_train_start(self, ctx: Context) -> None:
        """Reset this object, which may have been used in an earlier run."""
        self._forget()
        self._has_warned = False

    def on_train_step_end(self, ctx: Context) -> None:
        losses = self._losses
        if not losses and not self._folded:
            self._first = ctx.step
        losses.append(ctx.loss)
        if len(losses) >= _LOSSES_PER_TENSOR:
            self._folded.append(torch.stack(on_one_device(losses)))
            losses.clear()

    def on_log(self, ctx: Context) -> None:
        """If the mean loss in the new metrics record is missing or not finite, check every loss since the previous record."""
        mean = ctx.record.values.get("train/loss")
        if mean is not None and math.isfinite(mean):
            self._forget()
        else:  # the mean is missing or not finite. Each loss may still be finite, because their sum can overflow
            self._check_losses(ctx)

    def on_eval_all_start(self, ctx: Context) -> None:
        self._check_losses(ctx)

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        self._check_losses(ctx)

    def on_train_end(self, ctx: Context) -> None:
        """Check the losses since the last metrics record."""
        self._check_losses(ctx)

    def _check_losses(self, ctx: Context) -> None:
        # All ranks take the same steps. If this rank has no unchecked losses, the other ranks have none either.
        if not self._losses and not self._folded:
            return
        recent = [torch.stack(on_one_device(self._losses))] if self._losses else []
        losses = torch.cat(on_one_device([*self._folded, *recent])).tolist()
        bad = next(((self._first + i, loss) for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        self._forget()
        if self._action == "warn":
            if bad is not None and not self._has_warned:
                self._has_warned = True
                logger.error("NaNMonitor: the loss was %s at step %d on rank %d", bad[1], bad[0], ctx.run.rank)
            return
        found = [(first[0], rank, first[1]) for rank, first in enumerate(ctx.gather(bad)) if first is not None]
        if found:
            step, rank, loss = min(found)
            raise NonFiniteError(
                f"the loss was {loss} at step {step} on rank {rank}; resume from a checkpoint before it with a lower learning rate or "
                "gradient clipping, or inspect its batch (torch.autograd.set_detect_anomaly(True) names the operation)"
            )

    def _forget(self) -> None:
        self._losses, self._folded = [], []
