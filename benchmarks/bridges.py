"""What a host adds to a step, beside one empty callback of its own framework that hears the same events in the same loop.

The loops are those of the tests (`tests/bridges/homes`): a small model, no evaluation, a record every 20 steps. Four trainings stand side by
side, each in a process of its own, and pass a baton: a bare loop, the framework with its empty callback, with a host that nobody listens to,
and with a host of ten callbacks. Whoever has the baton trains twenty steps, from one forward of the model to the next, and the others
wait: so all have the same weather, which lasts longer than that, and what is added is the mean of the differences within a round. The first
three steps with the baton do not count. The time is the training thread's own.

Microseconds move with the machine, so what is added is held against the floor of `benchmarks/trainer.py`, the step of a bare loop over a
small MLP. It took 350 µs where the promises were made: 20 µs are 5.7 % of it, and 50 µs are 14.3 %.

    python benchmarks/bridges.py [--rounds 400] [--homes lightning,ignite]
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainer as peers
from callsheet import Callback, Context
from timing import held_mean, machine

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
IN_A_VENV_OF_ITS_OWN = {"composer": ROOT / ".venv-composer" / "bin" / "python"}  # made by tools/composer_venv.py
MISSING = 3  # a child's status, where the framework is not installed
STRETCH, COLD = 20, 3  # steps with the baton, and those of them that do not count
WARM = 70  # steps before the first; records are in the midst of stretches
BARE, EMPTY, NOBODY, TEN = RUNNERS = ("bare", "empty", "nobody", "ten")
PROMISED = {NOBODY: 20 / 350, TEN: 50 / 350}  # of a bare step


class Nothing(Callback):
    """Hears four events of a step, and does nothing."""

    def on_train_step_start(self, ctx: Context) -> None: ...

    def on_forward_end(self, ctx: Context) -> None: ...

    def on_optimizer_step_end(self, ctx: Context) -> None: ...

    def on_train_step_end(self, ctx: Context) -> None: ...


# --- one who runs ---


class Baton:
    """Waits at a forward for its turn, takes the time of its stretch, and passes on.

    Args:
        turn: the descriptor from which the baton comes.
        following: that to which it goes.
        ready: where to say that the first stretch may begin.
        rounds: stretches.
    """

    def __init__(self, turn: int, following: int, ready: int, rounds: int) -> None:
        self.took: list[float] = []
        """Microseconds a step, of each stretch."""
        self._turn, self._following, self._ready, self._last = turn, following, ready, rounds * STRETCH
        self.steps = -(-(WARM + self._last + 2) // 6) * 6
        """That the training has to have, in whole epochs of the tests' data."""
        self._place, self._began = -WARM, 0.0

    def forward(self) -> None:
        """The model's forward begins."""
        place, self._place = self._place, self._place + 1
        if not 0 <= place <= self._last:
            return
        if place % STRETCH == COLD:
            self._began = time.thread_time()
        elif place % STRETCH == 0:
            if place:
                self.took.append((time.thread_time() - self._began) / (STRETCH - COLD) * 1e6)
                os.write(self._following, b".")
            else:
                os.write(self._ready, b".")
            if place < self._last and not os.read(self._turn, 1):
                sys.exit("the one before this has failed")

    def watched(self, kind: Any) -> Any:
        """That class of models, telling its forwards here."""
        baton = self

        class Watched(kind):  # type: ignore[misc]  # any class of the tests
            def forward(self, *args: Any) -> Any:
                baton.forward()
                return kind.forward(self, *args)

        return Watched


