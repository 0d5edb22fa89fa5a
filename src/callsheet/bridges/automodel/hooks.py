"""Where an AutoModel recipe is between the moments that it tells: heard from its model, which it calls with each batch."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.lifecycle_driver import SEQUENCE
from callsheet.bridges.torch_hooks import BackwardWatch, Hook, NotCopied, OptimizerHooks
from callsheet.bridges.wrapped_methods import WrappedMethods
from callsheet.trainer.tasks import counts_of

_WITH_BACKWARD = len(SEQUENCE["microbatch"])


class CalledModel(NotCopied):
    """Hears the model being called: in training a microbatch, the first of which begins a step; else a batch of an evaluation.

    Args:
        scheduler: the recipe's, for its epoch.
        model: what the recipe calls.
        optimizer: the hooks of what it steps.
        sets: the validation sets' names; of several the batches are not told, since nobody says whose they are.
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
        self._run: HostedRun = weakref.proxy(run)
        self._watch: BackwardWatch = weakref.proxy(watch)
        self._scheduler = scheduler
        self._sets = sets
        self._epoch = scheduler.epoch
        self._is_in_step = False
        self._counted = 0  # microbatches of the step in hand
        self.is_validating = False
        """Whether the recipe validates: a call in evaluation mode at any other time is not the recipe's."""
        self.is_wrapped = False
        """Whether the recipe's methods say when it trains and validates; else that is inferred from its events and the model's mode."""
        self._is_training = False
        self._listens_to_forward = True
        self._optimizer = optimizer
        self.is_inert = False
        """Whether a callback is being told something, so that the model's calls are not the loop's."""
        self._before = Hook(functools.partial(model.register_forward_pre_hook, with_kwargs=True))
        self._before.install(True, self._begins)
        self._after = Hook(model.register_forward_hook)

    def wrap(self, recipe: Any) -> WrappedMethods:
        """Have the recipe's methods say when it trains and validates, where it has them."""
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
        """The loop has told that the step is over."""
        if not self._is_in_step:  # and the model was not called as a whole
            run = self._run
            self._begin_step(run)
            run.ctx.batch = None
            run.driver.tell("fetch")
            run.driver.synthesized.add("fetch")
            run.driver.start_step()
        self._is_in_step = self._watch.is_on = False

    def _begins(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.is_inert:
            return None
        try:
            return self._report(model, args, kwargs)
        except Exception as error:
            self._run.driver.give_up(error)
            return None

    def _report(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        batch = kwargs if kwargs or not args else args[0]
        if not model.training:
            return self._evaluates(batch, args) if self.is_validating else None
        if not torch.is_grad_enabled() or self._is_training is not self.is_wrapped or self._is_of_this_microbatch():
            return None
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
            if not driver.parts["fetch"].has_no_listeners:
                driver.tell("fetch")
            driver.start_step()
        if self._listens_to_forward:
            driver.end("microbatch")  # the one before, whose fields are gone with it
            ctx.microbatch = ctx.batch
            driver.start("microbatch")
            driver.start("forward")
            given = ctx.microbatch
        else:
            given = ctx.batch
        return None if given is batch else _replaced(given, args)

    def _is_of_this_microbatch(self) -> bool:
        """Whether the model is called again before the microbatch has gone backward, or while it does, as with a contrastive loss."""
        parts = self._run.driver.parts
        return parts["microbatch"].is_open and (parts["backward"].is_open or parts["microbatch"].done < _WITH_BACKWARD)

    def _begin_step(self, run: HostedRun) -> None:
        if run.eval_driver.is_open("eval_all"):  # a validation of which no end was reported
            run.end_evaluation()
        driver, watch = run.driver, self._watch
        if self._scheduler.epoch != self._epoch:
            if driver.is_open("epoch"):  # its end did not show: nobody knew how long the data is
                run.end_epoch(is_whole=True)
            self._epoch = self._scheduler.epoch
        if not driver.parts["epoch"].is_open:
            driver.start("epoch")
        if driver.listen():
            self._listens_to_forward = driver.listens_to("forward")
            watch.listen(
                driver.listens_to("clip_gradients") or driver.listens_to("optimizer_step")
            )  # or to what comes before them
            self._optimizer.listen(driver.is_read)
        self._is_in_step = True
        watch.total, watch.is_on = None, True
        if self._listens_to_forward is not self._after.stands:
            self._after.install(self._listens_to_forward, self._ends)

    def _ends(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        if self.is_inert:
            return outputs
        try:
            run = self._run
            if not model.training:
                if run.eval_driver.is_open("eval_forward"):
                    run.eval_ctx.outputs = outputs
                    run.eval_driver.end("eval_forward")
                    return run.eval_ctx.outputs
            elif run.driver.is_open("forward"):
                run.ctx.outputs = outputs
                run.driver.start("loss")  # which ends the forward
                return run.ctx.outputs
        except Exception as error:
            self._run.driver.give_up(error)
        return outputs

    def _evaluates(self, batch: Any, args: Any) -> Any:
        run = self._run
        driver = run.eval_driver
        if len(self._sets) > 1:
            run.begin_evaluations()
        if len(self._sets) != 1:
            return None
        if not driver.is_open("eval"):
            run.begin_evaluation(self._sets[0])
        driver.end("eval_step")
        run.eval_ctx.batch = batch
        driver.start("eval_forward")
        self._after.install(run.listens_to_outputs("eval"), self._ends)  # as it is now: a batch's callbacks may mute and unmute
        given = run.eval_ctx.batch
        return None if given is batch else _replaced(given, args)

    def remove(self) -> None:
        """Leave the model as it was."""
        self._before.remove()
        self._after.remove()
        self._optimizer.remove()


def _replaced(given: Any, args: Any) -> Any:
    """What a pre-hook returns for another batch."""
    return (args, dict(given)) if isinstance(given, Mapping) else ((given, *args[1:]), {})
