"""What handing events to lanes costs the training thread, beside InstructLab's way, and that slow lanes hold nothing up.

A step is torch's work of about 200 µs or 1 ms in small pieces, as a small model's is. InstructLab's callbacks are measured where its package
is installed, `pip install --no-deps instructlab-training`; of it only the file with the callbacks is loaded.

Microseconds move with the machine, so an event is held against two peers in the same run: InstructLab's whole way, and the copies of the
context that it makes, which wake no other thread. These took 8 µs of a step where 3 µs for an event were promised.

What an event takes of the training thread is read off the clock at every step, and the median taken; what it takes of its lane's thread, off the
processor's clock of that thread: it takes the interpreter from the step. What whole steps add up to is beside it, and
changes with the machine's weather.

    python benchmarks/lanes.py [--turns 20]
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
CLOCKED_STEPS = 4000  # beside which it weighs little that a lane looks at its queue a few times more when they are over
LONG_STEPS = 300  # of those of 1 ms: many short turns, since the weather changes within a second
MILLION = 1_000_000
SETTLE_SECONDS = 0.3  # in which a lane has looked at its queue, and worked it off
OURS = "one callback in a lane"
SLEEPING, IDLE = "one that sleeps 50 ms per step, drop_oldest", "ten idle lanes"
THEIRS = "one callback in InstructLab's manager"
COPIES_PROMISED, THEIRS_PROMISED = 3 / 8, 1 / 20  # of what these take


class Given(Callback):
    """Hears every step's end, is given ten plain fields, and makes nothing of them."""

    snapshot_fields = ("learning_rate", "step_skipped")

    def on_train_step_end(self, ctx: Context) -> None: ...


class TenFields(Given):
    """Reads them as well."""

    def on_train_step_end(self, ctx: Context) -> None:
        now = ctx.state.timestamp
        self.read = (ctx.step, ctx.epoch, ctx.learning_rate, ctx.step_skipped, *now[:6])


class Sleeps(Callback):
    """Takes 50 ms a step."""

    def on_train_step_end(self, ctx: Context) -> None:
        time.sleep(0.05)


class Idle(Callback):
    """Listens to an event that is not fired here."""

    def on_log(self, ctx: Context) -> None: ...


def sleeping() -> list[Callback]:
    """One that is too slow for its events."""
    return [Background(Sleeps(), queue=100, overflow="drop_oldest", deadline=0.2)]


def ten_idle() -> list[Callback]:
    """Lanes in which nothing happens."""
    lanes: list[Callback] = []
    for number in range(10):
        lane = Background(Idle())
        lane.name = f"idle-{number}"
        lanes.append(lane)
    return lanes


def work_of(seconds: float) -> Callable[[], None]:
    """A step's work."""
    matrix = torch.randn(48, 48)

    def work(pieces: int) -> None:
        for _ in range(pieces):
            matrix @ matrix

    began = time.perf_counter()
    work(3000)
    pieces = max(1, round(seconds * 3000 / (time.perf_counter() - began)))
    return lambda: work(pieces)


def ours(work: Callable[[], None], made: Callable[[], list[Callback]], steps: int = STEPS) -> float:
    """Microseconds a step, with these callbacks on the call sheet."""
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
    while len(asyncio.all_tasks(manager._loop)) or manager._loop._ready:  # else it drops them, and others pay for the rubbish
        time.sleep(0.01)
    manager.close()
    return took / STEPS * 1e6


def edges(
    work: Callable[[], None], made: Callable[[], list[Callback]], steps: int = CLOCKED_STEPS, *, waits: bool = True
) -> tuple[float, float]:
    """Return the median microseconds that firing a step's end takes on the training thread, and the time of the lanes' threads.

    `waits`: wait until the lanes are idle; otherwise only their work during the steps counts.
    """
    manager = CallbackManager(made(), costs="off")
    ctx = Context(RunInfo("benchmark"))
    manager.open(ctx)
    span = manager.spans(ctx).train_step
    ctx.learning_rate, ctx.step_skipped = 0.1, False
    manager.fire("on_train_step_end", ctx)  # from here on it has a thread
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
    """That the lanes' threads, and the one that looks at all of them, have had of the processor."""
    ours = [thread.ident for thread in threading.enumerate() if thread.name.startswith("callsheet-lane")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in ours if ident is not None)


def copying(work: Callable[[], None], module: Any) -> float:
    """Microseconds that it takes to copy InstructLab's context twice after a step, as it is for one callback, the median."""
    context = module.TrainingContext()
    took: list[int] = []
    for context.step in range(1, STEPS + 1):
        work()
        began = time.perf_counter_ns()
        copy.copy(copy.copy(context))
        took.append(time.perf_counter_ns() - began)
    return statistics.median(took) / 1e3


def instructlab() -> Any:
    """InstructLab's module of callbacks, or None where it is not installed."""
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


