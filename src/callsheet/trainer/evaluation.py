"""Evaluation, test and prediction: the loops that run the model without training it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.core.context import Context
from callsheet.core.lifecycle import SPANS
from callsheet.core.randomness import random_state, restore_random_state
from callsheet.core.run_state import TrainState
from callsheet.core.spans import Span
from callsheet.core.time import Interval, Time
from callsheet.errors import ConfigError
from callsheet.run.devices import on_one_device
from callsheet.run.metrics import MetricLog
from callsheet.run.parts import DueEvaluation
from callsheet.run.run import Run
from callsheet.trainer.batches import Loader, resolve_loader, to_device
from callsheet.trainer.data import share_loader
from callsheet.trainer.data.loaders import generators_of, restore_generators_of
from callsheet.trainer.data.strategies import SharedBatches
from callsheet.trainer.eval_metrics import EvalMetrics
from callsheet.trainer.precision import Precision
from callsheet.trainer.tasks import Task, counts_of


@dataclass
class Evaluator:
    """A dataset to evaluate, and how often to evaluate it.

    Args:
        dataloader: an iterable of batches, or a function that returns one.
        interval: how often to evaluate, such as `"500ba"`; an evaluation also runs when training ends. A whole number means
            batches. None: the Trainer's `eval_interval`.
    """

    dataloader: Loader
    interval: str | int | Time | None = None


def named_evaluators(given: Loader | Evaluator | Mapping[str, Loader | Evaluator] | None) -> dict[str, Evaluator]:
    """Return the evaluators by name. A single evaluator gets the name `validation`."""
    named = given if isinstance(given, Mapping) else {"validation": given}
    for name in named:
        if not isinstance(name, str) or not name or "/" in name:
            raise ConfigError(
                f"an evaluator cannot be named {name!r}: its metrics are named <name>/<metric>; use a name without a slash"
            )
    return {
        name: evaluator if isinstance(evaluator, Evaluator) else Evaluator(evaluator)
        for name, evaluator in named.items()
        if evaluator is not None
    }


class Schedule:
    """Decides when one dataset is evaluated: at its interval and at the end of training, but at most once per step."""

    def __init__(self, every: Interval | None) -> None:
        self.every = every
        self._passed = 0  # the number of intervals that had passed at the last evaluation
        self._last_step = 0

    def is_due(self, step: int, state: TrainState, is_over: bool) -> bool:
        """Return whether the evaluation is due after `step`."""
        if self.every is None:
            return False
        if self._last_step == step:
            # If the epoch has ended since the evaluation at this step, this evaluation also counts for the end of the epoch.
            self._passed = self._index(state)
            return False
        return is_over or self._index(state) > self._passed

    def mark_done(self, step: int, state: TrainState) -> None:
        """Record that the evaluation at `step` was done."""
        self._last_step = step
        self._passed = self._index(state)

    def _index(self, state: TrainState) -> int:
        return self.every.index(state.timestamp, state.elapsed) if self.every is not None else 0

    def state_dict(self) -> dict[str, int]:
        """Return when the last evaluation was done, as plain data."""
        return {"passed": self._passed, "last_step": self._last_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._passed, self._last_step = state["passed"], state["last_step"]


class Evaluation:
    """Runs the model over data without training it, and fires the events of evaluations on a separate context.

    The mean loss of a dataset weighs each batch by the task's `weight`, such as the batch's number of samples or labels. After an
    evaluation, the random states and the modules' modes are restored, so evaluations do not affect training. A preemption signal
    ends an evaluation that the training loop has started, and the results of this evaluation are discarded.

    Args:
        run: the run that is trained.
        module: the module that is called in the forward pass.
        every: the interval for evaluators that have none of their own; None: these are evaluated only on request.
    """

    is_resumed = True
    """Whether checkpoints store an evaluation that is due but not done, so that a resumed run carries out this evaluation. Always True."""
    ends_at_signal = True

    def __init__(
        self,
        run: Run,
        module: nn.Module,
        task: Task,
        device: torch.device,
        *,
        every: Interval | None,
        precision: Precision,
        shard: bool,
    ) -> None:
        self._main, self._groups, self._agreement = run.ctx, run.groups, run.agreement
        self.metrics = MetricLog(run.groups if run.groups.size > 1 else None)
        self.results: dict[str, dict[str, float]] = {}
        """The latest losses and metrics of each evaluator, by the evaluator's name."""
        self._evaluated_at: dict[str, int] = {}  # for each evaluator, the step of its latest evaluation in this process
        self.loaders: dict[str, Iterable[Any]] = {}
        self.schedules: dict[str, Schedule] = {}
        self.ctx = run.ctx.sibling(self.metrics)
        self.undone: DueEvaluation | None = None
        """The evaluation that is due at the current boundary and not done yet.

        Checkpoints store this evaluation, and a resumed run begins with it.
        """
        self._logged: dict[str, float] = {}
        self._every = every
        self._module = module
        self._task = task
        self._device = device
        self._precision = precision
        self._shard = shard
        # Whether a preemption signal may end the running evaluation early. False if the user called the evaluation directly.
        self._may_be_interrupted = False
        self._resumed: Mapping[str, Mapping[str, int]] = {}
        self._resumed_generators: Mapping[str, list[Any]] = {}
        self._given: dict[str, Iterable[Any]] = {}  # the evaluators' original dataloaders; empty if there are several ranks
        self._spans = run.manager.spans(self.ctx)

    def add(self, name: str, evaluator: Evaluator) -> None:
        """Load the data of the evaluator `name`, and begin its schedule. All ranks must call this method."""
        argument = f"eval_dataloader {name!r}"
        whole = resolve_loader(evaluator.dataloader, argument, may_be_empty=self._groups.size > 1)
        self.loaders[name] = self._share(whole, argument)
        if self._groups.size == 1:
            self._given[name] = whole
            restore_generators_of(whole, self._resumed_generators.get(name, []))
        own = evaluator.interval
        every = self._every if own is None else Interval.of(f"the interval of {name!r}", own)
        self.schedules[name] = schedule = Schedule(every)
        if name in self._resumed:
            schedule.load_state_dict(self._resumed[name])

    def prepare_loader(self, loader: Loader, argument: str) -> Iterable[Any]:
        """Return this rank's part of `loader`, a dataloader or a function that returns one. All ranks must call this method.

        Raises:
            ConfigError: the dataloader cannot be iterated over, is known to be empty, or cannot be divided among the ranks.
        """
        return self._share(resolve_loader(loader, argument, may_be_empty=self._groups.size > 1), argument)

    def _share(self, whole: Iterable[Any], argument: str) -> Iterable[Any]:
        """Return this rank's part of the dataloader `whole`.

        A single process uses the dataloader itself, unless its workers keep random states from one evaluation to the next.
        """
        if self._groups.size == 1 and not getattr(whole, "persistent_workers", False):
            return whole
        # Use a fixed seed, so that the order of the data does not depend on the run's seed.
        return share_loader(
            whole, self._groups, seed=0, argument=argument, shard=self._shard, count_samples=lambda batch: counts_of(batch)[0]
        )

    def due(self, ctx: Context, is_over: bool) -> list[str]:
        """Return the names of the evaluators that are due at the current boundary (the end of a step, epoch or round).

        If a callback has requested an evaluation, all evaluators are due. Otherwise, an evaluator is due if its interval is
        complete, or if it was due and not evaluated yet when the checkpoint of a resumed run was saved.
        """
        if ctx.control.evaluate_requested is not None:
            if not self.loaders:
                ctx.control.done("evaluate")  # there is nothing to evaluate, so the request is done
            return list(self.loaders)
        left = self.undone.names if self.undone is not None and self.undone.step == ctx.step else []
        return [
            name for name, schedule in self.schedules.items() if name in left or schedule.is_due(ctx.step, ctx.state, is_over)
        ]

    def mark_done(self, ctx: Context, names: Iterable[str]) -> None:
        """Record that these datasets have been evaluated at the current step.

        The evaluation must be complete, because a checkpoint that is saved before its end must still store the evaluation as due.
        """
        ctx.control.done("evaluate")
        self.undone = None
        for name in names:
            self.schedules[name].mark_done(ctx.step, ctx.state)

    def state_dict(self) -> dict[str, Any]:
        """Return which evaluations have been done, the latest results, and which evaluation is still due."""
        return {
            "schedules": {name: schedule.state_dict() for name, schedule in self.schedules.items()},
            "results": {name: dict(result) for name, result in self.results.items()},
            "undone": asdict(self.undone) if self.undone is not None else None,
            "generators": {name: generators_of(loader) for name, loader in self._given.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned. Later, `add` restores the schedule and random states of each evaluator."""
        self._resumed = state["schedules"]
        self.results = {name: dict(result) for name, result in state["results"].items()}
        self.undone = DueEvaluation.from_state(state["undone"]) if state["undone"] is not None else None
        self._resumed_generators = state["generators"]

    def evaluate(self, loaders: Mapping[str, Iterable[Any]], *, standalone: bool) -> dict[str, dict[str, float]]:
        """Evaluate every dataset in `loaders`.

        Return the losses and metrics of each dataset by the dataset's name; they are also logged as `<dataset>/<name>`.

        Metrics that a callback logs during the evaluation under a name `<dataset>/<metric>` are added to the results.
        """
        ctx, spans = self.ctx, self._spans
        results: dict[str, dict[str, float]] = {}
        with self._not_training():
            ctx.standalone = standalone
            self._may_be_interrupted = not standalone
            with spans.eval_all:
                for ctx.eval_name, loader in loaders.items():
                    with spans.eval:
                        ctx.eval_losses, found = self._evaluate_loader(loader, spans.eval_step, spans.eval_forward)
                        if not self._is_interrupted:
                            results[ctx.eval_name] = found
                            ctx.log({f"{ctx.eval_name}/{name}": value for name, value in found.items()}, across="same")
                    ctx.close("on_eval_end")
                    if self._is_interrupted:
                        break
                if self._is_interrupted:
                    results = {}  # discard the results of an interrupted evaluation, because a resumed run repeats it
                    self.metrics.take()
                else:
                    self._take_logged_into(results)
                ctx.eval_results = results
            ctx.close("on_eval_all_end")
        if not standalone:
            self.results |= results
            self._evaluated_at |= dict.fromkeys(results, self._main.step)
        return results

    def is_done_at(self, step: int) -> bool:
        """Return whether training in this process has run every evaluator at `step`. Results from a checkpoint do not count."""
        return all(self._evaluated_at.get(name) == step for name in self.loaders)

    def take(self) -> dict[str, float]:
        """Return, for a metrics record, the values that evaluations have logged since the last call of this method."""
        logged, self._logged = self._logged | self.metrics.take(), {}
        return logged

    def _take_logged_into(self, results: dict[str, dict[str, float]]) -> None:
        self._logged |= self.metrics.take()
        for name, value in self._logged.items():
            dataset, _, metric = name.partition("/")
            if metric and dataset in results:
                results[dataset].setdefault(metric, value)

    def test(self, loader: Iterable[Any]) -> dict[str, float]:
        """Return the mean losses and metrics over a test set. These values are also logged as `test/<name>`."""
        self._may_be_interrupted = False
        with self._not_training():
            with self._spans.test:
                self.ctx.eval_losses, results = self._evaluate_loader(loader, self._spans.test_step, self._spans.test_forward)
                self.ctx.log({f"test/{name}": value for name, value in results.items()}, across="same")
            self.ctx.close("on_test_end")
        return results

    def predict(self, loader: Iterable[Any]) -> list[Any]:
        """Return the model's outputs for this rank's part of the data, one item per batch, on the device."""
        outputs: list[Any] = []

        def keep(is_filler: bool) -> None:
            if not is_filler:
                outputs.append(self.ctx.outputs)

        self._may_be_interrupted = False
        with self._not_training():
            with self._spans.predict:
                self._run_batches(loader, self._spans.predict_step, self._spans.predict_forward, keep)
        return outputs

    @property
    def _is_interrupted(self) -> bool:
        return self._may_be_interrupted and self._agreement.signal is not None

    def _evaluate_loader(self, loader: Iterable[Any], step: Span, forward: Span) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the mean losses over all ranks as tensors, and a dictionary of floats with these losses and the task's metrics.

        Both dictionaries are empty if a signal ended the evaluation early.
        """
        totals: dict[str, Tensor] = {}
        weights: list[Any] = []
        samples = 0
        metrics = EvalMetrics(self._task, self._device)

        def add(is_filler: bool) -> None:
            nonlocal samples
            outputs, batch = self.ctx.outputs, self.ctx.batch
            samples += 0 if is_filler else counts_of(batch)[0]
            with self._precision.casting_loss:
                losses = self._task.loss(outputs, batch)
            weights.append(weight := 0 if is_filler else self._task.weight(batch))
            for name, loss in losses.items() if isinstance(losses, Mapping) else [("loss", losses)]:
                part = loss.detach().double() * weight
                counts = weight > 0  # a batch of weight 0 must not count, because its mean loss may be NaN
                part = (
                    torch.where(counts, part, 0.0) if isinstance(counts, Tensor) else part if counts else torch.zeros_like(part)
                )
                totals[name] = totals.get(name, 0) + part
            metrics.add(outputs, batch, is_filler)

        self._run_batches(loader, step, forward, add)
        if self._is_interrupted:
            return {}, {}
        total = torch.as_tensor(sum(weights), dtype=torch.float64, device=self._device)
        summed = (
            torch.stack(on_one_device([*totals.values(), total])).tolist() if totals else []
        )  # copy all sums from the device at once
        *sums, weight, in_all = self._groups.sum([*summed, samples]) if summed else [0.0, 0.0]
        self.ctx.eval_samples = int(in_all) if summed else None
        found = {name: value / weight if weight else float("nan") for name, value in zip(totals, sums, strict=True)}
        losses = {name: torch.tensor(value, device=self._device) for name, value in found.items()}
        return losses, found | metrics.result()

    def _run_batches(self, loader: Iterable[Any], step: Span, forward: Span, then: Callable[[bool], None]) -> None:
        """Run the model on this rank's batches, or stop early at a preemption signal. All ranks make the same number of steps."""
        ctx, end, casting = self.ctx, SPANS[step.name].end_event, self._precision.casting
        batches = iter(loader)
        shares = batches if isinstance(batches, SharedBatches) else None
        ctx.is_filler, ctx.samples_in_all, ctx.eval_samples = False, None, None
        with torch.no_grad():
            for batch in batches:
                if shares is not None:
                    ctx.is_filler, ctx.samples_in_all = shares.is_filler, shares.samples_in_all
                ctx.batch = to_device(batch, self._device) if self._device.type != "cpu" else batch
                with step:
                    with forward:
                        with casting:
                            ctx.outputs = self._task.forward(self._module, ctx.batch)
                    then(ctx.is_filler)
                ctx.close(end)
                self._agreement.look_in_evaluation(ctx.step)
                if self._is_interrupted:
                    return

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        """While the `with` block runs, set the model to evaluation mode, and give the evaluation's context the current step and epoch.

        At the end, even after an exception, restore the modes of the modules and the random states.
        """
        self.ctx.step, self.ctx.epoch = self._main.step, self._main.epoch
        for name in ("optimizer", "scheduler"):
            if self._main.has(name):
                setattr(self.ctx, name, getattr(self._main, name))
        modes = [(module, module.training) for module in self._module.modules()]
        random = random_state()
        self._module.eval()
        self._agreement.change_pace()
        try:
            yield
            # If the user called the evaluation, the ranks exchange their requests here. Otherwise, the training loop's next
            # boundary does that.
            if not self._may_be_interrupted:
                self._agreement.agree(self.ctx.step)
        finally:
            for module, training in modes:
                module.training = training
            restore_random_state(random)
