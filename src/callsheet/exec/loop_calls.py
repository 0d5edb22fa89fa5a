"""Observes the calls of a training loop's model, and recognizes training steps and evaluations by them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from callsheet.bridges.forward_hooks import start_forward
from callsheet.bridges.torch_hooks import Hook, NotCopied, is_traced, not_compiled
from callsheet.exec.loop_batches import batch_of

if TYPE_CHECKING:
    from callsheet.exec.bare_loop import BareLoop

logger = logging.getLogger("callsheet")


class LoopCalls(NotCopied):
    """Notifies a loop of the calls of its model, through hooks that are registered only while the loop needs them.

    A call with gradients enabled belongs to a training step. A call in evaluation mode without gradients, between two steps, belongs
    to an evaluation.

    Args:
        loop: the loop.
        model: the module that the loop calls.
    """

    def __init__(self, loop: BareLoop, model: nn.Module) -> None:
        self._loop = loop
        self._guard = loop.guard
        self._model = model
        self._models: list[nn.Module] = [model]
        # Scripts often evaluate with the module inside the wrapper, for example on one rank only.
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)) and _may_have_hooks(model.module):
            self._models.append(model.module)
        self._before = [Hook(partial(each.register_forward_pre_hook, with_kwargs=True)) for each in self._models]
        self._after = [Hook(each.register_forward_hook) for each in self._models]
        self.are_observable = _may_have_hooks(model)
        """Whether hooks can observe the calls of the model."""
        if isinstance(model, torch.jit.ScriptModule):
            logger.warning("%s trains a ScriptModule, so its forward passes and evaluations are not observed", loop.run.host)
        self.are_observed = self.are_observable
        """Whether hooks observe the model's calls now. If not, the first `backward` begins the step."""
        # Some scripts train a model in evaluation mode, for example to freeze the statistics of batch normalization.
        self._trains_in_eval_mode = not model.training
        self.are_regular = loop.batches.has_loader and not self._trains_in_eval_mode
        """Whether all steps so far were regular: for each loss, the loop fetched a new batch and called the model once."""
        self.was_called = False
        """Whether the model was called with gradients since the last step ended."""
        self._purpose: Literal["train", "eval", ""] = ""  # the purpose of the running forward pass; empty if none is running
        self._called = model  # the module whose call has begun the running forward pass

    def install(self, *, needs_calls: bool, needs_outputs: bool) -> None:
        """Register a hook that is called before the model, if `needs_calls`, and one that is called after it, if `needs_outputs`."""
        for before, after in zip(self._before, self._after, strict=True):
            before.install(needs_calls, self._begins)
            after.install(needs_outputs, self._ends)
        if not needs_calls:
            self.are_observed = False

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in (*self._before, *self._after):
            hook.remove()

    def give_up(self) -> None:
        """Remove the hooks from the model and never register them again, because the script does not call the model itself."""
        self.are_observable = self.are_observed = False
        self.remove()
        logger.warning(
            "%s does not call %s itself, so its forward passes and evaluations are not observed",
            self._loop.run.host,
            type(self._loop.run.model).__name__,
        )

    @property
    def would_train(self) -> bool:
        """Whether a call of the model now would be for training."""
        return torch.is_grad_enabled() and (self._model.training or self._trains_in_eval_mode)

    @not_compiled
    def _begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The model's forward pre-hook: find out whether this call begins a training step, a microbatch or a batch of an evaluation."""
        # The script may copy this model's attributes, with the hooks, into another model. Ignore calls of that other model.
        if is_traced() or get_ident() != self._guard.thread_id or model not in self._models:
            return
        loop = self._loop
        if model is not self._model and (self._purpose or loop.step.is_open or torch.is_grad_enabled() or model.training):
            return  # the wrapper calls the module inside it, or the script calls that module in training
        self._called = model
        try:
            if not self.are_observed:
                self.are_observed = True
                self.was_called = loop.step.is_open  # this step may have called the model before the hook was registered
            is_training = model.training
            if not torch.is_grad_enabled():
                if not is_training and not loop.step.is_open:
                    self._purpose = "eval"
                    loop.begin_evaluated_batch(batch_of(args, kwargs))
            elif is_training or self._trains_in_eval_mode:
                self.was_called = True
                loop.begin_microbatch(args, kwargs)
                driver = loop.run.driver
                if not driver.spans["microbatch"].has_no_listeners:
                    self._purpose = "train"
                    start_forward(driver, loop.run.ctx)
        except (Exception, SystemExit) as error:
            self._guard.fail(error)

    @not_compiled
    def _ends(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """The model's forward hook: end the forward pass of a microbatch, or the batch of an evaluation."""
        if is_traced() or get_ident() != self._guard.thread_id:
            return
        if self._purpose and model is self._called:
            self._guard.call(self._end_forward, outputs)

    def _end_forward(self, outputs: Any) -> None:
        purpose, self._purpose = self._purpose, ""
        if purpose == "eval":
            self._loop.evaluations.end_batch(outputs)
            return
        run = self._loop.run
        if run.driver.spans["forward"].is_open:
            run.ctx.outputs = outputs
            run.driver.start("loss")  # starting the span `loss` also ends the span `forward`


def _may_have_hooks(model: nn.Module) -> bool:
    """Return whether hooks may be registered on a model.

    torch.compile would also compile the hooks of a model that was compiled in place, and torch allows no hooks on a ScriptModule.
    """
    return getattr(model, "_compiled_call_impl", None) is None and not isinstance(model, torch.jit.ScriptModule)