def growth() -> tuple[float, int]:
    """Megabytes that the process grew by while a million events went into a lane that is too slow for them, and how many it dropped."""
    manager = CallbackManager([Background(Sleeps(), queue=1024, overflow="drop_oldest", deadline=0.1)], costs="off")
    ctx = Context(RunInfo("benchmark"))
    manager.open(ctx)

    def tell(times: int) -> None:
        for ctx.step in range(times):
            manager.fire("on_train_step_end", ctx)

    tell(MILLION // 20)  # until everything that is kept is there
    before = psutil.Process().memory_info().rss
    tell(MILLION)
    after = psutil.Process().memory_info().rss
    dropped = sum(each.dropped for each in manager.cost_report(1).failures)
    logging.getLogger("callsheet").setLevel(logging.CRITICAL)  # that it leaves something undelivered is the point
    manager.close()
    return (after - before) / 1e6, dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("callsheet").setLevel(logging.CRITICAL)
    short, long, module = work_of(200e-6), work_of(1e-3), instructlab()

    theirs: dict[str, Turn] = {THEIRS: lambda: instructlabs(short, module)} if module is not None else {}
    copies: list[float] = []
    measured: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def clocked() -> float:
        """What is read off the clocks; all of it in one turn."""
        measured["nobody"].append(edges(short, list))
        measured["given"].append(edges(short, lambda: [Background(Given())]))
        measured["reads"].append(edges(short, lambda: [Background(TenFields())]))
        measured["nobody, long"].append(edges(long, list, LONG_STEPS, waits=False))
        measured[SLEEPING].append(edges(long, sleeping, LONG_STEPS, waits=False))
        measured[IDLE].append(edges(long, ten_idle, LONG_STEPS, waits=False))
        if module is not None:
            copies.append(copying(short, module))
        return 0.0

    def clocked_median(what: str) -> tuple[float, float]:
        return statistics.median(edge for edge, _ in measured[what]), statistics.median(lanes for _, lanes in measured[what])

    figures = in_turns(
        {
            "short": lambda: ours(short, list),
            OURS: lambda: ours(short, lambda: [Background(TenFields())]),
            **theirs,
            "clocked": clocked,
            "long": lambda: ours(long, list, LONG_STEPS),
            SLEEPING: lambda: ours(long, sleeping, LONG_STEPS),
            IDLE: lambda: ours(long, ten_idle, LONG_STEPS),
        },
        arguments.turns,
    )
    short_step, long_step = statistics.median(figures["short"]), statistics.median(figures["long"])
    (nobody, _), (given, building), (_, reading) = map(clocked_median, ("nobody", "given", "reads"))
    print(f"{machine()}; medians over {arguments.turns} rounds of {STEPS} short or {LONG_STEPS} long steps, one thread\n")
    print(
        f"| enqueueing and delivering an event, in a step of {short_step:.0f} µs | µs | relative to two copies of InstructLab's context | target |"
    )
    print("| --- | --- | --- | --- |")
    whole = statistics.median(copies) if copies else float("nan")
    for name, took, promised in (
        ("copying and enqueueing, on the training thread", given - nobody, ""),
        ("building the snapshot and delivering it, on the lane's thread", building, ""),
        ("both", given - nobody + building, f"{COPIES_PROMISED:.3f}"),
        ("the callback's reading of ten fields", reading - building, ""),
        ("both, and that reading", given - nobody + reading, ""),
        ("two copies of InstructLab's context", whole, ""),
    ):
        print(f"| {name} | {took:.1f} | {took / whole:.3f} | {promised} |")
    print("\n| by whole steps | µs added | the lane's callback relative to it | target |\n| --- | --- | --- | --- |")
    added = difference(figures, OURS, "short")
    print(f"| {OURS}, which reads its fields | {added:+.1f} | | |")
    for name in theirs:
        beside = difference(figures, name, "short")
        print(f"| {name} | {beside:+.1f} | {added / beside:.3f} | {THEIRS_PROMISED:.3f} |")
    print(
        f"\n| lanes, with a step of {long_step:.0f} µs | µs on the training thread | on the lanes' threads | share of the step | by whole steps |"
    )
    print("| --- | --- | --- | --- | --- |")
    nobody, _ = clocked_median("nobody, long")
    for name in (SLEEPING, IDLE):
        edge, lanes = clocked_median(name)
        added = difference(figures, name, "long")
        print(
            f"| {name} | {edge - nobody:+.1f} | {lanes:+.1f} | {(edge - nobody + lanes) / long_step:+.2%} | {added / long_step:+.2%} |"
        )
    grown, dropped = growth()
    print(
        f"\nA million events for a lane that sleeps, with a queue of 1024: {grown:+.1f} MB resident, {dropped:,} dropped and counted."
    )


if __name__ == "__main__":
    main()
