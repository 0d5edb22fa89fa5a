"""Hooks that fire events when a loop calls its model, for frameworks that do not report their microbatches."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import nn

from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.torch_hooks import Hook, NotCopied


class ModelCalls(NotCopied):
    """The base class of hooks that treat each call of the model as a microbatch in training, or as a batch in an evaluation.

    A subclass decides in `begin_call` which of the two a call is. The host handles an error in a hook, and the call continues.

    Args:
        run: the run whose events are fired.
        model: the model that the loop calls.
    """

    eval_forward = "eval_forward"
    """The name of the span for a forward pass in the evaluation that is running."""

    def __init__(self, run: HostedRun, model: nn.Module) -> None:
        self._run: HostedRun = weakref.proxy(run)
        self._before = Hook(functools.partial(model.register_forward_pre_hook, with_kwargs=True))
        self._after = Hook(model.register_forward_hook)

    def begin_call(self, model: nn.Module, batch: Any) -> Any:
        """Fire the events at the start of a call of `model`. Return `batch` or, if a callback has replaced it, the new batch."""
        raise NotImplementedError

    def start_forward(self) -> Any:
        """Start a microbatch and its forward pass, and return the microbatch, which a callback may have replaced."""
        run = self._run
        driver, ctx = run.driver, run.ctx
        # End the previous microbatch, whose end the framework may not have reported. This makes its fields unavailable.
        driver.end("microbatch")
        ctx.microbatch = ctx.batch
        driver.start("microbatch")
        driver.start("forward")
        return ctx.microbatch

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._before.remove()
        self._after.remove()

    def _begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_inert:
            return None
        try:
            batch = kwargs or (args[0] if len(args) == 1 else args)
            given = self.begin_call(model, batch)
            return None if given is batch else _arguments(given, args, kwargs)
        except Exception as error:
            self._run.driver.give_up(error)
            return None

    def _ends(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        if self.is_inert:
            return outputs
        try:
            run = self._run
            if run.eval.driver.spans[self.eval_forward].is_open:
                run.eval.ctx.outputs = outputs
                run.eval.driver.end(self.eval_forward)
                return run.eval.ctx.outputs
            if run.driver.spans["forward"].is_open:
                run.ctx.outputs = outputs
                run.driver.start("loss")  # starting the loss span also ends the forward span
                return run.ctx.outputs
        except Exception as error:
            self._run.driver.give_up(error)
        return outputs


def _arguments(given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the `args` and `kwargs` of a model call, with the batch in them replaced by `given`."""
    if kwargs:
        return args, dict(given)
    return ((given,) if len(args) == 1 else tuple(given)), kwargs
