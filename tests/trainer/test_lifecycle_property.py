"""Random runs: the lifecycle allows their events, `on_run_end` is fired once, and no field is available outside its window."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from callsheet import Callback, Context, Outcome, Trainer
from callsheet.core.lifecycle import EVENTS, FIELDS, POINTS, SPAN_OF, SPANS
from callsheet.errors import ConfigError, FieldNotAvailable, RunEndedError
from callsheet.testing import GrammarChecker

ERRORS: tuple[type[BaseException], ...] = (RuntimeError, StopIteration, KeyboardInterrupt, SystemExit)
REQUESTS = ("stop", "save", "evaluate")


@dataclass(frozen=True)
class Action:
    """A request or an error at the nth time that `event` is fired."""

    what: str
    event: str
    nth: int


@dataclass(frozen=True)
class Plan:
    batches: tuple[int, ...]  # the number of samples in each
    is_sized: bool
    dry_epoch: int  # the epoch in which a loader of unknown length is empty; 0: none
    microbatch_size: int | None
    epochs_per_round: int | None
    duration_unit: str
    eval_interval: str | None
    log_interval: str
    evaluators: tuple[int, ...]  # the number of batches of each evaluator
    calls: tuple[tuple[str, int], ...]
    actions: tuple[Action, ...]
    error: type[BaseException]
    failing_forward: int
    failing_batch: int
    keeps_outputs: bool
    closes_by_hand: bool


@dataclass
class Raised:
    """The errors that were raised on purpose, in order, each with the event whose callback raised it (or an empty string)."""

    errors: list[tuple[BaseException, str]] = field(default_factory=list)

    def throw(self, kind: type[BaseException], event: str = "") -> None:
        error = kind("on purpose")
        self.errors.append((error, event))
        raise error


class Acts(Callback):
    """Carries out the plan's actions, and records whether a stop was requested during the last training."""

    phase = "change"

    def __init__(self, plan: Plan, raised: Raised) -> None:
        self.plan = plan
        self.raised = raised
        self.counts = dict.fromkeys(EVENTS, 0)
        self.is_training = False
        self.was_stopped = False
        self.stopped_elsewhere = False

    def on_event(self, ctx: Context) -> None:
        event = str(ctx.event)
        self.counts[event] += 1
        if event == "on_train_start":
            self.is_training, self.was_stopped = True, False
        for action in self.plan.actions:
            if action.event == event and action.nth == self.counts[event]:
                self._act(action, ctx)
        if event == "on_train_end":
            self.is_training = False

    def _act(self, action: Action, ctx: Context) -> None:
        if action.what == "raise":
            self.raised.throw(self.plan.error, action.event)
        elif action.what == "stop":
            ctx.control.stop("the plan says so")
            self.was_stopped |= self.is_training
            self.stopped_elsewhere |= not self.is_training
        elif action.what == "save":
            ctx.control.save("the plan says so")
        else:
            ctx.control.evaluate("the plan says so")


@dataclass(frozen=True)
class Seen:
    event: str
    readable: frozenset[str]
    step: int
    epoch: int
    batches: int
    epochs: int
    outcome: Outcome | None
    exception: BaseException | None
    span: str | None


class Witness(Callback):
    """Reads every field at every event."""

    phase = "report"

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.problems: list[str] = []

    @property
    def events(self) -> list[str]:
        return [seen.event for seen in self.seen]

    def on_event(self, ctx: Context) -> None:
        values: dict[str, Any] = {}
        for name in FIELDS:
            try:
                values[name] = getattr(ctx, name)
            except FieldNotAvailable as error:
                if name not in str(error) or ctx.has(name):
                    self.problems.append(f"{ctx.event}: {name}: {error}")
            else:
                if not ctx.has(name):
                    self.problems.append(f"{ctx.event}: {name} can be read, and has() denies it")
        done = ctx.state.timestamp
        self.seen.append(
            Seen(
                str(ctx.event),
                frozenset(values),
                ctx.step,
                ctx.epoch,
                done.batch,
                done.epoch,
                ctx.run.outcome,
                values.get("exception"),
                values.get("span"),
            )
        )


class Keeper(Callback):
    keep_fields = ("outputs",)

    def on_train_end(self, ctx: Context) -> None: ...


class FailsOnce(nn.Module):
    """A linear model that fails at one of its calls, as planned."""

    def __init__(self, plan: Plan, raised: Raised) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.plan = plan
        self.raised = raised
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.plan.failing_forward:
            self.raised.throw(self.plan.error)
        outputs: Tensor = self.linear(inputs)
        return outputs


