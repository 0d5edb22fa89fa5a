"""What a host adds to a step, beside one empty callback of its own framework that hears the same events in the same loop.

The loops are those of the tests (`tests/bridges/homes`): a small model, no evaluation, a record every 20 steps. The time is the training
thread's own, from one forward of the model to the next, so that a framework's start and end do not count. Runs take turns; of all their
stretches of 20 steps, each of which has a record in it, the lower quartile counts: what disturbs only adds.

Microseconds move with the machine, so what is added is held against the floor of `benchmarks/trainer.py`, the step of a bare loop over a
small MLP, which takes its turn here too. It took 350 µs where the promises were made: 20 µs are 5.7 % of it, and 50 µs are 14.3 %.

    python benchmarks/bridges.py [--turns 15] [--homes lightning,ignite]
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import trainer as peers
from callsheet import Callback, Context
from timing import machine

TESTS = Path(__file__).resolve().parent.parent / "tests"
STEPS, STRETCH = 600, 20
BARE, EMPTY, NO_LISTENERS, TEN = "bare loop", "empty", "with nothing in it", "with ten callbacks"
moments: list[float] = []
"""When the model's forward began."""


class Nothing(Callback):
    """Hears four events of a step, and does nothing."""

    def on_train_step_start(self, ctx: Context) -> None: ...

    def on_forward_end(self, ctx: Context) -> None: ...

    def on_optimizer_step_end(self, ctx: Context) -> None: ...

    def on_train_step_end(self, ctx: Context) -> None: ...


def stretches(home: Any, job: Any, callbacks: Any) -> list[float]:
    """Microseconds a step, in each stretch of a run but the first ones."""
    moments.clear()
    folder = tempfile.mkdtemp()
    try:
        home.train(job, Path(folder), callbacks, strict=False, epochs=1, steps_an_epoch=STEPS, evaluate=False)
    finally:
        shutil.rmtree(folder)
    marks = moments[3 * STRETCH :: STRETCH]
    return [(end - begin) / STRETCH * 1e6 for begin, end in itertools.pairwise(marks)]


def timed(kind: Any) -> Any:
    """That class of models, noting when the forward is called."""

    class Timed(kind):  # type: ignore[misc]  # any class of the tests
        def forward(self, *args: Any) -> Any:
            moments.append(time.thread_time())
            return kind.forward(self, *args)

    return Timed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--homes", default="")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path.insert(0, str(TESTS))
    job = importlib.import_module("bridges.homes.job")
    points = replace(job.POINTS, model=timed(job.POINTS.model), log_every=STRETCH)
    found = sorted((path.stem for path in (TESTS / "bridges" / "homes").glob("*.py")), key=lambda name: name != "composer")
    names = given.homes.split(",") if given.homes else [name for name in found if name not in ("__init__", "job", "trainer")]
    lines, missing = [], []
    for name in names:  # Composer's first: it declares what torchvision asks for
        try:
            home = importlib.import_module(f"bridges.homes.{name}")
        except ModuleNotFoundError:
            missing.append(name)  # its framework
            continue
        print(name, file=sys.stderr, flush=True)
        made: dict[str, Callable[[], Any]] = {
            EMPTY: lambda: job.EMPTY,
            NO_LISTENERS: list,
            TEN: lambda: [Nothing() for _ in range(10)],
        }
        steps: dict[str, list[float]] = {BARE: [], **{subject: [] for subject in made}}
        for _ in range(given.turns):
            steps[BARE].append(peers.bare())
            for subject, make in made.items():
                steps[subject] += stretches(home, points, make())
        quartiles = {subject: statistics.quantiles(found, n=4)[0] for subject, found in steps.items()}
        floor, empty = quartiles[BARE], quartiles[EMPTY]
        added = [quartiles[each] - empty for each in (NO_LISTENERS, TEN)]
        shown = " | ".join(f"{each:+.0f} | {each / floor:+.1%}" for each in added)
        lines.append(f"| {home.NAME} {home.VERSION} | {floor:.0f} | {empty:.0f} | {shown} |")
    print(f"# {machine()}; the lower quartile of {given.turns} turns of {STEPS} steps, one thread, its own time\n")
    print("Promised: no more than 5.7 % of a bare step with nobody who listens, and 14.3 % with ten callbacks of four events.\n")
    print(
        "| host | µs, a bare step | µs, a step with an empty callback of its own | µs more, nobody | | µs more, ten callbacks | |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(lines))
    if missing:
        print(f"\nNot installed here: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
