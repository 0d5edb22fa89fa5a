"""Observes a training loop written by hand that knows nothing of callsheet: the host of `callsheet exec` for such loops."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.support_check import SupportCheck
from callsheet.bridges.torch_hooks import BackwardWatch, Hook, NotCopied, OptimizerHooks, start_forward
from callsheet.core.background import inner
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.lifecycle import EVENTS
from callsheet.core.ranks import read_ranks
from callsheet.errors import HostError, NotSupported, text_of
from callsheet.trainer.tasks import counts_of

logger = logging.getLogger("callsheet")

HOST = "callsheet exec"
EVALUATED = "validation"
"""The name of the dataset in the events of an evaluation; the script's own name for it is unknown."""
_NEVER = tuple(event for event in EVENTS if event.startswith(("on_test", "on_predict", "on_checkpoint_due", "on_preempt")))
"""Events that are never fired, because the script has no place for them."""


class _LoneContext(Context):
    """The context of callbacks that observe one rank of several, without collectives."""

    __slots__ = ()

    def gather(self, value: Any) -> list[Any]:
        """Return the value in a list if there is only one rank. Otherwise raise NotSupported."""
        if self.run.world_size > 1:
            raise NotSupported("ctx.gather() is not supported: it would interleave with the collectives of the script")
        return [value]

    def sibling(self, accumulator: Any = None) -> Context:
        other = super().sibling(accumulator)
        other.__class__ = _LoneContext
        return other


class _LoneRun(HostedRun):
    """A run that is observed on this rank alone."""

    CONTEXT = _LoneContext