class Stream:
    """An iterable of batches without a length."""

    def __init__(self, batches: list[Any], plan: Plan | None = None, raised: Raised | None = None) -> None:
        self.batches = batches
        self.plan = plan
        self.raised = raised
        self.epoch = self.given = 0

    def __iter__(self) -> Iterator[Any]:
        return _StreamIterator(self)

    def next_of(self, position: int) -> Any:
        if self.plan is not None and self.raised is not None:
            if self.epoch == self.plan.dry_epoch:
                raise StopIteration
            self.given += 1
            if self.given == self.plan.failing_batch:
                # raised by an iterator, StopIteration means its end, not an error
                self.raised.throw(RuntimeError if self.plan.error is StopIteration else self.plan.error)
        if position == len(self.batches):
            raise StopIteration
        return self.batches[position]


class _StreamIterator:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        stream.epoch += 1
        self.position = 0

    def __iter__(self) -> _StreamIterator:
        return self

    def __next__(self) -> Any:
        batch = self.stream.next_of(self.position)
        self.position += 1
        return batch


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.batches)


def some_batches(sizes: Iterable[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(size, 2), torch.ones(size, 1)) for size in sizes]


def run(plan: Plan, folder: Path, acts: Acts, witness: Witness, raised: Raised) -> None:
    data = (Sized if plan.is_sized else Stream)(some_batches(plan.batches), plan, raised)
    evaluators: Mapping[str, Iterable[Any]] = {f"set{i}": Stream(some_batches([2] * n)) for i, n in enumerate(plan.evaluators)}
    trainer = Trainer(
        FailsOnce(plan, raised),
        nn.functional.mse_loss,
        data,
        evaluators,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        microbatch_size=plan.microbatch_size,
        epochs_per_round=plan.epochs_per_round,
        eval_interval=plan.eval_interval,
        log_interval=plan.log_interval,
        callbacks=[acts, witness, *([Keeper()] if plan.keeps_outputs else [])],
        run_name="plan",
        runs_folder=folder,
    )
    calls: dict[str, Callable[[int], object]] = {
        "fit": lambda n: trainer.fit(f"{n}{plan.duration_unit}"),
        "evaluate": lambda n: trainer.evaluate() if plan.evaluators else trainer.evaluate(Stream(some_batches([1] * n))),
        "test": lambda n: trainer.test(Stream(some_batches([2] * (n - 1)))),
        "predict": lambda n: trainer.predict(Stream(some_batches([2] * (n - 1)))),
        "save": lambda n: trainer.save_checkpoint(),
    }
    try:
        if plan.closes_by_hand:
            for name, n in plan.calls:
                calls[name](n)
        else:
            with trainer:
                for name, n in plan.calls:
                    calls[name](n)
    finally:
        trainer.close()
        trainer.close()
        recorded = len(witness.seen)
        for name in calls:
            with pytest.raises(RunEndedError):
                calls[name](1)
        assert len(witness.seen) == recorded, "an event was fired after the run's end"


def check_pairs(events: list[str]) -> None:
    """Check, independently of the grammar checker, that spans nest and end; after an exception, only the run's end is fired."""
    assert events[0] == "on_run_start"
    assert events[-1] == "on_run_end"
    assert events.count("on_run_end") == 1
    assert events.count("on_exception") <= 1
    stack: list[str] = []
    for event in events:
        if event in POINTS:
            continue
        span = SPANS[SPAN_OF[event]]
        if event == span.start_event:
            stack.append(span.name)
        elif "on_exception" in events and event == "on_run_end":
            stack.clear()
        else:
            assert stack.pop() == span.name
    assert not stack
    if "on_exception" in events:
        assert events[events.index("on_exception") :] == ["on_exception", "on_run_end"]


def open_span(events: list[str], *, is_raised_by_callback: bool) -> str:
    """Return the innermost span that was open when the last of `events` was fired; raise an error if a callback did."""
    stack: list[str] = []
    for event in events:
        if event not in POINTS and event == SPANS[SPAN_OF[event]].start_event:
            stack.append(SPAN_OF[event])
        elif event not in POINTS:
            ended = stack.pop()
            if is_raised_by_callback and event is events[-1]:
                return ended
    return stack[-1]


def expected_outcome(error: BaseException | None, acts: Acts) -> set[Outcome]:
    if error is not None:
        return {Outcome.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Outcome.FAILED}
    if acts.was_stopped:
        return {Outcome.STOPPED}
    return {Outcome.FINISHED, Outcome.STOPPED} if acts.stopped_elsewhere else {Outcome.FINISHED}


