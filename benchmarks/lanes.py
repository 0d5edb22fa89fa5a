"""What an event that goes to a lane costs the training thread, compared with InstructLab's callbacks, and what slow lanes cost.

A step is about 200 µs or 1 ms of small torch operations, as in a small model. InstructLab's callbacks are measured if the package
is installed (`pip install --no-deps instructlab-training`); only its file of callbacks is loaded.

Microseconds depend on the machine, so the cost of an event is divided by two costs of the same run: the cost of InstructLab's
manager, and the cost of the two copies of the context that this manager makes, which wake no other thread. The targets are ratios:
an event costs at most 3/8 of the two copies, and at most 1/20 of InstructLab's manager.

The time of an event on the training thread is measured at every step; the result is the median. The time of an event on its
lane's thread is the processor time of that thread, during which it holds the interpreter that the training thread needs too. A
further table has the differences of whole steps, which vary more with the load of the machine.

    python benchmarks/lanes.py [--turns 40]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.metadata
import importlib.util
import logging
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from callsheet import Background, Callback, CallbackManager, Context, RunInfo
from timing import Turn, difference, in_turns, machine

STEPS = 1000
CLOCKED_STEPS = 4000  # so many that the few checks of an empty queue after the last step do not matter
LONG_STEPS = 300  # the steps of 1 ms in a turn: turns are short, because the load of the machine changes within a second
MILLION = 1_000_000
SETTLE_SECONDS = 0.3  # long enough for a lane to deliver all events in its queue
OURS = "one callback in a lane"
SLEEPING, IDLE = "one that sleeps 50 ms per step, drop_oldest", "ten idle lanes"
THEIRS = "one callback in InstructLab's manager"
COPIES_TARGET, THEIRS_TARGET = 3 / 8, 1 / 20  # relative to the two copies, and to InstructLab's manager


class ReceiveFields(Callback):
    """Handles the end of every step. Its snapshot has ten plain fields, which it does not read."""

    snapshot_fields = ("learning_rate", "step_skipped")

    def on_train_step_end(self, ctx: Context) -> None: ...


class ReadFields(ReceiveFields):
    """Reads the ten fields of the snapshot."""

    def on_train_step_end(self, ctx: Context) -> None:
        now = ctx.state.timestamp
        self.read = (ctx.step, ctx.epoch, ctx.learning_rate, ctx.step_skipped, *now[:6])


class Sleeps(Callback):
    """Takes 50 ms for each step."""

    def on_train_step_end(self, ctx: Context) -> None:
        time.sleep(0.05)


class Idle(Callback):
    """Listens to an event that is not fired here."""

    def on_log(self, ctx: Context) -> None: ...


def sleeping() -> list[Callback]:
    """Return a callback in a lane that is too slow for its events."""
    return [Background(Sleeps(), queue=100, overflow="drop_oldest", deadline=0.2)]


def ten_idle() -> list[Callback]:
    """Return ten callbacks in lanes that receive no events."""
    lanes: list[Callback] = []
    for number in range(10):
        lane = Background(Idle())
        lane.name = f"idle-{number}"
        lanes.append(lane)
    return lanes


def work_for(seconds: float) -> Callable[[], None]:
    """Return a function that does about this many seconds of small torch operations."""
    matrix = torch.randn(48, 48)

    def work(pieces: int) -> None:
        for _ in range(pieces):
            matrix @ matrix

    began = time.perf_counter()
    work(3000)
    pieces = max(1, round(seconds * 3000 / (time.perf_counter() - began)))
    return lambda: work(pieces)


def ours(work: Callable[[], None], made: Callable[[], list[Callback]], steps: int = STEPS) -> float:
    """Return the microseconds per step with these callbacks."""
    manager = CallbackManager(made(), costs="off")
    ctx = Context(RunInfo("benchmark"))
    manager.open(ctx)
    spans = manager.spans(ctx)
    ctx.learning_rate, ctx.step_skipped = 0.1, False
    began = time.perf_counter()
    for ctx.step in range(1, steps + 1):
        with spans.train_step:
            work()
            ctx.state.timestamp = ctx.state.timestamp.next_batch()
    took = time.perf_counter() - began
    manager.close()
    return took / steps * 1e6


def instructlabs(work: Callable[[], None], module: Any) -> float:
    """Return the microseconds per step with one callback in InstructLab's manager."""

    class Reads(module.TrainerCallback):  # type: ignore[misc]  # loaded from a file
        def on_step_end(self, context: Any) -> None:
            self.read = (
                context.step,
                context.epoch,
                context.learning_rate,
                context.loss,
                context.grad_norm,
                context.total_samples,
            )

    manager = module.CallbackManager()
    manager.add_callback(Reads())
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        work()
        manager.fire(
            "on_step_end",
            step=step,
            epoch=1,
            learning_rate=0.1,
            loss=0.5,
            grad_norm=1.0,
            total_samples=step,
            total_tokens=step,
            elapsed_time=1.0,
            overall_throughput=1.0,
            world_size=1,
        )
    took = time.perf_counter() - began
    while (
        len(asyncio.all_tasks(manager._loop)) or manager._loop._ready
    ):  # otherwise close() would leave tasks behind, and other turns would pay for their deletion
        time.sleep(0.01)
    manager.close()
    return took / STEPS * 1e6


