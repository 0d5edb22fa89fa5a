"""Hooks that observe the forward pass, the backward pass and the optimizer's step, for frameworks that do not report them."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from callsheet.bridges.backward_watch import BackwardWatch
from callsheet.bridges.forward_hooks import ForwardHooks
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.optimizer_hooks import OptimizerHooks


class TrainingHooks:
    """Observes the model's forward pass, the backward pass of each loss and the optimizer's step, until `remove` is called.

    The loss of a step of the run is the sum of the losses in this step.

    Args:
        run: the run.
        model: the model that the loop calls.
        optimizer: the optimizer that the loop steps, or None.
        scaler: the `torch.amp.GradScaler` that scales the loss, or an object like it, or None.
    """

    def __init__(self, run: HostedRun, model: nn.Module, optimizer: Optimizer | None, scaler: Any = None) -> None:
        self._driver = run.driver
        self.forward = ForwardHooks(run.driver, run.ctx, model)
        self.backward = BackwardWatch(run.driver, run.ctx, scaler)
        self.optimizer = OptimizerHooks(run.driver, *([] if optimizer is None else [optimizer]), watch=self.backward)
        self.is_scaled = scaler is not None
        """Whether a loss scaler may skip steps of the optimizer."""
        self.listens_to_microbatch = True
        """Whether the host has to report microbatches, because an event inside them has listeners."""
        run.losses = self.backward.reader

    def listen(self) -> None:
        """Register the hooks that are needed, and remove the others. The host calls this when `driver.listen()` returns True."""
        driver = self._driver
        self.listens_to_microbatch = driver.listens_to("microbatch")
        self.forward.listen(self.listens_to_microbatch)
        self.optimizer.listen(driver.is_read)
        self.backward.listen(driver.is_loss_read)

    def remove(self) -> None:
        """Remove all hooks."""
        for hooks in (self.optimizer, self.forward, self.backward):
            hooks.remove()
