"""Reads the epochs and metrics of Ignite's trainer, and the results of its evaluators, for `callsheet exec`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from callsheet.exec.bare_loop import BareLoop
    from callsheet.exec.observation import Observation


class IgniteEngines:
    """Reports the epochs, metrics and evaluations of the running Ignite engines to the observed training loop.

    The engine in whose run the observed optimizer steps is the trainer. Other engines are evaluators.

    Args:
        observation: has the loop that is observed.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self._running: list[Any] = []  # the engines that are running, the innermost last
        self._trainer: Any = None
        self._handles: list[Any] = []  # handles to remove callsheet's handlers from the trainer
        self._names: dict[str, _Evaluated] = {}

    def begin(self) -> dict[str, Any]:
        """Add handlers to the innermost running engine, if any. This engine is the trainer, because the recognized loop runs in it.

        Return Ignite's version as a setting for the run's record, or an empty dict if no engine runs.
        """
        self.remove()
        if not self._running:
            return {}
        self._attach(self._running[-1])
        return {"framework": f"Ignite {sys.modules['ignite'].__version__}"}

    def _attach(self, trainer: Any) -> None:
        from ignite.engine import Events

        self._trainer = trainer
        self._handles.append(trainer.add_event_handler(Events.EPOCH_STARTED, self._begin_epoch))
        self._handles.append(trainer.add_event_handler(Events.EPOCH_COMPLETED, self._end_epoch))

    def remove(self) -> None:
        """Remove callsheet's handlers from the trainer, and forget the trainer."""
        while self._handles:
            self._handles.pop().remove()
        self._trainer = None
        self._names.clear()

    def switch(self) -> Any:
        """From now on, treat the innermost running engine as the trainer, because the observed optimizer has stepped in it.

        Return the engine's batch.
        """
        loop = self._observation.loop
        if loop is not None:
            self._names.pop(loop.evaluations.dataset, None)
            loop.evaluations.dataset = ""
        while self._handles:
            self._handles.pop().remove()
        self._attach(self._running[-1])
        self._set_reports()
        return self._trainer.state.batch

    @property
    def is_training(self) -> bool:
        """Whether the trainer is running. A running trainer reports when its epochs end."""
        return self._trainer is not None and self._trainer in self._running

    def run(self, run: Callable[[], Any], engine: Any, data: Any) -> Any:
        """Run the engine with `run()`. If the engine is an evaluator, report its results to the observed loop."""
        loop = self._observation.loop
        is_evaluator = loop is not None and self._trainer not in (None, engine)
        name, before = "", loop.evaluations.dataset if loop is not None else ""
        if loop is not None and is_evaluator:
            if _is_between_epochs(self._trainer):
                # End the epoch here: the script's handler that evaluates may run before callsheet's handler that ends the epoch.
                self._end_epoch(self._trainer)
            loop.evaluations.dataset = name = self._name(engine, data)
            loop.watch_calls()
        self._running.append(engine)
        self._set_reports()
        try:
            state = run()
        finally:
            self._running.pop()
            self._set_reports()
            if loop is not None:
                loop.evaluations.dataset = before
        if loop is not None and is_evaluator and engine is not self._trainer:
            loop.record_results(name, _numbers(engine.state.metrics))
        return state

    def _set_reports(self) -> None:
        loop: BareLoop | None = self._observation.loop
        if loop is not None:
            loop.are_epochs_reported = self.is_training

    def stop(self) -> None:
        """Stop the trainer, because a callback has requested it."""
        self._trainer.terminate()

    def _begin_epoch(self, trainer: Any) -> None:
        self._end_epoch(trainer)  # end the previous epoch, because Ignite may not report its end after `terminate_epoch`
        if self._observation.loop is not None:
            self._observation.loop.begin_epoch()

    def _end_epoch(self, trainer: Any) -> None:
        loop = self._observation.loop
        if loop is not None:
            loop.end_epoch({f"ignite/{name}": value for name, value in _numbers(trainer.state.metrics).items()})

    def _name(self, engine: Any, data: Any) -> str:
        """Return a name for the data on which the evaluator runs. Runs of one evaluator on one dataset always get the same name."""
        dataset = getattr(data, "dataset", data)
        for name, known in self._names.items():
            if known.is_of(engine, dataset):
                return name
        of_training = self._trainer.state.dataloader
        stem = "train_data" if dataset is getattr(of_training, "dataset", of_training) else "validation"
        names = (f"{stem}_{number}" if number > 1 else stem for number in count(1))
        name = next(each for each in names if each not in self._names or self._names[each].is_gone)
        self._names[name] = _Evaluated(engine, dataset)
        return name


class _Evaluated:
    """An evaluator and a dataset on which it has run. This object keeps neither of them alive."""

    def __init__(self, engine: Any, dataset: Any) -> None:
        self._engine = weakref.ref(engine)
        self._id = id(dataset)
        try:
            self._dataset: Callable[[], Any] | None = weakref.ref(dataset)
        except TypeError:  # a list, for example, does not support weak references
            self._dataset = None

    def is_of(self, engine: Any, dataset: Any) -> bool:
        """Return whether this object describes the given evaluator and dataset."""
        return self._engine() is engine and self._id == id(dataset) and (self._dataset is None or self._dataset() is dataset)

    @property
    def is_gone(self) -> bool:
        """Whether the evaluator or the dataset no longer exists."""
        return self._engine() is None or (self._dataset is not None and self._dataset() is None)


def run_engine(observation: Observation, run: Callable[..., Any], engine: Any, *args: Any, **options: Any) -> Any:
    """Run an Ignite engine, which may be the observed loop's trainer or one of its evaluators."""
    data = args[0] if args else options.get("data")
    return observation.engines.run(
        lambda: run(engine, *args, **options), engine, engine.state.dataloader if data is None else data
    )


def _is_between_epochs(trainer: Any) -> bool:
    from ignite.engine import Events

    return trainer.last_event_name in (Events.EPOCH_COMPLETED, Events.TERMINATE, Events.COMPLETED)


def _numbers(metrics: Any) -> dict[str, float]:
    from callsheet.bridges.ignite.engine import numbers

    return numbers(metrics)
