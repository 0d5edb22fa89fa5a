"""Releases the model's outputs as soon as the loss is computed."""

from __future__ import annotations

import logging

from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context

logger = logging.getLogger("callsheet")


class FreeOutputs(Callback):
    """Release the model's outputs before the backward pass, after all handlers of `on_loss_end` have been called.

    The Trainer releases them anyway, unless a callback keeps the outputs until the step's end with `keep_fields = ("outputs",)`.
    This callback overrides that setting: after `on_loss_end`, `ctx.outputs` is None, so that only the backward pass keeps the
    logits in memory. Outputs of evaluations are not affected. If no callback keeps the outputs, this callback does nothing, and
    logs a warning once.
    """

    phase = "restore"
    required_fields = ("outputs",)

    def __init__(self) -> None:
        self._has_warned = False

    def on_train_start(self, ctx: Context) -> None:
        """Warn if no callback makes the Trainer keep the model's outputs: the Trainer then releases the outputs itself."""
        if "outputs" not in ctx.kept and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s has nothing to do: no callback keeps the outputs, so the loop releases them anyway; remove it", label_of(self)
            )

    def on_loss_end(self, ctx: Context) -> None:
        """Release the model's outputs after all other handlers of this event have been called."""
        ctx.outputs = None
