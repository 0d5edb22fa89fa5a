"""What the model returned is let go as soon as the loss is there."""

from __future__ import annotations

import logging

from callsheet.callback import Callback, label_of
from callsheet.context import Context

logger = logging.getLogger("callsheet")


class FreeOutputs(Callback):
    """Let go of the model's outputs when the loss is computed and everybody has been told, before the backward.

    The Trainer does this by itself, unless a callback asks for them until the step's end, with `keep_fields = ("outputs",)`. Then this callback
    overrules it: `ctx.outputs` is None from the loss's end on, and the memory of the logits is the backward's alone. What evaluations
    give is left alone. Without such a callback it has nothing to do, and says so once.
    """

    phase = "restore"

    def __init__(self) -> None:
        self._is_told = False

    def on_train_start(self, ctx: Context) -> None:
        """Say it if there is nothing to do."""
        if "outputs" not in ctx.kept and not self._is_told:
            self._is_told = True
            logger.warning(
                "%s has nothing to do: no callback keeps the outputs, and the loop lets go of them by itself", label_of(self)
            )

    def on_loss_end(self, ctx: Context) -> None:
        """Let go, after everybody else."""
        ctx.outputs = None