durations = st.integers(1, 6)
acting_events = st.sampled_from([event for event in EVENTS if event not in ("on_preempt",)])
plans = st.builds(
    Plan,
    batches=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    is_sized=st.booleans(),
    dry_epoch=st.sampled_from([0, 0, 0, 2, 3]),
    microbatch_size=st.sampled_from([None, 1, 2, 3]),
    epochs_per_round=st.sampled_from([None, 1, 2]),
    duration_unit=st.sampled_from(["ba", "ep", "sp"]),
    eval_interval=st.sampled_from([None, "1ep", "2ba", "3sp", "0.3dur"]),
    log_interval=st.sampled_from(["1ba", "2ba", "3ba", "1ep"]),
    evaluators=st.sampled_from([(), (1,), (2, 0), (1, 2)]),
    calls=st.lists(
        st.tuples(st.sampled_from(["fit", "fit", "evaluate", "test", "predict", "save"]), durations), min_size=1, max_size=4
    ).map(tuple),
    actions=st.lists(
        st.builds(
            Action,
            what=st.sampled_from([*REQUESTS, "raise"]),
            event=acting_events,
            nth=st.integers(1, 3),
        ),
        max_size=4,
    ).map(tuple),
    error=st.sampled_from(ERRORS),
    failing_forward=st.sampled_from([0, 0, 0, 1, 4, 9]),
    failing_batch=st.sampled_from([0, 0, 0, 1, 3, 5]),
    keeps_outputs=st.booleans(),
    closes_by_hand=st.booleans(),
)


def check(plan: Plan) -> list[str]:
    """Run the plan, check everything against the lifecycle, and return the events."""
    raised, witness = Raised(), Witness()
    acts = Acts(plan, raised)
    came_out: BaseException | None = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(plan, Path(folder), acts, witness, raised)
        except BaseException as error:
            came_out = error
    events = witness.events
    if came_out is None:
        assert not raised.errors, "an error was swallowed"
    elif raised.errors and not (isinstance(came_out, ConfigError) and raised.errors[0][1] in ("on_exception", "on_run_end")):
        assert came_out is raised.errors[0][0]
    else:  # an error in a callback at the end of the failed run does not hide this error
        assert isinstance(came_out, ConfigError), came_out
        assert "had no batches" in str(came_out)

    check_pairs(events)
    assert not witness.problems
    checker = GrammarChecker()
    kept: set[str] = set()  # outputs are kept until the step's end if a callback declares it
    for seen in witness.seen:
        checker.check(seen.event)
        if seen.event == "on_exception":
            assert {"exception", "span"} <= seen.readable
        else:
            assert seen.readable == checker.readable() | kept, seen.event
        if plan.keeps_outputs and seen.event in ("on_forward_end", "on_train_step_end", "on_exception"):
            kept = {"outputs"} if seen.event == "on_forward_end" else set()
        assert (seen.event == "on_run_end") == (seen.outcome is not None)
    checker.finish()

    first = next((event for error, event in raised.errors if error is came_out), "")
    is_raised_by, at_the_end = first, first == "on_run_end"
    assert ("on_exception" in events) == (came_out is not None and not at_the_end)
    if "on_exception" in events:
        place = events.index("on_exception")
        assert witness.seen[place].exception is came_out
        assert witness.seen[place].span == open_span(events[:place], is_raised_by_callback=bool(is_raised_by))
    assert witness.seen[-1].outcome in expected_outcome(None if at_the_end else came_out, acts)

    in_step = False
    for seen in witness.seen:  # steps count from 1; the counts of completed ones change just before the end events
        in_step = (in_step or seen.event == "on_train_step_start") and seen.event not in ("on_train_step_end", "on_run_end")
        if "on_exception" not in events:
            assert seen.step == seen.batches + in_step, seen.event
        if seen.event == "on_epoch_start":
            assert seen.epoch == seen.epochs + 1
    return events


@pytest.mark.test_all
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans)
def test_any_run_follows_the_lifecycle(plan: Plan) -> None:
    logging.disable(logging.CRITICAL)  # errors while an error is handled are logged, hundreds of times
    try:
        check(plan)
    finally:
        logging.disable(logging.NOTSET)


def plain(**changes: Any) -> Plan:
    whole: dict[str, Any] = {
        "batches": (3, 2),
        "is_sized": True,
        "dry_epoch": 0,
        "microbatch_size": 2,
        "epochs_per_round": 1,
        "duration_unit": "ep",
        "eval_interval": "1ep",
        "log_interval": "1ba",
        "evaluators": (1,),
        "calls": (("fit", 2), ("evaluate", 1), ("test", 2), ("predict", 2), ("save", 1)),
        "actions": (Action("save", "on_train_step_end", 1),),
        "error": RuntimeError,
        "failing_forward": 0,
        "failing_batch": 0,
        "keeps_outputs": False,
        "closes_by_hand": False,
    }
    return Plan(**(whole | changes))


