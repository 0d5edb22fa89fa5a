"""What the mechanisms that make a step cheaper save: the instructions that callsheet adds with each mechanism and without it.

One process trains again and again. In each training after the first, one mechanism is replaced by plain code that does the same.
The instructions are counted as in `instructions.py`, but with a smaller model, without metrics records and without timing the
callbacks, so that the counts are more exact. A mechanism is kept if callsheet adds at least 2 % more without it in at least one
loop.

    python benchmarks/shortcuts.py [--of trainer,lane,delivery,bare,huggingface]

It needs `valgrind`, and takes about two minutes for each loop.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import loops
import trainer as peers
from callsheet import Background, Callback, Context, Trainer
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.callbacks import ActivationMonitor, GarbageCollection, OptimizerMonitor
from callsheet.core import context
from callsheet.core.costs import Costs
from callsheet.core.run_state import TrainState
from callsheet.errors import FieldNotAvailable
from callsheet.lanes import capture
from instructions import COUNTED, Forwards, check_valgrind, counted, prepare_child, start_instrumentation
from timing import machine

KEPT_FROM = 2.0  # the least saving of a mechanism that is kept, in per cent of what callsheet adds
WARM = 150  # steps before the count, because Python needs about 60 executions to specialize code again after a class was changed
STEPS = WARM + COUNTED + 8
NO_RECORDS = 1000  # steps between two records
TRAINER, LANE, DELIVERY = "trainer", "lane", "delivery"
NAMES = {TRAINER: "Trainer", LANE: "Trainer, its own thread", DELIVERY: "Trainer, the lane's thread"}
DEFAULT = (TRAINER, LANE, DELIVERY, "bare", "huggingface")


# --- each mechanism, replaced by plain code ---


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of `owner` within the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def close(self: Context, event: str) -> None:
    """Close the fields of an event in a loop over their names."""
    for name, keeps in context._FIELDS_CLOSED_BY.get(event, ()):
        if not (keeps and name in self.kept):
            setattr(self, name, None)
            delattr(self, name)


def capture_functions(names: tuple[str, ...], changing: tuple[int, ...], new: tuple[int, ...]) -> dict[str, Callable[..., Any]]:
    """Return functions that enqueue and deliver snapshots in loops over the names of the fields."""
    of_state = [f"state.{name}" for name in capture._STATE_ATTRIBUTES]
    read = attrgetter("step", "epoch", *of_state, *names)

    def enqueuer(snapshot_class_for: Any, deliver: Any, registration: Any, queue: Any, otherwise: Any) -> Any:
        kind, known, are_new = None, None, False

        def may_change(values: tuple[Any, ...], place: int) -> bool:
            value = values[place]
            return type(value) not in capture._PLAIN_TYPES and not (place in new and are_new and capture._is_lone(value))

        def enqueue(ctx: Context) -> Any:
            nonlocal kind, known, are_new
            try:
                if ctx.state is not known:
                    kind, known = snapshot_class_for(ctx)
                    are_new = ctx.loss_is_new
                values = (deliver, kind, *read(ctx))
            except FieldNotAvailable:
                return otherwise(ctx)
            if registration.is_off or any(may_change(values, place) for place in changing):
                return otherwise(ctx)
            if len(queue.items) < queue.room:
                return queue.items.append(values)
            return queue.put(values)

        return enqueue

    def deliverer(capturing: Any, event: str, registration: Any, handler: Any, await_answer: Any, fails: Any) -> Any:
        def deliver(values: Any) -> None:
            if registration.is_off and registration.is_silent_at(event):
                return
            made = object.__new__(values[1])
            try:
                made.state = object.__new__(TrainState)
                made.step, made.epoch = values[2:4]
                arrived = values if type(values) is tuple else capturing.resolve_pending(values)
                for name, value in zip(capture._STATE_ATTRIBUTES, arrived[4:], strict=False):
                    setattr(made.state, name, value)
                for name, value in zip(names, arrived[capture._FIRST_FIELD_PLACE :], strict=True):
                    setattr(made, name, value)
                if arrived is not values:
                    capturing.drop_unavailable(made)
                if (answer := handler(made)) is not None:
                    await_answer(answer)
            except BaseException as error:
                fails(made, error)
            else:
                if registration.failures_in_a_row:
                    registration.failures_in_a_row = 0

        return deliver

    return {"enqueuer": enqueuer, "deliverer": deliverer}


def mute(self: Context, callback: Callback, *events: str, until: int | None = None) -> None:
    """Mute the events, unless they are to be unmuted at a step: then the handlers check the step themselves."""
    if until is None:
        MUTE(self, callback, *events)


MUTE = Context.mute


def driver_with(**reads: Callable[[], bool]) -> Callable[..., None]:
    """Return a constructor of the lifecycle driver with these arguments replaced."""

    def init(self: LifecycleDriver, *args: Any, **kwargs: Any) -> None:
        INIT(self, *args, **kwargs | reads)

    return init


INIT = LifecycleDriver.__init__


def listen_to_each_span(self: LifecycleDriver) -> bool:
    """Find out which spans have listeners. The loss is a span like all others, even if it has no listeners."""
    has_changed = LISTEN(self)
    loss, backward = self.spans["loss"], self.spans["backward"]
    loss.is_passed, backward.before_start = False, None
    return has_changed


LISTEN = LifecycleDriver.listen


def start_and_end(self: LifecycleDriver, name: str) -> None:
    """Start a span and end it, also if it has no listeners."""
    self.start(name)
    self.end(name)


@contextmanager
def all_spans_opened() -> Iterator[None]:
    """Let the driver open all spans of a step in which any span inside the step has listeners."""
    with (
        replaced(LifecycleDriver, "listen", listen_to_each_span),
        replaced(LifecycleDriver, "start_and_end", start_and_end),
        replaced(LifecycleDriver, "start_step", lambda self: self.start("train_step")),
    ):
        yield


def advance_untimed(self: Costs, step: int, *, is_needed: bool) -> bool:
    """Begin a run without timing handlers in some windows: the windows depend on the time, and valgrind is slow."""
    if not self.has_begun:
        self.has_begun, self._first = True, step
    return False


def always() -> bool:
    return True


Change = Callable[[], Any]

CLOSE = "`Context.close`: a compiled function deletes the fields of an event"
CAPTURE = "a lane's capture: compiled functions copy the fields of an event"
PASSED = "`is_passed`, `start_and_end` and `start_step`: spans without listeners, beside spans with listeners, are not opened one by one"
START_STEP = "`start_step`: a step begins without the general checks"
END_STEP = "`end_step` and `step_passes`: a step without listeners ends without setting its fields"
LOSS_READ = "`is_loss_read`: the loss is not computed if neither records nor checkpoints need it"
READ = "`is_read`: results of steps are not collected if nothing reads them"
MUTING = "`ctx.mute(until=)`: handlers are unmuted at a step"

CHANGES: dict[str, Change] = {
    CLOSE: partial(replaced, Context, "close", close),
    CAPTURE: partial(replaced, capture, "_compile_functions", capture_functions),
    PASSED: all_spans_opened,
    START_STEP: partial(replaced, LifecycleDriver, "start_step", lambda self: self.start("train_step")),
    END_STEP: partial(replaced, LifecycleDriver, "end_step", lambda self: self.end("train_step")),
    LOSS_READ: partial(replaced, LifecycleDriver, "__init__", driver_with(is_loss_needed=always)),
    READ: partial(replaced, LifecycleDriver, "__init__", driver_with(is_recorded=always)),
    MUTING: partial(replaced, Context, "mute", mute),
}


# --- within valgrind ---


class Subject(NamedTuple):
    """Trainings with the same callbacks: one unchanged, one without each mechanism, and an unchanged one to show the error."""

    having: str
    mechanisms: tuple[str, ...]
    train: Callable[[Callable[[], None]], object]
    """Trains, and calls its argument once per step."""


def fit(made: Callable[[], list[Callback]]) -> float:
    """Train as `trainer.py` does, with the callbacks that `made` returns."""
    model, batches, optimizer = peers.parts()
    with Trainer(
        model,
        peers.loss_function,
        batches,
        optimizer=optimizer,
        max_duration="1ep",
        device="cpu",
        callbacks=made(),
        log_interval=NO_RECORDS,
        progress=False,
    ) as trainer:
        trainer.fit()
    return 0.0


def small_parts(device: str = "cpu") -> tuple[nn.Module, list[tuple[Tensor, Tensor]], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    batches = [(torch.randn(4, 4), torch.randint(0, 2, (4,))) for _ in range(peers.STEPS)]
    return model, batches, torch.optim.SGD(model.parameters(), lr=0.01)


class SmallModel(nn.Module):
    """A linear layer with four inputs and one output."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(inputs)
        return outputs