def run(runner: str, home: Any, baton: Baton) -> None:
    """Train."""
    steps = baton.steps
    if runner == BARE:
        model, batches, optimizer = peers.parts()
        model.__class__ = baton.watched(nn.Sequential)
        peers.parts = lambda: (model, batches * (steps // len(batches) + 1), optimizer)
        peers.bare()
        return
    job = importlib.import_module("bridges.homes.job")
    made: dict[str, Callable[[], Any]] = {EMPTY: lambda: job.EMPTY, NOBODY: list, TEN: lambda: [Nothing() for _ in range(10)]}
    points = replace(job.POINTS, model=baton.watched(job.POINTS.model), log_every=STRETCH)
    with tempfile.TemporaryDirectory() as folder:
        home.train(points, Path(folder), made[runner](), strict=False, epochs=1, steps_an_epoch=steps, evaluate=False)


def be_a_runner(runner: str, name: str, baton: Baton) -> None:
    """A child's whole life; what it took goes to the standard output, in one line."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path.insert(0, str(TESTS))
    said, sys.stdout = sys.stdout, sys.stderr  # frameworks print
    try:
        home = importlib.import_module(f"bridges.homes.{name}")
    except ModuleNotFoundError:
        sys.exit(MISSING)
    run(runner, home, baton)
    print(json.dumps({"host": f"{home.NAME} {home.VERSION}", "took": baton.took}), file=said)


# --- around them ---


def raced(name: str, rounds: int) -> tuple[str, dict[str, list[float]]]:
    """The host, and what each of the four took, round by round.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        RuntimeError: one of them has failed; with the end of what it said.
    """
    pipes, (is_ready, ready) = [os.pipe() for _ in RUNNERS], os.pipe()
    runners, said = [], tempfile.TemporaryFile()  # noqa: SIM115  # gone with this call
    for i, runner in enumerate(RUNNERS):
        descriptors = pipes[i][0], pipes[(i + 1) % len(pipes)][1], ready
        command = [
            str(IN_A_VENV_OF_ITS_OWN.get(name, sys.executable)),
            __file__,
            "--child",
            runner,
            "--homes",
            name,
            "--rounds",
            str(rounds),
        ]
        command += ["--descriptors", ",".join(map(str, descriptors))]
        runners.append(
            subprocess.Popen(
                command,
                pass_fds=descriptors,
                stdout=subprocess.PIPE,
                stderr=said,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        )
    try:
        waiting = 0
        while waiting < len(RUNNERS):
            if select.select([is_ready], [], [], 1.0)[0]:
                waiting += len(os.read(is_ready, len(RUNNERS)))
            elif MISSING in (ended := {each.poll() for each in runners}):
                raise ModuleNotFoundError(name)
            elif ended - {None}:
                said.seek(0)
                raise RuntimeError(f"{name}: {said.read().decode()[-2000:]}")
        os.write(pipes[0][1], b".")
        for _, end in pipes:  # else nobody would hear that another has ended
            os.close(end)
        printed = [each.communicate()[0].decode().splitlines() for each in runners]
        if any(each.returncode for each in runners):
            said.seek(0)
            raise RuntimeError(f"{name}: {said.read().decode()[-2000:]}")
        found = [json.loads(lines[-1]) for lines in printed]
        return found[0]["host"], {runner: each["took"] for runner, each in zip(RUNNERS, found, strict=True)}
    finally:
        for each in runners:
            each.kill()
        for descriptor in (is_ready, ready, *(beginning for beginning, _ in pipes)):
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--homes", default="", help="such as lightning,ignite; all that are installed")
    parser.add_argument("--child", choices=RUNNERS, help=argparse.SUPPRESS)
    parser.add_argument("--descriptors", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        turn, following, ready = map(int, given.descriptors.split(","))
        be_a_runner(given.child, given.homes, Baton(turn, following, ready, given.rounds))
        return
    found = sorted(path.stem for path in (TESTS / "bridges" / "homes").glob("*.py"))
    names = given.homes.split(",") if given.homes else [name for name in found if name not in ("__init__", "job", "trainer")]
    print(f"# {machine()}; {given.rounds} rounds of {STRETCH} steps, one thread, its own time\n")
    shares = f"{PROMISED[NOBODY]:.1%} with nobody who listens, and {PROMISED[TEN]:.1%} with ten callbacks of four events"
    print(f"Promised, of a bare step: no more than {shares}.\n")
    heads = ("host", "µs, a bare step", "an empty callback of its own", "µs more, nobody", "", "µs more, ten callbacks", "")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)
    missing = []
    for name in names:
        try:
            host, took = raced(name, given.rounds)
        except (ModuleNotFoundError, FileNotFoundError):
            missing.append(name)
            continue
        floor = statistics.median(took[BARE])
        cells = [host, f"{floor:.0f}", f"{statistics.median(took[EMPTY]):.0f}"]
        for runner in (NOBODY, TEN):
            added, error = held_mean([more - less for more, less in zip(took[runner], took[EMPTY], strict=True)])
            cells += [f"{added:+.0f} ± {error:.0f}", f"{added / floor:+.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    if missing:
        print(f"\nNot installed here: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