def test_the_plain_run_fires_every_event_but_those_of_failures() -> None:
    assert set(EVENTS) - set(check(plain())) == {"on_preempt", "on_exception"}


@pytest.mark.parametrize("event", [event for event in EVENTS if event not in ("on_preempt", "on_exception")])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_of_a_callback_at_any_event_ends_the_run_as_promised(event: str, error: type[BaseException]) -> None:
    actions = (Action("save", "on_train_step_end", 1), Action("raise", event, 1))
    events = check(plain(actions=actions, error=error))
    at = events.index(event)
    assert events[at:] == ([event] if event == "on_run_end" else [event, "on_exception", "on_run_end"])


@pytest.mark.parametrize("event", ["on_exception", "on_run_end"])
def test_an_error_at_the_end_of_a_run_without_data_does_not_hide_why_it_failed(event: str) -> None:
    logging.disable(logging.CRITICAL)
    try:
        check(plain(batches=(1,), is_sized=False, dry_epoch=2, calls=(("fit", 2),), actions=(Action("raise", event, 1),)))
    finally:
        logging.disable(logging.NOTSET)


def test_an_error_in_on_exception_does_not_hide_the_first_error() -> None:
    actions = (
        Action("raise", "on_backward_end", 2),
        Action("raise", "on_exception", 1),
        Action("raise", "on_run_end", 1),
    )
    logging.disable(logging.CRITICAL)
    try:
        check(plain(actions=actions))
    finally:
        logging.disable(logging.NOTSET)


IN_TRAINING = [
    event
    for event in EVENTS
    if not event.startswith(("on_run", "on_checkpoint_load", "on_data", "on_test", "on_predict"))
    and event not in ("on_preempt", "on_exception")
]


@pytest.mark.parametrize("event", IN_TRAINING)
def test_stop_from_any_event_of_training_ends_it_at_the_next_boundary(event: str) -> None:
    save = Action("save", "on_train_step_end", 1)
    calls = (("fit", 9),)
    events = check(plain(calls=calls, actions=(save, Action("stop", event, 1))))
    requested_at = events.index(event)
    later = events[requested_at + 1 :]
    # the current or next step finishes, and no further step starts
    assert later.count("on_train_step_start") <= 1
    assert later[-2:] == ["on_train_end", "on_run_end"] or event == "on_train_end"


@pytest.mark.parametrize("event", IN_TRAINING)
def test_a_save_requested_at_any_event_of_training_is_carried_out(event: str, tmp_path: Path) -> None:
    """A save that is requested at any event is followed by `on_checkpoint_save_end`."""
    raised, witness = Raised(), Witness()
    # one round and one epoch, so that their end events are the last of their kind
    first = (Action("save", "on_train_step_end", 1),) if event.startswith("on_checkpoint_") else ()
    plan = plain(calls=(("fit", 1),), epochs_per_round=None, actions=(*first, Action("save", event, 1)))
    run(plan, tmp_path, Acts(plan, raised), witness, raised)
    requested_at = witness.events.index(event)
    assert "on_checkpoint_save_end" in witness.events[requested_at + 1 :]


def test_a_save_requested_at_the_end_of_a_stopped_epoch_is_carried_out(tmp_path: Path) -> None:
    raised, witness = Raised(), Witness()
    plan = plain(calls=(("fit", 1),), actions=(Action("stop", "on_train_step_end", 1), Action("save", "on_epoch_end", 1)))
    run(plan, tmp_path, Acts(plan, raised), witness, raised)
    assert "on_checkpoint_save_end" in witness.events


@pytest.mark.parametrize("event", ["on_run_start", "on_data_init_end"])
def test_a_stop_requested_during_set_up_is_carried_out(event: str, tmp_path: Path) -> None:
    raised, witness = Raised(), Witness()
    plan = plain(calls=(("fit", 9),), actions=(Action("stop", event, 1),))
    run(plan, tmp_path, Acts(plan, raised), witness, raised)
    assert witness.seen[-1].outcome is Outcome.STOPPED
    assert witness.seen[-1].step <= 1


def test_an_evaluation_requested_inside_a_step_is_fired_after_it(tmp_path: Path) -> None:
    raised, witness = Raised(), Witness()
    plan = plain(eval_interval=None, calls=(("fit", 1),), actions=(Action("evaluate", "on_backward_start", 1),))
    run(plan, tmp_path, Acts(plan, raised), witness, raised)
    place = witness.events.index("on_eval_all_start")
    assert witness.events.count("on_eval_all_start") == 1
    assert witness.seen[place].step == 1
    assert "on_train_step_end" in witness.events[:place]