def peer(loop: Callable[[], float], on_step: Callable[[], None]) -> None:
    with replaced(peers, "parts", small_parts):
        loops.train_peer(loop, on_step, steps=STEPS)


def monitors() -> list[Callback]:
    """Return callbacks that mute their handlers until a step. None of them measures anything in the steps that are counted."""
    return [GarbageCollection(), OptimizerMonitor(batch_log_interval=100), ActivationMonitor()]


def in_lanes(number: int) -> list[Callback]:
    return [Background(peers.TwoHooks()) for _ in range(number)]


class CallAtStepEnd(Callback):
    """Calls a function at the end of each step."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self._on_step = on_step

    def on_train_step_end(self, ctx: Context) -> None:
        self._on_step()


def deliver(on_step: Callable[[], None]) -> None:
    peer(lambda: fit(lambda: [Background(CallAtStepEnd(on_step))]), lambda: None)


def loop_of(name: str) -> tuple[Callable[[Callable[[], None]], object] | None, tuple[Subject, ...]]:
    """Return the training without callsheet, if there is one, and the subjects."""
    if name == TRAINER:
        return partial(peer, peers.bare), (Subject("three monitors", (MUTING,), partial(peer, partial(fit, monitors))),)
    if name == LANE:
        of = {count: partial(peer, partial(fit, partial(in_lanes, count))) for count in (1, 10)}
        return partial(peer, peers.bare), tuple(Subject(f"{count} in lanes", (CAPTURE,), train) for count, train in of.items())
    if name == DELIVERY:
        return None, (Subject("1 in a lane", (CAPTURE,), deliver),)

    def host(having: str) -> Callable[[Callable[[], None]], None]:
        return lambda on_step: loops.train(name, having, on_step, steps=STEPS, log_every=NO_RECORDS, model=SmallModel)

    return host(loops.EMPTY), (
        Subject("nobody listens", (START_STEP, END_STEP, LOSS_READ, READ), host(loops.NOBODY)),
        Subject("ten callbacks", (CLOSE, PASSED), host(loops.TEN)),
    )


def run_loop(name: str) -> None:
    """Run the trainings of a loop, in the order in which `print_loop` reads their counts."""
    empty, subjects = loop_of(name)
    sys.setswitchinterval(1000)  # so a lane's thread runs only when the training thread waits
    if name not in (TRAINER, LANE, DELIVERY):
        loops.loop_of(name)
    start_instrumentation()
    with replaced(Costs, "advance", advance_untimed):
        count(empty, subjects)


def count(empty: Callable[[Callable[[], None]], object] | None, subjects: tuple[Subject, ...]) -> None:
    """Train without callsheet, if there is such a training, then train all subjects."""
    if empty is not None:
        empty(Forwards(WARM).on_forward)
    for subject in subjects:
        for mechanism in ("", *subject.mechanisms, ""):
            with CHANGES[mechanism]() if mechanism else nullcontext():
                subject.train(Forwards(WARM).on_forward)


# --- in the parent process ---


def print_loop(name: str, most: dict[str, tuple[float, str]]) -> None:
    """Print the rows of a loop. Update in `most` the largest saving of each mechanism and where it was measured."""
    empty, subjects = loop_of(name)
    counts = iter(counted(name, __file__, "--child", name, caches=False))
    floor = next(counts).instructions if empty is not None else 0.0
    for subject in subjects:
        first, *without, last = (next(counts).instructions - floor for _ in range(len(subject.mechanisms) + 2))
        adds, where = (first + last) / 2, f"{NAMES.get(name, name)}, {subject.having}"
        for mechanism, more in zip(subject.mechanisms, without, strict=True):
            share = 100 * (more - adds) / adds
            most[mechanism] = max(most.get(mechanism, (-100.0, "")), (share, where))
            print(f"| {mechanism.partition(':')[0]} | {where} | {adds:,.0f} | {more:,.0f} | {share:+.1f} % |", flush=True)
        print(f"| (nothing) | {where} | {adds:,.0f} | {last:,.0f} | {100 * (last - adds) / adds:+.1f} % |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--of", default=",".join(DEFAULT), help="loops: trainer, lane, delivery, or any host of loops.py; by default %(default)s"
    )
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        prepare_child()
        run_loop(arguments.child)
        return
    check_valgrind(parser)
    most: dict[str, tuple[float, str]] = {}
    print(f"{machine()}; {COUNTED} steps of each training; (nothing) is the same training again\n")
    print("| replaced by plain code | loop | instructions that callsheet adds per step | without the mechanism | difference |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for name in arguments.of.split(","):
        print_loop(name, most)
    print("\n| mechanism | largest saving | in | kept |\n| --- | --- | --- | --- |")
    for mechanism, (share, where) in most.items():
        print(f"| {mechanism} | {share:.1f} % | {where} | {'yes' if share >= KEPT_FROM else 'no'} |")


if __name__ == "__main__":
    main()
