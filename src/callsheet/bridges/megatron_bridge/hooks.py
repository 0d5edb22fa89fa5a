"""PyTorch hooks on the model, since Megatron Bridge reports no forward or backward passes; and the optimizers to observe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.torch_hooks import Hook, NotCopied

HookMethod = TypeVar("HookMethod", bound=Callable[..., Any])


def _ends_the_run(hook: HookMethod) -> HookMethod:
    """Make an exception in a hook end the run, because Megatron does not report exceptions.

    It is raised if the user must know about it.
    """

    @functools.wraps(hook)
    def called(self: Any, *args: Any) -> Any:
        try:
            return hook(self, *args)
        except Exception as error:
            self._run.driver.give_up(error)  # the hook then returns None, so torch keeps the arguments or outputs

    return called  # type: ignore[return-value]  # the wrapper has the same signature


class MegatronForwardHooks(NotCopied):
    """Observes the calls of a model. Each call is a microbatch in training, or a batch in an evaluation or a test.

    The step's events begin at its first forward, when its data has been fetched. The loss span lasts from the end of the forward to the
    start of the backward, which is when the first gradient reaches the outputs. The backward ends when the autograd engine has finished.
    If nothing listens to loss, backward or the microbatch's end, the microbatch ends with what follows it.
    """

    def __init__(self, run: HostedRun, model: nn.Module) -> None:
        self._run = run
        self._before = Hook(functools.partial(model.register_forward_pre_hook, with_kwargs=True))
        self._after = Hook(model.register_forward_hook)
        self._backward_spans = run.spans.loss, run.spans.backward, run.spans.microbatch
        self.in_step = False
        self.evaluating = ""
        """`eval` or `test` while one of these runs, otherwise empty."""

    def listen(self, has_listeners: bool) -> None:
        """Register the hooks if there are listeners, otherwise remove them."""
        self._before.install(has_listeners, self._begins)
        self._after.install(has_listeners, self._ends)

    def remove(self) -> None:
        """Remove the hooks."""
        self.listen(False)

    @_ends_the_run
    def _begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        batch = kwargs or (args[0] if len(args) == 1 else args)
        if model.training and torch.is_grad_enabled() and run.eval.driver.is_open("eval"):
            # Megatron is training again, and has reported neither the evaluation's end nor the step's start.
            run.eval.leave()
            self.evaluating = ""
        if self.evaluating:
            driver, ctx = run.eval.driver, run.eval.ctx
            if not driver.is_open(f"{self.evaluating}_step"):
                return None
            ctx.batch = batch
            driver.start(f"{self.evaluating}_forward")
            return _replaced(batch, ctx.batch, args, kwargs)
        if not self.in_step or not torch.is_grad_enabled():
            return None
        driver, ctx = run.driver, run.ctx
        ctx.batch = batch
        if not driver.is_open("train_step"):
            driver.start_and_end("fetch")
            driver.start_step()
        if not driver.listens_to("forward"):
            return _replaced(batch, ctx.batch, args, kwargs)
        driver.end("microbatch")  # end the previous microbatch if no backward pass has ended it, to close its fields
        ctx.microbatch = ctx.batch
        driver.start("microbatch")
        driver.start("forward")
        return _replaced(batch, ctx.microbatch, args, kwargs)

    @_ends_the_run
    def _ends(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        run = self._run
        if self.evaluating:
            if run.eval.driver.is_open(f"{self.evaluating}_forward"):
                run.eval.ctx.outputs = outputs
                run.eval.driver.end(f"{self.evaluating}_forward")
                return run.eval.ctx.outputs
        elif run.driver.is_open("forward"):
            run.ctx.outputs = outputs
            run.driver.start("loss")
            outputs = run.ctx.outputs
            if self._listens_to_backward() and (tensor := _with_gradient(outputs)) is not None:
                tensor.register_hook(self._backward_begins)
        return outputs

    def _listens_to_backward(self) -> bool:
        """Return whether a callback listens to the events of the backward pass. If not, its hook is not registered."""
        loss, backward, microbatch = self._backward_spans
        return not (loss.ends is backward.starts is backward.ends is microbatch.ends is None)

    @_ends_the_run
    def _backward_begins(self, gradient: Tensor) -> None:
        if self._run.driver.is_open("loss"):
            self._run.driver.start("backward")
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    @_ends_the_run
    def _backward_ends(self) -> None:
        self._run.driver.end("microbatch")


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the torch optimizers that a Megatron optimizer steps, in order. A torch optimizer is returned itself."""
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    inner = getattr(optimizer, "chained_optimizers", None)
    if inner is None:
        one = getattr(optimizer, "optimizer", None)
        inner = [] if one is None else [one]
    return [each for one in inner for each in torch_optimizers(one)]


def _replaced(batch: Any, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the model's arguments if a callback has replaced the batch, else None."""
    if given is batch:
        return None
    if kwargs:
        return args, dict(given)
    return (given,) if len(args) == 1 else tuple(given), kwargs


def _with_gradient(outputs: Any) -> Tensor | None:
    """Return the first tensor that requires a gradient, or None."""
    if isinstance(outputs, Tensor):
        return outputs if outputs.requires_grad else None
    parts: Iterable[Any] = ()
    if isinstance(outputs, Mapping):
        parts = outputs.values()
    elif isinstance(outputs, (list, tuple)):
        parts = outputs
    return next((found for part in parts if (found := _with_gradient(part)) is not None), None)
