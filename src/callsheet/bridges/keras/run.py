"""One run as its guests from Keras see it: the logs that `fit` makes once for all callbacks, made once for all guests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.bridges.guest_base import Common
from callsheet.context import Context
from callsheet.trainer.tasks import counts_of


class KerasRun(Common):
    """Keras's logs, and where its loop is; told our events by their names."""

    def __init__(self) -> None:
        self.ctx: Any = None  # until the run begins
        self.tells_batches = False
        """Somebody hears the end of each batch, with the loss as a number."""
        self.needs_loss = False
        """Somebody is told the loss at all."""
        self.batch = 0
        """In hand: of the epoch, or of an evaluation or prediction."""
        self.logs: dict[str, Any] = {}
        self.found: dict[str, float] = {}
        """By the last evaluation."""
        self.ended: int | None = None
        """The epoch whose end Keras tells at this event."""
        self._open: int | None = None  # an epoch whose end Keras has not told
        self._total: Any = 0.0
        self._samples = 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch's loss so far."""
        return {"total": float(self._total), "samples": self._samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._total, self._samples = state["total"], state["samples"]

    def on_train_start(self, ctx: Context) -> None:
        """From here on there is a run to look at."""
        self.ctx, self._open = ctx, None

    def on_epoch_start(self, ctx: Context) -> None:
        """A new mean; but for an epoch that a resumed run enters in its midst."""
        if not ctx.state.timestamp.batch_in_epoch:
            self._total, self._samples = 0.0, 0
        self.logs = {}

    def on_train_step_start(self, ctx: Context) -> None:
        """The next batch."""
        self.batch = ctx.state.timestamp.batch_in_epoch

    def on_train_step_end(self, ctx: Context) -> None:
        """Add its loss to the mean; where it is told, that waits for the device, as Keras does."""
        if self.needs_loss:
            samples = counts_of(ctx.batch)[0] or 1
            self._total += (float(ctx.loss) if self.tells_batches else ctx.loss) * samples
            self._samples += samples
            if self.tells_batches:
                self.logs = {"loss": float(self._total) / self._samples}

    def on_epoch_end(self, ctx: Context) -> None:
        """Keras tells an epoch's end behind its evaluation, if there is one."""
        self._open = ctx.epoch - 1
        self.logs = {"loss": float(self._total) / self._samples} if self._samples else {}
        self._end(is_known=not ctx.state.evaluators)

    def on_checkpoint_due(self, ctx: Context) -> None:
        """At the epoch's own: no evaluation was due."""
        self._end(is_known=ctx.boundary == "epoch")

    def on_train_end(self, ctx: Context) -> None:
        """Nothing follows."""
        self._end(is_known=True)

    def on_eval_all_start(self, ctx: Context) -> None:
        """An evaluation counts its own batches."""
        self.batch = -1
        if ctx.standalone:
            self.ctx = ctx

    def on_eval_step_start(self, ctx: Context) -> None:
        """The next of them."""
        self.batch += 1

    def on_eval_all_end(self, ctx: Context) -> None:
        """What it found stands in the logs of the epoch that it judges."""
        self.found = {
            metric if name == "validation" else f"{name}_{metric}": value
            for name, found in ctx.eval_results.items()
            for metric, value in found.items()
        }
        if self._open is not None:
            self.logs |= {f"val_{name}": value for name, value in self.found.items()}
        self._end(is_known=True)

    def on_predict_start(self, ctx: Context) -> None:
        """So does a prediction."""
        self.ctx, self.batch = ctx, -1

    on_predict_step_start = on_eval_step_start

    def _end(self, *, is_known: bool) -> None:
        """Tell the end of the epoch now, once, where it is known that no evaluation is to come."""
        self.ended = None
        if is_known:
            self.ended, self._open = self._open, None
