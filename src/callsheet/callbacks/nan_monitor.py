"""A loss that is NaN or infinite ends the run."""

from __future__ import annotations

import math
from typing import Any

import torch

from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.errors import NonFiniteError

_FOLD = 256  # so many losses are kept before they become one tensor: each alone takes a block of the device's memory


class NaNMonitor(Callback):
    """End the run, on all ranks together, when a step's loss is NaN or infinite.

    No step waits for the device: the losses are kept there and looked at, in one transfer, when a record is made, and before an
    evaluation, a checkpoint and the end. So at most the steps since the last record are lost, and no checkpoint is written from
    a loss that is not finite. What a finite loss does not show, such as weights that the last step spoilt, the trainer's own check of
    every checkpoint finds.

    Raises:
        NonFiniteError: names the first such step, its rank and its loss.
    """

    phase = "decide"
    collective = True

    def __init__(self) -> None:
        self._first = 0  # the step of the first loss that is kept
        self._losses: list[Any] = []
        self._folded: list[torch.Tensor] = []

    def on_train_start(self, ctx: Context) -> None:
        """Nothing is kept from an earlier run."""
        self._forget()

    def on_train_step_end(self, ctx: Context) -> None:
        """Keep the loss."""
        losses = self._losses
        if not losses and not self._folded:
            self._first = ctx.step
        losses.append(ctx.loss)
        if len(losses) >= _FOLD:
            self._folded.append(torch.stack(losses))
            losses.clear()

    def on_log(self, ctx: Context) -> None:
        """Look, unless the record already says that on every rank all was well."""
        mean = ctx.record.values.get("train/loss")
        if mean is not None and math.isfinite(mean):
            self._forget()
        else:  # not finite: a loss was not, or their sum was too much for a small dtype
            self._look(ctx)

    def on_eval_all_start(self, ctx: Context) -> None:
        """Look before time is spent on an evaluation."""
        self._look(ctx)

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        """Look before the checkpoint is written."""
        self._look(ctx)

    def on_train_end(self, ctx: Context) -> None:
        """Look at what no record has told."""
        self._look(ctx)

    def _look(self, ctx: Context) -> None:
        if not self._losses and not self._folded:  # on one rank, so on all
            return
        losses = torch.cat([*self._folded, *([torch.stack(self._losses)] if self._losses else [])]).tolist()
        bad = next(((self._first + i, loss) for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        self._forget()
        found = [(verdict[0], rank, verdict[1]) for rank, verdict in enumerate(ctx.gather(bad)) if verdict is not None]
        if found:
            step, rank, loss = min(found)
            raise NonFiniteError(
                f"the loss was {loss} at step {step} on rank {rank}; resume from a checkpoint before it with a lower learning rate or "
                "clipped gradients, or look at its batch (torch.autograd.set_detect_anomaly(True) names the operation)"
            )

    def _forget(self) -> None:
        self._losses, self._folded = [], []