def event_times(
    work: Callable[[], None], made: Callable[[], list[Callback]], steps: int = CLOCKED_STEPS, *, waits: bool = True
) -> tuple[float, float]:
    """Return the median microseconds of the end of a step on the training thread, and the lanes' processor time per step.

    Args:
        work: the work of a step.
        made: makes the callbacks.
        steps: the number of steps.
        waits: whether to wait until the lanes are idle. If False, only the lanes' work during the steps counts.
    """
    manager = CallbackManager(made(), costs="off")
    ctx = Context(RunInfo("benchmark"))
    manager.open(ctx)
    span = manager.spans(ctx).train_step
    ctx.learning_rate, ctx.step_skipped = 0.1, False
    manager.fire("on_train_step_end", ctx)  # the first event starts the lane's thread
    time.sleep(SETTLE_SECONDS)
    before = _lanes_seconds()
    took: list[int] = []
    for ctx.step in range(1, steps + 1):
        with span:
            work()
            ctx.state.timestamp = ctx.state.timestamp.next_batch()
            began = time.perf_counter_ns()
        took.append(time.perf_counter_ns() - began)
    if waits:
        time.sleep(SETTLE_SECONDS)
    per_step = (_lanes_seconds() - before) / steps * 1e6
    manager.close()
    return statistics.median(took) / 1e3, per_step


def _lanes_seconds() -> float:
    """Return the processor time of the lanes' threads, and of the thread that checks all lanes."""
    ours = [thread.ident for thread in threading.enumerate() if thread.name.startswith("callsheet-lane")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in ours if ident is not None)


def copying(work: Callable[[], None], module: Any) -> float:
    """Return the median microseconds of two copies of InstructLab's context. Its manager makes two for one callback."""
    context = module.TrainingContext()
    took: list[int] = []
    for context.step in range(1, STEPS + 1):
        work()
        began = time.perf_counter_ns()
        copy.copy(copy.copy(context))
        took.append(time.perf_counter_ns() - began)
    return statistics.median(took) / 1e3


