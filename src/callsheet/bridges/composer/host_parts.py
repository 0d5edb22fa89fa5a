"""Parts of `ComposerHost`: tables of handlers, requests for evaluations and checkpoints, and the metrics and losses of Composer.

This module imports Composer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from composer import Event
from composer.callbacks import CheckpointSaver
from composer.loggers import LoggerDestination
from torch import Tensor

from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.trainer.tasks import counts_of

_LOGGED_ELSEWHERE = frozenset({"loss/train/total", "trainer/device_train_microbatch_size"})
"""Metrics of Composer's Trainer that metrics records contain already, under other names or from another source."""


_CLOSURE_EVENTS = (
    *("before_train_batch", "before_forward", "after_forward", "before_loss", "after_loss"),
    *("before_backward", "after_backward", "after_train_batch"),
)
"""Composer's events that are repeated if an optimizer calls its closure several times."""

_STEP_EVENTS = ("before_dataloader", "after_dataloader", "batch_start", *_CLOSURE_EVENTS, "batch_end", "batch_checkpoint")
"""Composer's events of a step, in their order."""

_MICROBATCH_EVENTS = ("before_forward", "after_forward", "before_loss", "after_backward")
"""Composer's events that the host handles only if a callback listens to events inside a microbatch (forward, loss, backward)."""

_RESULT_EVENTS = ("after_train_batch",)
"""Composer's events that the host handles only if a callback or a metrics record reads the results of steps."""

_LOSS_EVENTS = ("after_loss", "before_backward")
"""Composer's events that the host handles only if a callback, a metrics record or a checkpoint reads the loss.

`before_backward` shows whether `after_loss` was fired once in each microbatch.
"""


Handler = Callable[[Any], None]
EventTable = dict[Any, tuple[Handler | None, "EventTable"] | None]
"""For each of Composer's events: the handler and the table in which to look up the next event. An event whose entry is None is ignored.

The handler of an event at which the run begins is None.
"""


