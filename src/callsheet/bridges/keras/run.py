"""The state that Keras's callbacks share in one run of callsheet's loop, such as the logs of the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.bridges.guest_base import Common
from callsheet.core.context import Context
from callsheet.trainer.tasks import counts_of


class KerasRun(Common):
    """Keeps the logs and the position in the loop that Keras's callbacks receive. Each `on_...` method handles the event of its name."""

    def __init__(self) -> None:
        self.ctx: Any = None  # callsheet's context; None until the run begins
        self.listens_to_batches = False
        """Whether a guest listens to the end of each batch. Only then is each batch's loss converted to a number."""
        self.needs_loss = False
        """Whether any guest needs the loss in its logs."""
        self.batch = 0
        """The number of the current batch in the epoch, the evaluation or the prediction."""
        self.logs: dict[str, Any] = {}
        self.found: dict[str, float] = {}
        """The results of the last evaluation."""
        self.ended: int | None = None
        """The epoch for which the guests call Keras's `on_epoch_end` at callsheet's current event, or None."""
        self._open: int | None = None  # the index of an epoch that has ended, but for which `on_epoch_end` was not called yet
        self._total: Any = 0.0
        self._samples = 0
        self._filler_loss: Any = None  # the loss of the last step that had only fillers; the mean if the epoch has no other steps
        self._samples_before = 0  # this rank's count before the current step
        self._val_logs: dict[str, float] = {}  # the results of the last evaluation in this epoch, by their names in Keras's logs

    def state_dict(self) -> dict[str, Any]:
        """Return the sum of the losses of the epoch so far, the number of samples, and the results of the epoch's last evaluation."""
        return {"total": float(self._total), "samples": self._samples, "val_logs": dict(self._val_logs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._total, self._samples = state["total"], state["samples"]
        self._val_logs = dict(state.get("val_logs", {}))  # checkpoints of earlier callsheet versions do not have `val_logs`

    def on_train_start(self, ctx: Context) -> None:
        """Store the run's context, which later calls of Keras's callbacks use."""
        self.ctx, self._open = ctx, None

    def on_epoch_start(self, ctx: Context) -> None:
        """Reset the mean loss of the epoch, unless a resumed run continues in the middle of the epoch."""
        if not ctx.state.timestamp.batch_in_epoch:
            self._total, self._samples, self._val_logs = 0.0, 0, {}
            self._filler_loss = None
        self.logs = {}

    def on_train_step_start(self, ctx: Context) -> None:
        """Set the index of the batch in the epoch."""
        self.batch = ctx.state.timestamp.batch_in_epoch
        if ctx.tally is not None:
            self._samples_before = ctx.tally.samples

    def on_train_step_end(self, ctx: Context) -> None:
        """Add the batch's loss to the epoch's mean loss. If a Keras callback listens to batches, wait for the device, as Keras does."""
        if self.needs_loss:
            loss = float(ctx.loss) if self.listens_to_batches else ctx.loss
            # `tally` does not count fillers (batches that only keep the ranks in step), nor samples that it cannot recognize.
            samples = ctx.tally.samples - self._samples_before if ctx.tally is not None else 0
            if samples or not ctx.is_filler:
                samples = samples or counts_of(ctx.batch)[0] or 1
                self._total += loss * samples
                self._samples += samples
            else:
                self._filler_loss = loss
            if self.listens_to_batches:
                self.logs = self._mean()

    def on_epoch_end(self, ctx: Context) -> None:
        """Put the epoch's mean loss, and the results of the last evaluation within the epoch, into the logs.

        Guests are called later: Keras calls `on_epoch_end` after the epoch's evaluation.
        """
        self._open = ctx.epoch - 1
        self.logs = self._mean() | self._val_logs
        self._end(is_known=not ctx.state.evaluators)

    def on_checkpoint_due(self, ctx: Context) -> None:
        """If an epoch has ended without an evaluation, make the guests call Keras's `on_epoch_end` at this event."""
        self._end(is_known=ctx.boundary == "epoch")

    def on_train_end(self, ctx: Context) -> None:
        """If the guests have not yet called Keras's `on_epoch_end` for the last epoch, make them call it at this event."""
        self._end(is_known=True)

    def on_eval_all_start(self, ctx: Context) -> None:
        """Reset the batch number, because an evaluation begins."""
        self.batch = -1
        if ctx.standalone:
            self.ctx = ctx

    def on_eval_step_start(self, ctx: Context) -> None:
        """Count a batch of the evaluation or prediction."""
        self.batch += 1

    def on_eval_all_end(self, ctx: Context) -> None:
        """Add the results to the logs of the epoch that was evaluated."""
        self.found = {
            metric if name == "validation" else f"{name}_{metric}": value
            for name, found in ctx.eval_results.items()
            for metric, value in found.items()
        }
        if not ctx.standalone:
            self._val_logs = {f"val_{name}": value for name, value in self.found.items()}
        if self._open is not None:
            self.logs |= self._val_logs
        self._end(is_known=True)

    def on_predict_start(self, ctx: Context) -> None:
        """Reset the batch number, because a prediction begins."""
        self.ctx, self.batch = ctx, -1

    on_predict_step_start = on_eval_step_start

    def _mean(self) -> dict[str, float]:
        """Return the mean loss of the epoch so far, as `loss`; an empty dictionary if there was no step."""
        if self._samples:
            return {"loss": float(self._total) / self._samples}
        return {} if self._filler_loss is None else {"loss": float(self._filler_loss)}

    def _end(self, *, is_known: bool) -> None:
        """If an epoch has ended and no evaluation of it can follow (`is_known`), make the guests call Keras's `on_epoch_end` now."""
        self.ended = None
        if is_known:
            self.ended, self._open = self._open, None