class LoopForwardHooks(NotCopied):
    """Reports the calls of the loop's model, in training and in evaluations.

    Args:
        loop: the loop.
        model: the module that the loop calls.
    """

    def __init__(self, loop: BareLoop, model: nn.Module) -> None:
        self._loop = loop
        self._before = Hook(partial(model.register_forward_pre_hook, with_kwargs=True))
        self._after = Hook(model.register_forward_hook)

    def install(self) -> None:
        """Register the hooks."""
        self._before.install(True, self._begins)
        self._after.install(True, self._ends)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._before.remove()
        self._after.remove()

    def _begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._loop.forward_begins(model.training, args, kwargs)

    def _ends(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        self._loop.forward_ends(outputs)


class _LoopBackwardWatch(BackwardWatch):
    """Reports the losses of the loop. If its model's calls are not observed, a loss also begins the step."""

    def __init__(self, loop: BareLoop, scaler: Any) -> None:
        super().__init__(loop.run.driver, loop.run.ctx, scaler)
        self._loop = loop

    def run(self, loss: Tensor, *args: Any, **options: Any) -> bool:
        if not loss.dim() and threading.get_ident() == self._thread:
            self._loop.backward_begins()
        return super().run(loss, *args, **options)


class _LoopOptimizerHooks(OptimizerHooks):
    """Reports the steps of the loop's optimizer."""

    def __init__(self, loop: BareLoop, optimizer: Optimizer, watch: BackwardWatch) -> None:
        self._loop = loop
        super().__init__(loop.run.driver, optimizer, watch=watch, ended=loop.end_step)

    def _begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._loop.begin_step()
        return super()._begins(optimizer, args, kwargs)


class BareLoop:
    """One loop whose model and optimizer were recognized, and its run.

    A step begins when a batch is fetched, or else with a call of the model with gradients. It ends when the optimizer has stepped.
    Calls of the model in evaluation mode without gradients, between two steps, are an evaluation. An epoch ends when the dataloader
    is at its end, or begins again.

    No method that a hook calls raises an error: after an error of callsheet or of a callback, the run ends as failed, all hooks are
    removed, and the script continues.

    Args:
        observers: the callbacks.
        model: the module that the loop calls.
        optimizer: the optimizer that steps.
        scaler: the `torch.amp.GradScaler` that scales the loss, or None.
        loader: the dataloader of the batches, or None.
        run_name: the run's name.
        runs_folder: the folder that contains the run's folder.
        log_interval: how many steps there are from one metrics record to the next.
        config: the script's arguments, which are recorded as settings.
        left: called when the loop is not observed any more, because of an error.
    """

    def __init__(
        self,
        observers: Iterable[Callback],
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: Any,
        loader: Any,
        run_name: str,
        runs_folder: Path,
        log_interval: int,
        config: Mapping[str, Any],
        left: Callable[[], None],
    ) -> None:
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self._left = left
        self._ranks = read_ranks().world_size
        self.run = run = _LoneRun(
            observers,
            model=unwrapped(model),
            optimizer=optimizer,
            host=HOST,
            run_name=run_name,
            runs_folder=runs_folder,
            config=config,
            log_interval=log_interval,
            able=(),
            saves=lambda requests: None,
            is_alone=True,
        )
        self._support = SupportCheck(run.manager, HOST, strict=True, hint="leave the callback out")
        self._is_over = self._is_checked = False
        self._trains_in_eval_mode = not model.training  # as with frozen statistics of batch normalization
        self._has_trained = False  # whether the open step has had a call of the model with gradients, or a loss
        self._in_forward = ""  # the kind of the call of the model that is running: "train", "eval" or ""
        self._is_counted = False  # whether the samples of the open microbatch were counted when its batch was fetched
        self._batch: Any = None
        self._thread = threading.get_ident()
        run.fails_by(self._leave)
        self._watch = _LoopBackwardWatch(self, scaler)
        self._watch.listen(False)
        self._forward = LoopForwardHooks(self, model)
        self._hooks: list[Any] = [self._watch, self._forward]
        # Hooks of a model that was compiled in place would be compiled with it.
        self._sees_forward = getattr(model, "_compiled_call_impl", None) is None

    # --- beginning and end ---

    def begin(self, loss: Tensor | None, batch: Any, *, has_closure: bool) -> None:
        """Begin the run within the first step of the optimizer. The events of that step so far are fired now.

        Args:
            loss: the loss of the step, unscaled and detached.
            batch: the latest batch, or None.
            has_closure: whether the optimizer evaluates a closure, so that forward and backward come later.

        Raises:
            CallsheetError: a callback cannot work here; the message names it.
        """
        run = self.run
        for each in run.manager.callbacks:
            if each.collective and self._ranks > 1:
                raise NotSupported(
                    f"{label_of(each)} calls collectives, and {HOST} observes one rank only; leave the callback out"
                )
            if inner(each).requests and not _only_observes(each):
                asked = ", ".join(f"ctx.control.{request}" for request in inner(each).requests)
                raise NotSupported(
                    f"{label_of(each)} asks for {asked}, which a loop written by hand cannot carry out under {HOST}; use callsheet.attach"
                )
        self._support.before_run(_NEVER, run.control)
        run.begin()
        if self._sees_forward:
            self._forward.install()
        self._watch.listen(True)
        self._optimizer_hooks = _LoopOptimizerHooks(self, self.optimizer, self._watch)
        self._hooks.append(self._optimizer_hooks)
        run.losses = self._watch.reader
        self._batch = batch
        self._is_counted = batch is not None
        self._open_step(counts_of(batch) if batch is not None else (0, 0))
        if not has_closure:
            driver, ctx = run.driver, run.ctx
            if driver.listens_to("microbatch"):
                driver.start("microbatch")
                driver.start("loss")
                if loss is not None:
                    ctx.loss = loss
                driver.start("backward")
                driver.end("backward")
            self._has_trained = True
            self._watch.total = loss

    def finish(self, error: BaseException | None) -> None:
        """End the run because the script has ended, perhaps with an error."""
        if self._is_over:
            return
        run = self.run
        try:
            self._leave_evaluation()
            if error is not None:
                run.fail(error)
            else:
                if run.driver.is_open("train_step"):
                    run.step_skipped = True  # the script has ended before the optimizer's step
                if run.driver.is_open("epoch"):
                    run.end_epoch(is_whole=True)
                run.finish()
        except Exception as fault:
            self._leave(fault)
        finally:
            self._release()

    def _leave(self, error: Exception) -> None:
        """End the run because of an error of callsheet or a callback. The script continues."""
        if self._is_over:
            return
        self._release()
        run = self.run
        message = (
            f"{HOST} no longer observes this script after step {run.state.timestamp.batch} ({type(error).__name__}: {text_of(error)}). "
            "The script continues without callbacks"
        )
        logger.error("%s", message, exc_info=error)
        given_up = HostError(message)
        given_up.__cause__ = error
        try:
            run.fail(given_up)
        except Exception as fault:
            logger.error("The run could not be ended in order: %s", text_of(fault), exc_info=fault)
        self._left()

    def _release(self) -> None:
        self._is_over = True
        for hook in self._hooks:
            hook.remove()

    # --- what the hooks report ---

    def fetch(self, loader: Any, fetches: Callable[[], Any]) -> Any:
        """Fetch a batch of `loader` with `fetches()` and return it. It raises what that raises."""
        if self._is_over or threading.get_ident() != self._thread or (loader is not self.loader and not self._adopts(loader)):
            return fetches()
        if self.run.driver.is_open("train_step"):
            batch = fetches()  # a further microbatch of the step
            self._guarded(self._add_batch, batch)
            return batch
        self._guarded(self._begin_fetch)
        try:
            batch = fetches()
        except StopIteration:
            self._guarded(self.end_epoch)
            raise
        self._guarded(self._end_fetch, batch)
        return batch

    def begin_step(self) -> None:
        """Begin a step, unless one is open."""
        if not self._is_over and not self.run.driver.is_open("train_step"):
            self._guarded(self._open_step, (0, 0))

    def forward_begins(self, is_training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Report that the model is called."""
        if self._is_over or threading.get_ident() != self._thread:
            return
        self._guarded(self._begin_forward, is_training, args, kwargs)

    def forward_ends(self, outputs: Any) -> None:
        """Report that a call of the model has returned."""
        if self._is_over or threading.get_ident() != self._thread:
            return
        self._guarded(self._end_forward, outputs)

    def backward_begins(self) -> None:
        """Report that `backward` is called on a loss."""
        if self._is_over or self._watch.is_in_closure:
            return
        if not self._sees_forward:
            self.begin_step()
        driver = self.run.driver
        if driver.is_open("train_step"):
            self._has_trained = True
            if driver.listens_to("microbatch") and not driver.is_open("microbatch"):
                self._guarded(driver.start, "microbatch")

    def gradients_are_discarded(self) -> None:
        """Report that the gradients are set to zero, so that earlier losses do not belong to the coming step."""
        if not self._is_over and not self._watch.is_in_closure:
            self._watch.total = None

    def optimizer_was_skipped(self, scaler: Any) -> None:
        """Report that a loss scaler has called the optimizer or skipped it."""
        self._watch._scaler = scaler
        if not self._is_over and self.run.driver.is_open("train_step") and self._has_trained:
            self._guarded(self._end_skipped_step)

    def clip(self, clips: Callable[[], Any]) -> Any:
        """Clip the gradients with `clips()` and return the norm before that. It raises what that raises."""
        is_in_step = not self._is_over and self.run.driver.is_open("train_step") and threading.get_ident() == self._thread
        if is_in_step:
            self._guarded(self.run.driver.start, "clip_gradients")
        norm = clips()
        if is_in_step and not self._is_over:
            self.run.grad_norm = norm
            self._guarded(self.run.driver.end, "clip_gradients")
        return norm

    def end_epoch(self) -> None:
        """End the epoch, because the dataloader is at its end or begins again. Within a step, do nothing."""
        driver = self.run.driver
        if self._is_over or driver.is_open("train_step") or not driver.is_open("epoch"):
            return
        self._leave_evaluation()
        driver.end("fetch")
        self.run.end_epoch(is_whole=True)

    def end_step(self) -> None:
        """End the step, because the optimizer has stepped."""
        run = self.run
        run.step_skipped = not self._optimizer_hooks.has_stepped
        self._watch.is_on = not self._sees_forward
        run.end_step()
        if not self._is_checked:
            self._is_checked = True
            run.driver.synthesized.clear()  # the first step was recognized only when the optimizer stepped
        self._watch.total = None

    # --- what they do ---

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            self._leave(error)

    def _adopts(self, loader: Any) -> bool:
        """Return whether `loader` is the one of the training, because none was seen before."""
        if self.loader is None and self.model.training and torch.is_grad_enabled():
            self.loader = loader
        return loader is self.loader

    def _begin_fetch(self) -> None:
        self._leave_evaluation()
        self._listen()
        driver = self.run.driver
        if driver.listens_to("fetch"):
            driver.start("fetch")

    def _end_fetch(self, batch: Any) -> None:
        run = self.run
        run.ctx.batch = batch
        if run.driver.listens_to("fetch"):
            run.driver.end("fetch")
        self._batch, self._is_counted = batch, True
        self._open_step(counts_of(batch))

    def _add_batch(self, batch: Any) -> None:
        self._batch = batch
        if self._is_counted:
            self._count(counts_of(batch))
        self._is_counted = True

    def _count(self, counts: tuple[int, int]) -> None:
        samples, tokens = self.run.counted
        self.run.counted = samples + counts[0] * self._ranks, tokens + counts[1] * self._ranks

    def _listen(self) -> None:
        if self.run.driver.listen():
            self._optimizer_hooks.listen(self.run.driver.is_read)
            self._watch.listen(self.run.driver.is_loss_read)

    def _open_step(self, counts: tuple[int, int]) -> None:
        run = self.run
        self._leave_evaluation()
        self._listen()
        run.driver.start_step()
        run.counted = (0, 0)
        self._count(counts)
        self._optimizer_hooks.has_stepped, self._watch.total = False, None
        self._watch.is_on, self._has_trained = True, False
        if self._batch is not None:
            run.ctx.batch = self._batch

    def _begin_forward(self, is_training: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled():
            if is_training or self._trains_in_eval_mode:
                self._in_forward = "train"
                self._begin_training_forward(args, kwargs)
        elif not is_training and not self.run.driver.is_open("train_step"):
            self._in_forward = "eval"
            self._begin_eval_forward(args, kwargs)

    def _begin_training_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        run = self.run
        driver, ctx = run.driver, run.ctx
        if not driver.is_open("train_step"):
            self._batch, self._is_counted = None, False
            self._open_step((0, 0))
        is_next = driver.listens_to("microbatch") and driver.parts["microbatch"].done == len(driver.parts["microbatch"].sequence)
        if not self._is_counted and (not self._has_trained or is_next):  # no batch was fetched for this microbatch
            self._batch = _batch_of(args, kwargs)
            self._count(counts_of(self._batch))
        self._is_counted = self._is_counted and not self._has_trained
        self._has_trained = True
        if not ctx.has("batch"):
            ctx.batch = self._batch
        if driver.listens_to("microbatch"):
            if not driver.is_open("microbatch"):
                ctx.microbatch = self._batch
                driver.start("microbatch")
            start_forward(driver, ctx)

    def _begin_eval_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        evaluation = self.run.eval
        if not evaluation.driver.is_open("eval"):
            evaluation.begin(EVALUATED)
        if evaluation.driver.is_open("eval"):
            evaluation.ctx.batch = _batch_of(args, kwargs)
            evaluation.driver.start("eval_step")
            evaluation.driver.start("eval_forward")

    def _end_forward(self, outputs: Any) -> None:
        kind, self._in_forward = self._in_forward, ""
        if kind == "train":
            driver = self.run.driver
            if driver.parts["forward"].is_open:
                self.run.ctx.outputs = outputs
                driver.start("loss")  # this also ends the forward span
        elif kind == "eval":
            evaluation = self.run.eval
            if evaluation.driver.is_open("eval_forward"):
                evaluation.ctx.outputs = outputs
                evaluation.driver.end("eval_forward")
                evaluation.driver.end("eval_step")

    def _leave_evaluation(self) -> None:
        evaluation = self.run.eval
        if evaluation.driver.is_open("eval_all"):
            if evaluation.driver.is_open("eval"):
                evaluation.end_dataset(EVALUATED, {})
            evaluation.end()

    def _end_skipped_step(self) -> None:
        self._optimizer_hooks.has_stepped = False
        self.end_step()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers such as DistributedDataParallel, DataParallel and that of `torch.compile`."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if inside is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inside = getattr(model, "module", None)
        if not isinstance(inside, nn.Module):
            return model
        model = inside


def _only_observes(callback: Callback) -> bool:
    """Return whether the callback was told to warn instead of acting, although its class may act."""
    return getattr(inner(callback), "_action", "") == "warn"


def _batch_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what the model was called with as a batch: its one argument, all of its arguments, or the named ones."""
    return args[0] if len(args) == 1 and not kwargs else args or dict(kwargs)
