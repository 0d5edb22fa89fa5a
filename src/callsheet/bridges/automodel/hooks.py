"""Hooks on the model of an AutoModel recipe. They report microbatches and forward passes, for which AutoModel has no hooks."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from callsheet.bridges.backward_watch import BackwardWatch
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.lifecycle_driver import SEQUENCE
from callsheet.bridges.model_calls import ModelCalls
from callsheet.bridges.optimizer_hooks import OptimizerHooks
from callsheet.bridges.wrapped_methods import WrappedMethods
from callsheet.trainer.tasks import counts_of

_SPANS_PER_MICROBATCH = len(SEQUENCE["microbatch"])


class CalledModel(ModelCalls):
    """Fires the events of steps, microbatches and evaluation batches when the recipe calls the model.

    In training, a call is a microbatch, and the first one begins a step. Otherwise, a call is a batch of an evaluation.

    Args:
        scheduler: the recipe's step scheduler, from which the current epoch is read.
        model: the model that the recipe calls.
        optimizer: the hooks of the optimizer that the recipe steps.
        sets: the names of the validation sets. With several sets the events of their batches are not fired, since the recipe does not
            report which set a batch belongs to.
    """

    def __init__(
        self,
        run: HostedRun,
        watch: BackwardWatch,
        scheduler: Any,
        model: nn.Module,
        optimizer: OptimizerHooks,
        sets: list[str],
    ) -> None:
        super().__init__(run, model)
        self._watch: BackwardWatch = weakref.proxy(watch)
        self._scheduler = scheduler
        self._sets = sets
        self._epoch = scheduler.epoch
        self._is_in_step = False
        self._counted = 0  # how many microbatches the current step has had so far
        self.is_validating = False
        """Whether the recipe is validating.

        At any other time, a call of the model in evaluation mode does not come from the recipe.
        """
        self.is_wrapped = False
        """Whether the recipe's methods for training and validation are wrapped, so that the wrappers show which one is running.

        Otherwise, callsheet infers which one is running from hooks and the model's mode.
        """
        self._is_training = False
        self._listens_to_forward = True
        self._optimizer = optimizer
        self.is_inert = False
        """Whether a callback is being called now. If so, calls of the model come from the callback and not from the training loop."""
        self._before.install(True, self._begins)

    def wrap(self, recipe: Any) -> WrappedMethods:
        """Wrap the recipe's methods for training and validation, if the recipe has both, to find out which one is running."""
        methods, self_now = WrappedMethods(recipe), weakref.proxy(self)

        def within(name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            setattr(self_now, name, True)
            try:
                return method(*args, **kwargs)
            finally:
                setattr(self_now, name, False)

        ours = {"_run_train_optim_step": "_is_training", "_run_validation_epoch": "is_validating"}
        self.is_wrapped = all(hasattr(recipe, name) for name in ours)
        for name, flag in ours.items() if self.is_wrapped else ():
            methods.wrap(name, functools.partial(within, flag))
        return methods

    def end_step(self) -> None:
        """End the step, because the recipe has called `on_train_batch_end`."""
        if not self._is_in_step:  # begin the step here if no call of the model has begun it
            run = self._run
            self._begin_step(run)
            run.ctx.batch = None
            run.driver.start_and_end("fetch")
            run.driver.synthesized.add("fetch")
            run.driver.start_step()
        self._is_in_step = self._watch.is_on = False

    def begin_call(self, model: nn.Module, batch: Any) -> Any:
        if not model.training:
            return self._evaluate(batch) if self.is_validating else batch
        if not torch.is_grad_enabled() or self._is_training is not self.is_wrapped or self._is_of_this_microbatch():
            return batch
        run = self._run
        driver, ctx = run.driver, run.ctx
        is_first = not self._is_in_step
        if is_first:
            self._begin_step(run)
            run.counted, self._counted = counts_of(batch), 1
        elif self._counted < getattr(self._scheduler, "grad_acc_steps", sys.maxsize):
            samples, tokens = counts_of(batch)
            run.counted = (run.counted[0] + samples, run.counted[1] + tokens)
            self._counted += 1
        ctx.batch = batch
        if is_first:
            if not driver.spans["fetch"].has_no_listeners:
                driver.start_and_end("fetch")
            driver.start_step()
        return self.start_forward() if self._listens_to_forward else ctx.batch

    def _is_of_this_microbatch(self) -> bool:
        """Return whether the model is called again for the current microbatch, whose backward pass has not ended yet.

        A contrastive loss, for example, calls the model several times for one microbatch.
        """
        spans = self._run.driver.spans
        return spans["microbatch"].is_open and (spans["backward"].is_open or spans["microbatch"].done < _SPANS_PER_MICROBATCH)

    def _begin_step(self, run: HostedRun) -> None:
        if run.eval.driver.is_open("eval_all"):  # the recipe has not reported the validation's end, so end it here
            run.eval.end()
        driver, watch = run.driver, self._watch
        if self._scheduler.epoch != self._epoch:
            # If the number of steps in an epoch is unknown, the host cannot know the last step. So the previous epoch may still
            # be open here: end it.
            if driver.is_open("epoch"):
                run.end_epoch(is_whole=True)
            self._epoch = self._scheduler.epoch
        if not driver.spans["epoch"].is_open:
            driver.start("epoch")
        if driver.listen():
            self._listens_to_forward = driver.listens_to("forward")
            # Both results are also True if the backward pass has listeners, because the start of either span ends the backward pass.
            watch.listen(driver.listens_to("clip_gradients") or driver.listens_to("optimizer_step"))
            self._optimizer.listen(driver.is_read)
        self._is_in_step = True
        watch.total, watch.is_on = None, True
        if self._listens_to_forward is not self._after.is_registered:
            self._after.install(self._listens_to_forward, self._ends)

    def _evaluate(self, batch: Any) -> Any:
        run = self._run
        driver = run.eval.driver
        if len(self._sets) > 1:
            run.eval.begin_all()
        if len(self._sets) != 1:
            return batch
        if not driver.is_open("eval"):
            run.eval.begin(self._sets[0])
        driver.end("eval_step")
        run.eval.ctx.batch = batch
        driver.start("eval_forward")
        # Look for listeners at each batch, because callbacks may have been muted or unmuted since the last batch.
        self._after.install(run.eval.listens_to_outputs("eval"), self._ends)
        return run.eval.ctx.batch

    def remove(self) -> None:
        super().remove()
        self._optimizer.remove()
