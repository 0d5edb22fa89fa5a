"""The evaluations of a training loop that was recognized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.bridges.eval_events import EVALUATED
from callsheet.bridges.hosted_run import HostedRun


class LoopEvaluations:
    """Fires the events of a loop's evaluations, and records their results if a framework reports them.

    Args:
        run: the run of the loop.
    """

    def __init__(self, run: HostedRun) -> None:
        self._run = run
        self._evaluation = run.eval
        self.span = run.eval.driver.spans["eval_all"]
        """The span of an evaluation, which is open from its first batch to its end."""
        self.dataset = ""
        """The name of the dataset on which an evaluator of a framework runs now, or empty."""
        self.delayed: dict[str, Mapping[str, float]] = {}
        """The results of evaluations within the open step, by dataset. Their events are fired after the step."""

    def begin_batch(self, batch: Any) -> None:
        """Begin a batch of an evaluation, because the model is called. If no evaluation is open, begin one."""
        evaluation = self._evaluation
        if not evaluation.driver.is_open("eval"):
            evaluation.begin(self.dataset or EVALUATED)
        if evaluation.driver.is_open("eval"):
            evaluation.ctx.batch = batch
            evaluation.driver.start("eval_step")
            evaluation.driver.start("eval_forward")

    def end_batch(self, outputs: Any) -> None:
        """End the evaluation's batch, because the call of the model has returned."""
        evaluation = self._evaluation
        if evaluation.driver.is_open("eval_forward"):
            evaluation.ctx.outputs = outputs
            evaluation.driver.end("eval_forward")
            evaluation.driver.end("eval_step")

    def end_dataset(self, dataset: str, results: Mapping[str, float], *, is_in_step: bool) -> None:
        """End the evaluation of `dataset`, and record its `results`. During a training step, only store them for `fire_delayed`."""
        evaluation = self._evaluation
        if is_in_step:
            self.delayed[dataset] = results
            return
        # If the script evaluated another model, such as averaged weights, no hook has begun the evaluation. So begin it now.
        if not evaluation.driver.is_open("eval") and results:
            evaluation.begin(dataset)
        if evaluation.driver.is_open("eval"):
            evaluation.end_dataset(dataset, results)

    def fire_delayed(self) -> None:
        """Fire the events of evaluations that ended within the last step. These events were delayed until the end of the step."""
        if self.delayed:
            results, self.delayed = self.delayed, {}
            self._evaluation.fire(results)
            self._run.fire_record()

    def end(self) -> None:
        """End the open evaluation, and make a metrics record if the evaluation has results."""
        evaluation = self._evaluation
        if evaluation.driver.is_open("eval"):
            evaluation.end_dataset(evaluation.ctx.eval_name, {})
        evaluation.end()
        if any(evaluation.found.values()):
            self._run.fire_record()
