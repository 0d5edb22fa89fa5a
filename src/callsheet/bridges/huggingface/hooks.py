"""Hooks for the parts of training for which the Hugging Face Trainer has no events.

The hooks are wrappers around three methods of the Trainer, and PyTorch hooks in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.bridges.backward_watch import BackwardWatch
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.model_calls import ModelCalls
from callsheet.trainer.tasks import counts_of

TIMING_METRICS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")
"""The names of an evaluation's metrics that are timings, which differ between the ranks."""


_MAX_CALL_FRAMES = 12
"""How many frames of the call stack `find_trainer` searches. Three are normally enough, but a wrapped Trainer needs more."""


def find_trainer(state: Any, frame: FrameType | None) -> Any:
    """Search the call stack for the Trainer whose state is `state`. Return the Trainer, or None if it is not found.

    A Trainer passes its model, state and dataloaders to its callbacks, but not itself.
    """
    for _ in range(_MAX_CALL_FRAMES):
        if frame is None:
            break
        # Read `f_locals` only in frames of methods, because reading it keeps a frame's variables alive as long as the frame.
        if frame.f_code.co_argcount and frame.f_code.co_varnames[0] == "self":
            found = frame.f_locals.get("self")
            if getattr(found, "__dict__", {}).get("state") is state and hasattr(found, "evaluate"):
                return found
        frame = frame.f_back
    return None


class HuggingFaceForwardHooks(ModelCalls):
    """Fires the events of the model's first call in each `training_step` and `prediction_step` of the Trainer.

    Other calls fire no events, because the Trainer's loop does not make them: for example calls by a callback that samples, a
    loss that calls the model a second time, or a separate evaluator.
    """

    def __init__(self, run: HostedRun, model: nn.Module) -> None:
        super().__init__(run, model)
        self.expected = ""
        """Which events the model's next call fires: those of training (`train`), those of an evaluation (`eval`), or none (empty)."""
        self.is_computing = False
        """Whether the Trainer's `compute_loss` is running.

        A call of `backward` during that time is part of the loss, not the step's backward pass.
        """
        self.inputs: Any = None
        """The inputs of the Trainer's current `training_step`."""
        self.name_of_dataset: Callable[[], str] = lambda: "validation"
        self._before.install(True, self._begins)

    def listen(self, has_listeners: bool) -> None:
        """Register the hook that observes the model's outputs if `has_listeners` is true; otherwise, remove this hook."""
        self._after.install(has_listeners, self._ends)

    def training_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's `training_step` (`method`). The model's first call in `training_step` begins a microbatch."""
        self.expected, self.inputs = "train", args[1] if len(args) > 1 else kwargs.get("inputs")
        try:
            return method(*args, **kwargs)
        finally:
            self.expected, self.inputs = "", None

    def compute_loss(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the Trainer's `compute_loss` (`method`). No events are fired for calls of `backward` inside `compute_loss`.

        Such calls come from a cached loss, which calls `backward` on parts of itself before the step's backward pass.
        """
        self.is_computing = True
        try:
            return method(*args, **kwargs)
        finally:
            self.is_computing = False

    def prediction_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `method`, the Trainer's `prediction_step`. During an evaluation, an evaluation step begins when `method` calls the model."""
        if not self._run.eval.driver.is_open("eval_all"):
            return method(*args, **kwargs)
        self.expected = "eval"
        try:
            return method(*args, **kwargs)
        finally:
            self.expected = ""

    def begin_without_forward(self) -> None:
        """Begin a microbatch at its backward pass, because a cached loss calls the model with gradients only in the backward pass."""
        if self.expected == "train":
            self._begin_microbatch(self.inputs)
            run = self._run
            if run.driver.spans["forward"].is_open:
                run.ctx.outputs = None
                run.driver.start("loss")

    def begin_call(self, model: nn.Module, batch: Any) -> Any:
        expected = self.expected
        if not expected:
            return batch
        if expected == "eval":
            return self._begin_eval_step(batch)
        return self._begin_microbatch(batch) if torch.is_grad_enabled() else batch

    def _begin_microbatch(self, batch: Any) -> Any:
        self.expected = ""
        run = self._run
        driver, ctx, (samples, tokens) = run.driver, run.ctx, counts_of(batch)
        spans, ctx.batch = driver.spans, batch
        if spans["train_step"].is_open:
            samples, tokens = samples + run.counted[0], tokens + run.counted[1]
        else:
            if not spans["fetch"].has_no_listeners:
                driver.start_and_end("fetch")
            driver.start_step()
        run.counted = samples, tokens
        if not driver.has_listeners:
            return batch
        if spans["forward"].has_no_listeners:
            return ctx.batch
        return self.start_forward()

    def _begin_eval_step(self, batch: Any) -> Any:
        self.expected = ""
        run = self._run
        driver = run.eval.driver
        if not driver.is_open("eval"):
            run.eval.begin(self.name_of_dataset())
        driver.end("eval_step")
        run.eval.ctx.batch = batch
        driver.start("eval_forward")
        if not self._after.is_registered and run.eval.listens_to_outputs("eval"):
            self.listen(True)
        return run.eval.ctx.batch


class StepWatch(BackwardWatch):
    """A `BackwardWatch` that also supports cached losses, such as `CachedMultipleNegativesRankingLoss` of Sentence Transformers.

    A cached loss calls the model with gradients only during its backward pass.
    """

    hooks: HuggingFaceForwardHooks

    def run(self, loss: Tensor, *args: Any, **options: Any) -> bool:
        """Begin a microbatch if no forward pass has begun one, then call `BackwardWatch.run`."""
        if self.hooks.is_computing:
            return False
        if self.hooks.expected and self._listens and not loss.dim():
            try:
                self.hooks.begin_without_forward()
            except Exception as error:
                self._driver.give_up(error)
        return super().run(loss, *args, **options)


def plain_results(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the results of an evaluation without the prefix (such as `eval_`) in their names, and without timings.

    A subclass of the Trainer may have extended the prefix, as SetFit does. So it is read from the name `<prefix>_runtime`.
    """
    timed = [name.removesuffix("_runtime") for name in metrics if name.startswith(prefix) and name.endswith("_runtime")]
    prefix = min(timed, key=len, default=prefix)
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float)) and name != "epoch"}
    found = {name.removeprefix(f"{prefix}_").removeprefix("eval_"): value for name, value in numbers.items()}
    return {name: value for name, value in found.items() if name not in TIMING_METRICS}
