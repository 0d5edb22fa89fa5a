"""What a host adds to a step, beside one empty callback of its own framework that hears the same events in the same loop.

The loops are those of the tests (`tests/bridges/homes`): a small model, no evaluation, a record every 20 steps. The time is the training
thread's own; that of a step is the difference between a run of many steps and one of few, so that a framework's start and end do not
count. Of all turns the best counts: what disturbs only adds.

Microseconds move with the machine, so what is added is held against the floor of `benchmarks/trainer.py`, the step of a bare loop over a
small MLP, which takes its turn here too. It took 350 µs where the promises were made: 20 µs are 5.7 % of it, and 50 µs are 14.3 %.

    python benchmarks/bridges.py [--turns 15] [--homes lightning,ignite]
"""

from __future__ import annotations

import argparse
import importlib
import logging
import shutil
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
from timing import in_turns, least, machine

TESTS = Path(__file__).resolve().parent.parent / "tests"
MANY, FEW = 600, 60
NO_LISTENERS, TEN = "with nothing in it", "with ten callbacks"


class Nothing(Callback):
    """Hears four events of a step, and does nothing."""

    def on_train_step_start(self, ctx: Context) -> None: ...

    def on_forward_end(self, ctx: Context) -> None: ...

    def on_optimizer_step_end(self, ctx: Context) -> None: ...

    def on_train_step_end(self, ctx: Context) -> None: ...


def seconds(home: Any, job: Any, callbacks: Any, steps: int) -> float:
    """Of the training thread, for a run of so many steps."""
    folder = tempfile.mkdtemp()
    try:
        began = time.thread_time()
        home.train(job, Path(folder), callbacks, strict=False, epochs=1, steps_an_epoch=steps, evaluate=False)
        return time.thread_time() - began
    finally:
        shutil.rmtree(folder)


def a_step(home: Any, job: Any, made: Callable[[], Any]) -> Callable[[], float]:
    """Microseconds."""
    return lambda: (seconds(home, job, made(), MANY) - seconds(home, job, made(), FEW)) / (MANY - FEW) * 1e6


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
    points = replace(job.POINTS, log_every=20)
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
        subjects = {
            "bare": peers.bare,
            "empty": a_step(home, points, lambda: job.EMPTY),
            NO_LISTENERS: a_step(home, points, list),
            TEN: a_step(home, points, lambda: [Nothing() for _ in range(10)]),
        }
        figures = in_turns(subjects, given.turns)
        floor, empty = least(figures, "bare"), least(figures, "empty")
        added = [least(figures, each) - empty for each in (NO_LISTENERS, TEN)]
        shown = " | ".join(f"{each:+.0f} | {each / floor:+.1%}" for each in added)
        lines.append(f"| {home.NAME} {home.VERSION} | {floor:.0f} | {empty:.0f} | {shown} |")
    print(f"# {machine()}; the best of {given.turns} turns of {MANY} steps less {FEW}, one thread, its own time\n")
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
