"""Reports a model's forward pass, for a loop that does not report it, through PyTorch's hooks of a model."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.bridges.torch_hooks import Hook, NotCopied, is_traced, not_compiled
from callsheet.core.context import Context

Mode = Literal["train", "eval", "test", "predict"]
"""The purpose for which a model is called."""


def start_forward(driver: LifecycleDriver, ctx: Context) -> None:
    """Fire the start of the forward pass. The host calls this when the loop calls the model within a microbatch.

    A forward pass after a backward pass begins the step's next microbatch, because a loop may split what the host has reported as
    one microbatch.
    """
    spans = driver.spans
    microbatch = spans["microbatch"]
    if microbatch.done == len(microbatch.sequence):
        if spans["backward"].is_open:
            return  # not a new microbatch: activation checkpointing repeats a forward pass during the backward pass
        given = ctx.microbatch if ctx.has("microbatch") else None
        driver.end("microbatch")
        ctx.microbatch = given
        driver.start("microbatch")
        if ctx.microbatch is not given:
            ctx.microbatch = given  # the loop already uses this microbatch, so a callback can no longer replace it
            driver.warn_once(
                "A callback has replaced ctx.microbatch in a loop that takes several microbatches of one batch. The loop has the batch "
                "already, so only what replaces the first microbatch of a step is used. Replace ctx.batch at on_fetch_end instead."
            )
    driver.start("forward")


class ForwardHooks(NotCopied):
    """Reports a model's forward pass to the lifecycle driver, with the model's outputs, which a callback may replace.

    In training, only calls within a microbatch are reported; otherwise, only calls within a step of the evaluation, test or prediction. The
    hooks are registered only between `listen(True)` and `listen(False)`.

    Args:
        mode: the purpose of the calls of the model.
    """

    def __init__(self, driver: LifecycleDriver, ctx: Context, model: nn.Module, mode: Mode = "train") -> None:
        self._driver = driver
        self._ctx = ctx
        self._is_training = mode == "train"
        around, forward = ("microbatch", "forward") if self._is_training else (f"{mode}_step", f"{mode}_forward")
        self._around, self._forward = driver.spans[around], driver.spans[forward]
        self._before, self._after = Hook(model.register_forward_pre_hook), Hook(model.register_forward_hook)
        self._is_traced = False  # whether torch traces the current forward pass

    def listen(self, has_listeners: bool) -> None:
        """Register the hooks in the model if `has_listeners` is true, otherwise remove the hooks."""
        self._before.install(has_listeners, self._begins)
        self._after.install(has_listeners, self._ends)

    @not_compiled
    def _begins(self, model: nn.Module, inputs: Any) -> None:
        self._is_traced = is_traced()
        if self._is_traced:
            return
        try:
            if self._around.is_open:
                if self._is_training:
                    if model.training and torch.is_grad_enabled():
                        start_forward(self._driver, self._ctx)
                elif not model.training:
                    self._driver.start(self._forward.name)
        except Exception as error:
            self._driver.give_up(error)

    @not_compiled
    def _ends(self, model: nn.Module, inputs: Any, outputs: Any) -> Any:
        if self._is_traced:
            return outputs
        try:
            if self._forward.is_open:
                driver, ctx = self._driver, self._ctx
                ctx.outputs = outputs
                if self._is_training:
                    driver.start("loss")  # starting the loss span also ends the forward span
                else:
                    driver.end(self._forward.name)
                return ctx.outputs
        except Exception as error:
            self._driver.give_up(error)
        return outputs

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self.listen(False)
