"""What the Hugging Face Trainer does not say in its events: found at three of its methods, and at the model that they call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.torch_hooks import BackwardWatch, Hook, NotCopied
from callsheet.trainer.tasks import counts_of

SPEEDS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")
"""What an evaluation's metrics say beside what it found; each rank has its own."""


_NEAR = 12
"""How many callers away the Trainer may be: three, and more where a library has put functions between."""


def find_trainer(state: Any, frame: FrameType | None) -> Any:
    """Return the Trainer whose `state` this is: a method of it is among the callers. None if there is none.

    A Trainer gives its callbacks its model, its state and its dataloaders, and not itself.
    """
    for _ in range(_NEAR):
        if frame is None:
            break
        # Reading a frame's variables keeps them alive as long as the frame: of methods alone, and of no more than needed.
        if frame.f_code.co_argcount and frame.f_code.co_varnames[0] == "self":
            found = frame.f_locals.get("self")
            if getattr(found, "__dict__", {}).get("state") is state and hasattr(found, "evaluate"):
                return found
        frame = frame.f_back
    return None


class ForwardHooks(NotCopied):
    """Reports the model's first call in each `training_step` and `prediction_step`, and its outputs where somebody listens.

    All other calls are somebody else's: a callback that samples, a loss that calls the model a second time, an evaluator of its own.
    """

    def __init__(self, run: HostedRun, model: nn.Module) -> None:
        self._run = weakref.proxy(run)
        self.expected = ""
        """What the model's next call is for: `train`, `eval`, or nothing that is reported."""
        self.is_computing = False
        """Whether the loss is being computed: a backward meanwhile is not the step's."""
        self.inputs: Any = None
        """What `training_step` was given."""
        self.name_of_dataset: Callable[[], str] = lambda: "validation"
        self._before = Hook(functools.partial(model.register_forward_pre_hook, with_kwargs=True))
        self._before.install(True, self._begins)
        self._after = Hook(model.register_forward_hook)

    def listen(self, has_listeners: bool) -> None:
        """Listen to the model's outputs, or not."""
        self._after.install(has_listeners, self._ends)

    def training_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer trains on a microbatch."""
        self.expected, self.inputs = "train", args[1] if len(args) > 1 else kwargs.get("inputs")
        try:
            return method(*args, **kwargs)
        finally:
            self.expected, self.inputs = "", None

    def compute_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer computes a loss. A loss may go backward itself meanwhile, through parts of it, to keep their gradients."""
        self.is_computing = True
        try:
            return method(*args, **kwargs)
        finally:
            self.is_computing = False

    def prediction_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer evaluates a batch, or predicts, which is not reported."""
        if not self._run.eval_driver.is_open("eval_all"):
            return method(*args, **kwargs)
        self.expected = "eval"
        try:
            return method(*args, **kwargs)
        finally:
            self.expected = ""

    def begin_without_forward(self) -> None:
        """A backward begins in a `training_step` in which the model was not called with gradients, as with a cached loss."""
        if self.expected == "train":
            self._begin_microbatch(self.inputs)
            run = self._run
            if run.driver.parts["forward"].is_open:
                run.ctx.outputs = None
                run.driver.start("loss")

    def _begins(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        expected = self.expected
        if not expected or self.is_inert:
            return None
        try:
            batch = kwargs if kwargs or not args else args[0]
            if expected == "eval":
                given = self._begin_eval_step(batch)
            elif torch.is_grad_enabled():
                given = self._begin_microbatch(batch)
            else:
                return None
            return (args, dict(given)) if given is not batch and isinstance(given, Mapping) else None
        except Exception as error:
            self._run.driver.give_up(error)
            return None

    def _begin_microbatch(self, batch: Any) -> Any:
        self.expected = ""
        run = self._run
        driver, ctx, (samples, tokens) = run.driver, run.ctx, counts_of(batch)
        parts, ctx.batch = driver.parts, batch
        if parts["train_step"].is_open:
            samples, tokens = samples + run.counted[0], tokens + run.counted[1]
        else:
            if not parts["fetch"].has_no_listeners:
                driver.tell("fetch")
            driver.start_step()
        run.counted = samples, tokens
        if not driver.has_listeners:
            return batch
        if parts["forward"].has_no_listeners:
            return ctx.batch
        driver.end("microbatch")  # of an earlier one whose end the Trainer has not reported: its fields are closed with it
        ctx.microbatch = ctx.batch
        driver.start("microbatch")
        driver.start("forward")
        return ctx.microbatch

    def _begin_eval_step(self, batch: Any) -> Any:
        self.expected = ""
        run = self._run
        driver = run.eval_driver
        if not driver.is_open("eval"):
            run.begin_evaluation(self.name_of_dataset())
        driver.end("eval_step")
        run.eval_ctx.batch = batch
        driver.start("eval_forward")
        if not self._after.stands and run.listens_to_outputs("eval"):
            self.listen(True)
        return run.eval_ctx.batch

    def _ends(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        if self.is_inert:
            return outputs
        try:
            run = self._run
            if run.eval_driver.is_open("eval_forward"):
                run.eval_ctx.outputs = outputs
                run.eval_driver.end("eval_forward")
                return run.eval_ctx.outputs
            if run.driver.parts["forward"].is_open:
                run.ctx.outputs = outputs
                run.driver.start("loss")
                return run.ctx.outputs
        except Exception as error:
            self._run.driver.give_up(error)
        return outputs

    def remove(self) -> None:
        """Leave the model as it was."""
        self._before.remove()
        self.listen(False)


class StepWatch(BackwardWatch):
    """A `BackwardWatch` for losses that call the model within their backward alone, such as `CachedMultipleNegativesRankingLoss`."""

    hooks: ForwardHooks

    def run(self, loss: Tensor, *args: Any, **options: Any) -> bool:
        """See `BackwardWatch`; begin the microbatch first, if no forward has."""
        if self.hooks.is_computing:
            return False
        if self.hooks.expected and self._listens and not loss.dim():
            try:
                self.hooks.begin_without_forward()
            except Exception as error:
                self._driver.give_up(error)
        return super().run(loss, *args, **options)


def found_in(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """What an evaluation found, without the prefix that the Trainer gave the names, and without how long it took."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float)) and name != "epoch"}
    found = {name.removeprefix(f"{prefix}_").removeprefix("eval_"): value for name, value in numbers.items()}
    return {name: value for name, value in found.items() if name not in SPEEDS}