def instructlab() -> Any:
    """Return InstructLab's module of callbacks, or None if the package is not installed."""
    try:
        files = importlib.metadata.files("instructlab-training") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    path = next(Path(str(file.locate())) for file in files if str(file).endswith("training/callbacks.py"))
    spec = importlib.util.spec_from_file_location("instructlab_callbacks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def memory_growth() -> tuple[float, int]:
    """Return the growth of the process in megabytes during a million events for a slow lane, and the number of dropped events."""
    manager = CallbackManager([Background(Sleeps(), queue=1024, overflow="drop_oldest", deadline=0.1)], costs="off")
    ctx = Context(RunInfo("benchmark"))
    manager.open(ctx)

    def fire(times: int) -> None:
        for ctx.step in range(times):
            manager.fire("on_train_step_end", ctx)

    fire(MILLION // 20)  # fills the queue, and allocates what is allocated only once
    before = psutil.Process().memory_info().rss
    fire(MILLION)
    after = psutil.Process().memory_info().rss
    dropped = sum(each.dropped for each in manager.cost_report(1).failures)
    logging.getLogger("callsheet").setLevel(logging.CRITICAL)  # the warning about undelivered events is expected here
    manager.close()
    return (after - before) / 1e6, dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("callsheet").setLevel(logging.CRITICAL)
    short, long, module = work_for(200e-6), work_for(1e-3), instructlab()

    theirs: dict[str, Turn] = {THEIRS: lambda: instructlabs(short, module)} if module is not None else {}
    copies: list[float] = []
    measured: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def clocked() -> float:
        """Measure the times of single events, all of them in one turn."""
        measured["no lanes"].append(event_times(short, list))
        measured["receives"].append(event_times(short, lambda: [Background(ReceiveFields())]))
        measured["reads"].append(event_times(short, lambda: [Background(ReadFields())]))
        measured["no lanes, long"].append(event_times(long, list, LONG_STEPS, waits=False))
        measured[SLEEPING].append(event_times(long, sleeping, LONG_STEPS, waits=False))
        measured[IDLE].append(event_times(long, ten_idle, LONG_STEPS, waits=False))
        if module is not None:
            copies.append(copying(short, module))
        return 0.0

    def clocked_median(what: str) -> tuple[float, float]:
        return statistics.median(event for event, _ in measured[what]), statistics.median(lanes for _, lanes in measured[what])

    figures = in_turns(
        {
            "short": lambda: ours(short, list),
            OURS: lambda: ours(short, lambda: [Background(ReadFields())]),
            **theirs,
            "clocked": clocked,
            "long": lambda: ours(long, list, LONG_STEPS),
            SLEEPING: lambda: ours(long, sleeping, LONG_STEPS),
            IDLE: lambda: ours(long, ten_idle, LONG_STEPS),
        },
        arguments.turns,
    )
    short_step, long_step = statistics.median(figures["short"]), statistics.median(figures["long"])
    (no_lanes, _), (receives, building), (_, reading) = map(clocked_median, ("no lanes", "receives", "reads"))
    print(f"{machine()}; medians over {arguments.turns} rounds of {STEPS} short or {LONG_STEPS} long steps, one thread\n")
    print(
        f"| enqueueing and delivering an event, in a step of {short_step:.0f} µs | µs | relative to two copies of InstructLab's context | target |"
    )
    print("| --- | --- | --- | --- |")
    whole = statistics.median(copies) if copies else float("nan")
    for name, took, target in (
        ("copying and enqueueing, on the training thread", receives - no_lanes, ""),
        ("building the snapshot and delivering it, on the lane's thread", building, ""),
        ("both", receives - no_lanes + building, f"{COPIES_TARGET:.3f}"),
        ("the callback's reading of ten fields", reading - building, ""),
        ("both, and that reading", receives - no_lanes + reading, ""),
        ("two copies of InstructLab's context", whole, ""),
    ):
        print(f"| {name} | {took:.1f} | {took / whole:.3f} | {target} |")
    print("\n| by whole steps | µs added | the lane's callback relative to it | target |\n| --- | --- | --- | --- |")
    added = difference(figures, OURS, "short")
    print(f"| {OURS}, which reads its fields | {added:+.1f} | | |")
    for name in theirs:
        theirs_added = difference(figures, name, "short")
        print(f"| {name} | {theirs_added:+.1f} | {added / theirs_added:.3f} | {THEIRS_TARGET:.3f} |")
    print(
        f"\n| lanes, with a step of {long_step:.0f} µs | µs on the training thread | on the lanes' threads | share of the step | by whole steps |"
    )
    print("| --- | --- | --- | --- | --- |")
    no_lanes, _ = clocked_median("no lanes, long")
    for name in (SLEEPING, IDLE):
        event, lanes = clocked_median(name)
        added = difference(figures, name, "long")
        print(
            f"| {name} | {event - no_lanes:+.1f} | {lanes:+.1f} | {(event - no_lanes + lanes) / long_step:+.2%} | {added / long_step:+.2%} |"
        )
    grown, dropped = memory_growth()
    print(
        f"\nA million events for a lane that sleeps, with a queue of 1024: {grown:+.1f} MB resident, {dropped:,} dropped and counted."
    )


if __name__ == "__main__":
    main()
