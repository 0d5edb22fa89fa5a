"""Fires the events of evaluations, tests and predictions that a framework carries out itself.

`EvalEvents` keeps the context, the spans and the results of these evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from callsheet.bridges.boundary_order import BoundaryOrder
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.core.context import Context
from callsheet.core.manager import CallbackManager
from callsheet.run.tally import Tally

EVALUATED = "validation"
"""The name of an evaluated dataset to which the loop has given no name."""


class EvalEvents:
    """Fires the events of evaluations, tests and predictions that another framework carries out.

    The host reports to `driver` how far an evaluation, a test or a prediction has come.

    Args:
        host: the name of the framework in messages.
        manager: the callbacks.
        ctx: the context of the training.
        training: the lifecycle driver of the training.
        tally: the run's counts of samples, tokens and seconds. Its clock is stopped during an evaluation.
        results: the latest results by dataset name. The results of each evaluation are added to this dict.
    """

    def __init__(
        self,
        host: str,
        manager: CallbackManager,
        ctx: Context,
        training: LifecycleDriver,
        tally: Tally,
        results: dict[str, dict[str, float]],
    ) -> None:
        self._training = ctx
        self._tally = tally
        self._results = results
        self.ctx = ctx.sibling()
        """The context that handlers of evaluations, tests and predictions receive."""
        self.spans = manager.spans(self.ctx)
        """The spans, such as `eval_step`, of evaluations, tests and predictions."""
        self.driver = LifecycleDriver(
            self.spans,
            {
                "on_eval_all_start": self._prepare_evaluation,
                **dict.fromkeys(("on_test_start", "on_predict_start"), self._prepare),
            },
        )
        """The lifecycle driver of evaluations, tests and predictions."""
        self.driver.is_barred = self._is_barred
        self.order = BoundaryOrder(host, training, self.driver, self.leave)
        """Decides which events of records, evaluations and checkpoints may be fired between two steps, epochs or rounds."""
        self.found: dict[str, dict[str, float]] = {}
        """The results of the current evaluation so far, by dataset name."""
        self._is_standalone = False  # whether the next evaluation is outside training

    def listens_to_outputs(self, kind: str) -> bool:
        """Return whether a callback listens to the forward pass, or to the end of a step, of the evaluation, test or prediction."""
        forward, step = getattr(self.spans, f"{kind}_forward"), getattr(self.spans, f"{kind}_step")
        return any(edge is not None for edge in (forward.starts, forward.ends, step.ends))

    def begin_all(self, *, standalone: bool = False) -> None:
        """Fire `on_eval_all_start`, unless the evaluation has begun already."""
        if not self.driver.is_open("eval_all"):
            self._is_standalone = standalone
            self.driver.start("eval_all")
            self._is_standalone = False

    def begin(self, name: str, *, standalone: bool = False) -> None:
        """Fire `on_eval_start` for one dataset. If this is the first dataset, fire `on_eval_all_start` before that."""
        self.begin_all(standalone=standalone)
        self.ctx.eval_name = name
        self.driver.start("eval")

    def end_dataset(self, name: str, found: Mapping[str, Any]) -> None:
        """Log the results of one dataset (`found`: losses and metrics by name), and fire `on_eval_end`."""
        ctx = self.ctx
        self.found[name] = values = {metric: float(value) for metric, value in found.items()}
        ctx.eval_name = name
        ctx.eval_losses = {metric: torch.tensor(value) for metric, value in values.items() if "loss" in metric}
        ctx.log({f"{name}/{metric}": value for metric, value in values.items()}, across="same")
        self.driver.end("eval")

    def end(self) -> None:
        """Fire `on_eval_all_end`, because all datasets are evaluated."""
        if self.driver.is_open("eval_all"):
            self._results.update(self.found)
            self.ctx.eval_results = self.found
            self.driver.end("eval_all")
        self._tally.start()

    def fire(self, results: Mapping[str, Mapping[str, Any]], *, standalone: bool = False) -> None:
        """Fire the events of an evaluation that the framework has carried out, except the start event if it was already fired.

        `results` are by dataset name, then by metric name.
        """
        for name, found in results.items():
            self.begin(name, standalone=standalone)
            self.end_dataset(name, found)
        if results or self.driver.is_open("eval_all"):
            self.end()

    # The driver calls a `_prepare` method before it fires a start event, even if the framework has not reported this start.

    def _prepare(self) -> None:
        self.ctx.step, self.ctx.epoch = self._training.step, self._training.epoch

    def _prepare_evaluation(self) -> None:
        self._tally.stop()
        self._prepare()
        self.ctx.standalone = self._is_standalone
        self.found = {}

    def leave(self) -> None:
        """End an open evaluation, test or prediction whose end the framework has not reported, by firing its missing end events.

        At these events, callbacks such as `EMA`, which swapped the weights for the evaluation, restore the trained weights.
        """
        driver = self.driver
        if len(driver.opened) == 1:
            return
        self.order.warn_of_missing_end(driver.opened[1].name)
        if driver.is_open("eval"):
            self.end_dataset(self.ctx.eval_name if self.ctx.has("eval_name") else EVALUATED, {})
        if driver.is_open("eval_all"):
            self.end()
        for span in ("test", "predict"):
            driver.end(span)

    def _is_barred(self, name: str) -> bool:
        """Return whether the evaluation, test or prediction `name` must not begin at this point of training."""
        self.leave()  # an earlier evaluation may be open, because the framework has not reported its end
        return self.order.is_barred(name)