class EventTables:
    """The tables in which the host looks up its handlers for Composer's events. For speed, events that nothing needs have no handler.

    During training, there is one table for each event of a step. It is used after this event, and `doubt` is called before the
    handler of each event that must not come next.

    Args:
        handlers: the handlers by the event's value.
        of_closure: the handlers that are used instead while an optimizer calls its closure again.
        doubt: a function that is called with an event that is not expected, and with Composer's state.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], of_closure: Mapping[str, Handler], doubt: Callable[[str, Any], None]
    ) -> None:
        self._handlers, self._of_closure, self._doubt = handlers, of_closure, doubt
        self.before_run: EventTable = {event.value: None for event in Event}
        """The table before a run begins and after it has ended."""
        self.before_run[Event.AFTER_LOAD.value] = None, self.before_run
        in_training = {
            *_STEP_EVENTS,
            *(f"{span}_{at}" for span in ("iteration", "epoch") for at in ("start", "end", "checkpoint")),
        }
        self.after_training = _make_unordered_table(
            {event: handler for event, handler in handlers.items() if event not in in_training}
        )
        """The table after Composer has ended training, when it may still evaluate and predict."""
        self.after: dict[str, EventTable] = {}
        """The tables during training, by the last event of a step that has come. The table of "" is used before the first such event."""
        self.in_closure: EventTable = {}
        """The table while an optimizer calls its closure again in the same step. The handlers only record the loss."""
        self._left_out: set[str] = set()  # the events that have no handler now
        self._make(handlers)

    def listen(self, driver: LifecycleDriver) -> None:
        """Before a step, find out which events of the forward pass, the loss and the optimizer need a handler.

        If these are other events than in the previous step, make the tables of handlers again.
        """
        needed: set[str] = set()
        for events, is_needed in (
            (_MICROBATCH_EVENTS, driver.listens_to("forward")),
            (_RESULT_EVENTS, driver.is_read),
            (_LOSS_EVENTS, driver.is_loss_read),
        ):
            needed.update(events if is_needed else ())
        left_out = {*_MICROBATCH_EVENTS, *_RESULT_EVENTS, *_LOSS_EVENTS} - needed
        if left_out != self._left_out:
            self._left_out = left_out
            self._make({event: handler for event, handler in self._handlers.items() if event not in left_out})

    def _make(self, handlers: Mapping[str, Handler]) -> None:
        predecessors = _predecessors(handlers)
        self.after = {last: {} for last in ("", *predecessors)}
        for last, table in self.after.items():
            for event in self.before_run:
                handler = handlers.get(event)
                if handler is None:
                    table[event] = None
                elif event not in predecessors:
                    table[event] = handler, table
                elif last in predecessors[event]:
                    table[event] = handler, self.after[event]
                else:
                    table[event] = partial(self._handle_in_doubt, event, handler), self.after[event]
        outside = {event: handler for event, handler in handlers.items() if event not in _CLOSURE_EVENTS}
        self.in_closure = _make_unordered_table(outside | (dict(self._of_closure) if Event.AFTER_LOSS.value in handlers else {}))
        self.in_closure[Event.BATCH_END.value] = handlers[Event.BATCH_END.value], self.after[Event.BATCH_END.value]

    def _handle_in_doubt(self, event: str, handler: Handler, state: Any) -> None:
        self._doubt(event, state)
        handler(state)


def _make_unordered_table(handlers: Mapping[str, Handler]) -> EventTable:
    """Return a table of `handlers` that does not check the order of events: after each event, the host keeps using this table."""
    table: EventTable = {event.value: None for event in Event}
    table.update({event: (handler, table) for event, handler in handlers.items()})
    return table


def _predecessors(handlers: Collection[str]) -> dict[Any, frozenset[str]]:
    """Return the handled events that may come directly before each event of a step. `handlers` names all handled events."""
    events = [event for event in _STEP_EVENTS if event in handlers]
    found = {later: {earlier} for earlier, later in pairwise(events)}
    if inside := [event for event in events if event in _CLOSURE_EVENTS[1:-1]]:
        found[inside[0]].add(inside[-1])  # the next microbatch may begin directly after the last event of a microbatch
    # If an optimizer calls its closure again, `before_train_batch` follows the last event of the closure's previous call.
    found["before_train_batch"].add(next(event for event in reversed(events) if event in _CLOSURE_EVENTS))
    # A resumed Trainer fetches and skips batches that it has trained on before, so it fires `before_dataloader` repeatedly.
    found["before_dataloader"] = {"", "epoch_end", "before_dataloader", "batch_checkpoint"}
    found["epoch_end"] = {"before_dataloader", "batch_checkpoint"}
    return {event: frozenset(several) for event, several in found.items()}


class EvaluationRequests:
    """Carries out callbacks' requests for evaluations, by wrapping the functions that decide when Composer evaluates."""

    def __init__(self) -> None:
        self.is_pending = False

    def ask(self) -> None:
        """Request an evaluation, which begins when Composer next checks whether an evaluation is due."""
        self.is_pending = True

    def install(self, evaluators: Iterable[Any]) -> None:
        """Wrap each evaluator's `eval_interval`, unless it is wrapped already, so that `ask` can request an evaluation."""
        for evaluator in evaluators:
            if getattr(evaluator.eval_interval, "requests", None) is not self:
                evaluator.eval_interval = _Interval(evaluator.eval_interval, self)


class _Interval:
    def __init__(self, own: Callable[[Any, Any], bool], requests: EvaluationRequests) -> None:
        self.own, self.requests = own, requests

    def __call__(self, state: Any, event: Any) -> bool:
        return self.own(state, event) or (self.requests.is_pending and event is not Event.FIT_END)


