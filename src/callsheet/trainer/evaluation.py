"""Evaluation, test and prediction: the loops that do not train."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.context import Context
from callsheet.lifecycle import SPANS
from callsheet.manager import CallbackManager
from callsheet.metrics import MetricLog
from callsheet.randomness import random_state, restore_random_state
from callsheet.spans import Span
from callsheet.time import Interval
from callsheet.trainer.batches import to_device
from callsheet.trainer.tasks import Task


class Evaluation:
    """Runs the model over data without training it, and tells what it does on a context of its own.

    The mean losses are over what the task weighs by, samples or labelled tokens, not over batches. Random states and the modules'
    modes are put back afterwards: training does not notice that it was evaluated.

    Args:
        every: how often `is_due` says so; None is only on request.
    """

    def __init__(
        self, manager: CallbackManager, main: Context, model: nn.Module, task: Task, device: torch.device, every: Interval | None
    ) -> None:
        self.metrics = MetricLog()
        self._logged: dict[str, float] = {}
        self.loaders: dict[str, Iterable[Any]] = {}
        self.every = every
        self._passed = 0  # intervals
        self._last_step = 0
        self.ctx = main.sibling(self.metrics)
        self._main = main
        self._model = model
        self._task = task
        self._device = device
        self._spans = manager.spans(self.ctx)

    def is_due(self, ctx: Context, is_over: bool) -> bool:
        """Whether the boundary in hand is one to evaluate at: on request, or, once a step, by the interval and at the end of training."""
        if not self.loaders:
            ctx.control.done("evaluate")  # there is nothing to carry out
            return False
        if ctx.control.evaluate_requested is not None:
            return True
        if self.every is None or self._last_step == ctx.step:
            return False
        return is_over or self._index(ctx) > self._passed

    def done(self, ctx: Context) -> None:
        """What was due has been evaluated. Not before: a checkpoint that was saved ahead of it must not say that it was."""
        ctx.control.done("evaluate")
        self._last_step = ctx.step
        if self.every is not None:
            self._passed = self._index(ctx)

    def _index(self, ctx: Context) -> int:
        return self.every.index(ctx.state.timestamp, ctx.state.elapsed) if self.every is not None else 0

    def state_dict(self) -> dict[str, int]:
        """Which evaluations have been."""
        return {"passed": self._passed, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take back what `state_dict` gave."""
        self._passed, self._last_step = state["passed"], state["last_step"]

    def evaluate(self, loaders: Mapping[str, Iterable[Any]], *, standalone: bool) -> dict[str, dict[str, float]]:
        """Evaluate every dataset; returns its losses by the dataset's name, which are also logged as `<dataset>/<loss>`.

        What a callback logs meanwhile as `<dataset>/<metric>` joins the results.
        """
        ctx, spans = self.ctx, self._spans
        results: dict[str, dict[str, float]] = {}
        with self._not_training():
            ctx.standalone = standalone
            with spans.eval_all:
                for ctx.eval_name, loader in loaders.items():
                    with spans.eval:
                        losses = self._losses(loader, spans.eval_step, spans.eval_forward)
                        ctx.eval_losses = losses
                        results[ctx.eval_name] = _floats(losses)
                        ctx.log({f"{ctx.eval_name}/{name}": value for name, value in results[ctx.eval_name].items()})
                    ctx.close("on_eval_end")
                self._take_logged_into(results)
                ctx.eval_results = results
            ctx.close("on_eval_all_end")
        return results

    def take(self) -> dict[str, float]:
        """What was logged since the last call, for a record."""
        logged, self._logged = self._logged | self.metrics.take(), {}
        return logged

    def _take_logged_into(self, results: dict[str, dict[str, float]]) -> None:
        self._logged |= self.metrics.take()
        for name, value in self._logged.items():
            dataset, _, metric = name.partition("/")
            if metric and dataset in results:
                results[dataset].setdefault(metric, value)

    def test(self, loader: Iterable[Any]) -> dict[str, float]:
        """The mean losses over a test set, also logged as `test/<loss>`."""
        with self._not_training():
            with self._spans.test:
                losses = self._losses(loader, self._spans.test_step, self._spans.test_forward)
                self.ctx.eval_losses = losses
                results = _floats(losses)
                self.ctx.log({f"test/{name}": value for name, value in results.items()})
            self.ctx.close("on_test_end")
        return results

    def predict(self, loader: Iterable[Any]) -> list[Any]:
        """The model's outputs, a batch each, on the device."""
        outputs: list[Any] = []
        with self._not_training():
            with self._spans.predict:
                self._each(
                    loader, self._spans.predict_step, self._spans.predict_forward, lambda: outputs.append(self.ctx.outputs)
                )
        return outputs

    def _losses(self, loader: Iterable[Any], step: Span, forward: Span) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = {}
        weights: list[Any] = []

        def add() -> None:
            losses = self._task.loss(self.ctx.outputs, self.ctx.batch)
            weights.append(weight := self._task.weight(self.ctx.batch))
            for name, loss in losses.items() if isinstance(losses, Mapping) else [("loss", losses)]:
                part = loss.detach() * weight  # where nothing counts, the mean is NaN
                totals[name] = totals.get(name, 0) + torch.where(torch.as_tensor(weight, device=part.device) > 0, part, 0)

        self._each(loader, step, forward, add)
        return {name: total / sum(weights) for name, total in totals.items()}

    def _each(self, loader: Iterable[Any], step: Span, forward: Span, then: Callable[[], None]) -> None:
        ctx, end = self.ctx, SPANS[step.name].end_event
        with torch.no_grad():
            for batch in loader:
                ctx.batch = to_device(batch, self._device) if self._device.type != "cpu" else batch
                with step:
                    with forward:
                        ctx.outputs = self._task.forward(self._model, ctx.batch)
                    then()
                ctx.close(end)

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        """The model in evaluation mode, the context up to date; both put back, also after an exception."""
        self.ctx.step, self.ctx.epoch = self._main.step, self._main.epoch
        for name in ("optimizer", "scheduler"):
            if self._main.has(name):
                setattr(self.ctx, name, getattr(self._main, name))
        modes = [(module, module.training) for module in self._model.modules()]
        random = random_state()
        self._model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            restore_random_state(random)


def _floats(losses: dict[str, Tensor]) -> dict[str, float]:
    """One copy from the device for all of them."""
    return dict(zip(losses, torch.stack([loss.double() for loss in losses.values()]).tolist(), strict=True)) if losses else {}
