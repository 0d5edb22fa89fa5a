"""PyTorch hooks on the model that report its forward and backward passes, which Megatron Bridge does not report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.model_calls import ModelCalls


class MegatronForwardHooks(ModelCalls):
    """Fires the events of the model's calls: each call is a microbatch in training, or a batch in an evaluation or a test.

    A step starts at its first forward pass, when its data has been fetched. The loss span lasts from the end of the forward pass
    to the start of the backward pass, when the first gradient reaches the outputs. The backward pass ends when the autograd
    engine has finished. If no callback listens to loss, backward pass or the microbatch's end, the microbatch ends when the next
    span starts.
    """

    def __init__(self, run: HostedRun, model: nn.Module) -> None:
        super().__init__(run, model)
        self._backward_spans = run.spans.loss, run.spans.backward, run.spans.microbatch
        self.in_step = False
        self._evaluating = ""

    @property
    def evaluating(self) -> str:
        """`eval` during an observed evaluation, `test` during an observed test, otherwise empty."""
        return self._evaluating

    @evaluating.setter
    def evaluating(self, kind: str) -> None:
        self._evaluating, self.eval_forward = kind, f"{kind or 'eval'}_forward"

    def listen(self, has_listeners: bool) -> None:
        """Register the hooks if `has_listeners` is true, otherwise remove the hooks."""
        self._before.install(has_listeners, self._begins)
        self._after.install(has_listeners, self._ends)

    def begin_call(self, model: nn.Module, batch: Any) -> Any:
        run = self._run
        if model.training and torch.is_grad_enabled() and run.eval.driver.is_open("eval"):
            # Training continues, although Megatron has not reported the end of the evaluation. So end the evaluation here.
            run.eval.leave()
            self.evaluating = ""
        if self._evaluating:
            driver, ctx = run.eval.driver, run.eval.ctx
            if not driver.is_open(f"{self._evaluating}_step"):
                return batch
            ctx.batch = batch
            driver.start(self.eval_forward)
            return ctx.batch
        if not self.in_step or not torch.is_grad_enabled():
            return batch
        driver, ctx = run.driver, run.ctx
        ctx.batch = batch
        if not driver.is_open("train_step"):
            driver.start_and_end("fetch")
            driver.start_step()
        return self.start_forward() if driver.listens_to("forward") else ctx.batch

    def _ends(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        outputs = super()._ends(model, args, outputs)
        is_over = not self.is_inert and self._run.driver.awaits_backward
        if is_over and self._listens_to_backward() and (tensor := _with_gradient(outputs)) is not None:
            tensor.register_hook(self._backward_begins)
        return outputs

    def _listens_to_backward(self) -> bool:
        """Return whether a callback listens to the events of the backward pass. If not, no hook for this pass is registered."""
        loss, backward, microbatch = self._backward_spans
        return not (loss.ends is backward.starts is backward.ends is microbatch.ends is None)

    def _backward_begins(self, gradient: Tensor) -> None:
        try:
            driver = self._run.driver
            if driver.awaits_backward:
                driver.start("backward")
                engine = getattr(torch.autograd.Variable, "_execution_engine", None)
                if engine is not None:
                    engine.queue_callback(self._backward_ends)
                else:
                    driver.warn_once(
                        "torch.autograd.Variable has no _execution_engine, so the end of a backward pass is not observed. Its events are "
                        "fired when the next part of the step starts"
                    )
        except Exception as error:
            self._run.driver.give_up(error)

    def _backward_ends(self) -> None:
        try:
            self._run.driver.end("microbatch")
        except Exception as error:
            self._run.driver.give_up(error)


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the torch optimizers inside a Megatron optimizer, in the order of their steps. For a torch optimizer, return only itself."""
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    inner = getattr(optimizer, "chained_optimizers", None)
    if inner is None:
        one = getattr(optimizer, "optimizer", None)
        inner = [] if one is None else [one]
    return [each for one in inner for each in torch_optimizers(one)]


def _with_gradient(outputs: Any) -> Tensor | None:
    """Return the first tensor in the model's `outputs` that requires a gradient, or None."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.requires_grad else None
    parts: Iterable[Any] = ()
    if isinstance(outputs, Mapping):
        parts = outputs.values()
    elif isinstance(outputs, (list, tuple)):
        parts = outputs
    return next((found for part in parts if (found := _with_gradient(part)) is not None), None)