class SavedCheckpoints:
    """Finds the checkpoints that Composer's `CheckpointSaver`s have written, since Composer fires no event when it writes one."""

    def __init__(self, state: Any, logger: Any) -> None:
        self._state, self._logger = state, logger
        self.savers = [each for each in state.callbacks if isinstance(each, CheckpointSaver)]
        self._saved_at = [each.last_checkpoint_batch for each in self.savers]  # the batch count at each saver's last checkpoint

    def save(self) -> None:
        """Make the Trainer's first `CheckpointSaver` save now, regardless of its interval."""
        saver = self.savers[0]
        interval, saver.save_interval = saver.save_interval, lambda state, event: True
        try:
            saver.batch_checkpoint(self._state, self._logger)
        finally:
            saver.save_interval = interval

    def report(self, run: HostedRun) -> None:
        """Fire the events of each checkpoint that was written since the last call of this method."""
        if not self.savers:
            return
        for place, saver in enumerate(self.savers):
            if saver.last_checkpoint_batch is not self._saved_at[place]:
                self._saved_at[place] = saver.last_checkpoint_batch
                run.fire_checkpoint(str(next(reversed(saver.all_saved_checkpoints_to_timestamp))), lambda info: None)


class StepLosses:
    """Collects the losses of a step's microbatches, and computes the weighted mean of these losses."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, int]] = []
        """The loss and the weight of each microbatch."""

    def add(self, state: Any, loss: Tensor, samples: int) -> None:
        """Add the loss of a microbatch, with its number of samples as the weight.

        `samples` is the number of samples in the whole step. If Composer's microbatch size is at least `samples`, the step
        has only one microbatch.
        """
        value = loss.detach().clone()  # copy the loss, because Composer scales a total of several losses in place
        is_whole = state.device_train_microbatch_size >= samples  # whether this microbatch is the whole batch
        self.parts.append((value, 1 if is_whole else counts_of(state.batch)[0] or 1))

    def mean(self) -> Tensor | None:
        """Return the mean loss of the microbatches, weighted by their samples; None if there is no loss."""
        parts = self.parts
        if len(parts) < 2:
            return parts[0][0] if parts else None
        samples = sum(count for _, count in parts)
        return sum((loss * (count / samples) for loss, count in parts[1:]), start=parts[0][0] * (parts[0][1] / samples))


class Listener(LoggerDestination):  # type: ignore[misc]  # mypy does not read Composer's types
    """A logger of Composer that adds the metrics logged in Composer's Trainer to callsheet's metrics records."""

    def __init__(self, run: HostedRun, logger: Any) -> None:
        self._records, self._log, self._driver = run.records, run.ctx.log, run.driver
        self._logger = logger
        logger.destinations = (*logger.destinations, self)
        self._names: dict[str, str] = {}  # Composer's name of a metric -> callsheet's name; "" for metrics that are left out

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log Composer's metrics, except those that callsheet logs itself, such as times and the results of evaluations."""
        if self._records.are_read:
            try:
                self._take(metrics)
            except Exception as error:
                self._driver.give_up(error)

    def remove(self) -> None:
        """Remove this logger from Composer's Logger."""
        self._logger.destinations = tuple(each for each in self._logger.destinations if each is not self)

    def _take(self, metrics: dict[str, Any]) -> None:
        names = self._names
        for name, value in metrics.items():
            ours = names.get(name)
            if ours is None:
                ours = names[name] = _our_name(name)
            if ours and is_one_number(value):
                self._log({ours: value})


def _our_name(name: str) -> str:
    family, _, rest = name.partition("/")
    if family == "time" or name in _LOGGED_ELSEWHERE or (family == "metrics" and not rest.startswith("train/")):
        return ""
    return f"train/{rest.removeprefix('train/')}" if family == "metrics" or name.startswith("loss/train/") else f"composer/{name}"


def is_one_number(value: Any) -> bool:
    """Return whether the value is a single number, which can be logged."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def training_loss(loss: Any) -> Tensor:
    """Return the loss on which Composer runs the backward pass. Of several losses, return the one named `total`, or else the sum."""
    if isinstance(loss, Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    if isinstance(loss, Mapping) and "total" in loss:
        total: Tensor = loss["total"]
        return total if total.dim() == 0 else total.mean()
    return sum((each.mean() for each in (loss.values() if isinstance(loss, Mapping) else loss)), start=Tensor([0.0]).squeeze())
