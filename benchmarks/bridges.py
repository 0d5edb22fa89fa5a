"""What a host adds to a training step, compared with one empty callback of the host's framework in the same loop.

The loops are those of the tests (`tests/bridges/loops`): a small model, without evaluation. A set is five trainings, each in its
own process: a bare loop, the same loop in Ignite's engine without handlers, the framework with an empty callback of its own, with
a host without listeners, and with a host of ten callbacks. The five take turns: one trains twenty steps, from one forward of the
model to the next, while the others wait. So other work on the machine disturbs all of them equally. The first three steps of a
turn do not count. The time is the processor time of the training thread, and the five training threads share one core.

Other work on the machine makes most steps slower, by more than a host does, and never makes a step faster. So the time of a step
is the 0.5 % quantile of all steps, which all five trainings measured without disturbance. The memory layout of a
process also makes all of its steps faster or slower. So the processes that are compared are forked from one that has imported
everything that they have in common, and each set starts new processes, in random order. The errors are the standard deviations
over bootstrap samples of the sets (Efron 1979).

Microseconds depend on the machine, and five processes on one core are slower than one. So the time that a host adds is divided by
a time that slows down in the same way: what Ignite's engine adds to the bare loop, averaged over the sets of all hosts. A ratio
of 2 means that the host adds twice as much time to a step as Ignite's engine does. The targets are ratios: at most 2 if no
callback listens, and at most 5 with ten callbacks.

Each set is written to a file when it ends. An interrupted run continues with the next set, and `--sets 0` only prints the table
of the sets in the file. The benchmark runs only on Linux, because it binds threads to a core.

    python benchmarks/bridges.py [--sets 10] [--rounds 80] [--loops lightning,ignite] [--raw FILE [--restart]]
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

import loops
import trainer as peers
from loops import EMPTY, NOBODY, TEN
from timing import machine

MISSING = 3  # the exit status of a child process if the framework is not installed
STRETCH, COLD = 20, 3  # the steps of a turn, and how many of its first steps do not count
WARM = 70  # steps before the first turn; it is no multiple of STRETCH, so metrics records are made in the middle of turns
BARE, PEER = "bare", "peer"
PEERS = (BARE, PEER)
RUNNERS = (*PEERS, *loops.WITH)
TARGETS = {NOBODY: 2, TEN: 5}  # relative to what the peer adds
BASELINES = {PEER: BARE, NOBODY: EMPTY, TEN: EMPTY}
QUANTILE = 0.005  # the time of a step is this quantile of all steps of a host's sets
KEPT = 0.1  # the share of a set's steps that is written: enough for twenty sets, even if one set has all of the fastest steps


# --- in a training process ---


class TurnTimer:
    """Waits for the turn of this process in a forward, measures the steps of the turn, and passes the turn to the next process.

    A process that fails does not pass its turn on; `run_set` then raises an error.

    Args:
        turn: the file descriptor from which a byte is read when it is this process's turn.
        following: the file descriptor to which a byte is written for the next process.
        ready: the file descriptor to which a byte is written when the process is ready for its first turn.
        rounds: the number of turns.
        core: the core on which the training thread runs from the first turn on.
    """

    def __init__(self, turn: int, following: int, ready: int, rounds: int, core: int) -> None:
        self.took: list[float] = []
        """The microseconds of each step that counts."""
        self._turn, self._following, self._ready, self._last, self._core = turn, following, ready, rounds * STRETCH, core
        self.steps = WARM + self._last + 2
        """The number of steps that the training needs."""
        self._place, self._began = -WARM, 0.0

    def on_forward(self) -> None:
        """Measure the step that ends here, and wait if a turn ends here. Called when a forward of the model begins."""
        place, self._place = self._place, self._place + 1
        if not 0 <= place <= self._last:
            return
        now = time.thread_time()
        if place and (place - 1) % STRETCH >= COLD:
            self.took.append((now - self._began) * 1e6)
        if place % STRETCH == 0:
            if place:
                os.write(self._following, b".")
            else:
                os.sched_setaffinity(0, {self._core})  # only this thread
                os.write(self._ready, b".")
            if place < self._last:
                os.read(self._turn, 1)
            now = time.thread_time()
        self._began = now


def run_training(runner: str, name: str, timer: TurnTimer) -> list[float]:
    """Train in a forked process, and return the microseconds of the steps that count."""
    torch.set_num_threads(1)
    if runner in loops.WITH:
        loops.train(name, runner, timer.on_forward, steps=timer.steps, log_every=STRETCH)
    else:
        loops.train_peer({BARE: peers.bare, PEER: lambda: peers.ignite(0)}[runner], timer.on_forward, steps=timer.steps)
    return timer.took


def start(descriptors: Mapping[str, list[int]], name: str, rounds: int, core: int) -> None:
    """Import what these trainings have in common, fork a process for each, and print the times of their steps as JSON.

    Args:
        descriptors: for each training, the file descriptors `turn`, `following` and `ready` of its `TurnTimer`.
        name: the name of the loop.
        rounds: as for `TurnTimer`.
        core: as for `TurnTimer`.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    stdout, sys.stdout = sys.stdout, sys.stderr  # frameworks print to stdout, which is only for the result
    host = None
    if set(descriptors) <= set(PEERS):
        importlib.import_module("ignite.engine")
    else:
        try:
            loop = loops.loop_of(name)
        except ModuleNotFoundError:
            sys.exit(MISSING)
        host = f"{loop.NAME} {loop.VERSION}"
    timers = [TurnTimer(turn, following, ready, rounds, core) for turn, following, ready in descriptors.values()]
    with ProcessPoolExecutor(len(timers), get_context("fork")) as pool:  # all trainings at the same time, one in each process
        took = dict(zip(descriptors, pool.map(run_training, descriptors, [name] * len(timers), timers), strict=True))
    print(json.dumps({"host": host, "took": took}), file=stdout)


# --- a set of five trainings ---


class Set(NamedTuple):
    """The times of a set of five trainings. The fields are the keys of the file of `--raw`."""

    loop: str
    host: str
    steps: int
    """The number of steps of each training that count."""
    fastest: dict[str, list[int]]
    """By training: the microseconds of the fastest steps, in ascending order."""


def run_set(name: str, rounds: int, number: int) -> Set:
    """Run five trainings, and return their times.

    Args:
        name: the name of the loop.
        rounds: the number of turns of each training.
        number: the number of the set, which determines the core and the order of the trainings.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        RuntimeError: a training has failed. The message has the last 2,000 characters of the error output.
    """
    order = random.Random(f"{name} {number}").sample(RUNNERS, len(RUNNERS))
    cores = sorted(os.sched_getaffinity(0))
    pipes, (is_ready, ready) = [os.pipe() for _ in order], os.pipe()
    descriptors = {runner: [pipes[place][0], pipes[(place + 1) % len(pipes)][1], ready] for place, runner in enumerate(order)}
    starters, stderr = list[subprocess.Popen[bytes]](), tempfile.TemporaryFile()  # noqa: SIM115  # deleted when this call ends
    printed = [tempfile.TemporaryFile() for _ in (PEERS, loops.WITH)]  # noqa: SIM115  # the output is larger than a pipe's buffer

    def are_done() -> bool:
        """Return whether all processes have ended without an error; raise the error if one has failed."""
        ended = [each.poll() for each in starters]
        if MISSING in ended:
            raise ModuleNotFoundError(name)
        if any(ended):
            stderr.seek(0)
            raise RuntimeError(f"{name}: {stderr.read().decode()[-2000:]}")
        return None not in ended

    try:
        for python, runners, file in zip((sys.executable, loops.python_of(name)), (PEERS, loops.WITH), printed, strict=True):
            own = {runner: descriptors[runner] for runner in runners}
            command = [python, __file__, "--start", json.dumps(own), "--loops", name, "--rounds", str(rounds)]
            command += ["--core", str(cores[number % len(cores)])]
            passed = {descriptor for each in own.values() for descriptor in each}
            starter = subprocess.Popen(command, pass_fds=passed, stdout=file, stderr=stderr, start_new_session=True)
            starters.append(starter)
        waiting = 0
        while waiting < len(order):
            if select.select([is_ready], [], [], 1.0)[0]:
                waiting += len(os.read(is_ready, len(order)))
            are_done()
        os.write(pipes[0][1], b".")
        while not are_done():
            time.sleep(0.2)
    finally:
        for each in starters:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
        for descriptor in (is_ready, ready, *(end for pipe in pipes for end in pipe)):
            os.close(descriptor)
    for file in printed:
        file.seek(0)
    from_peers, from_host = (json.loads(file.read().splitlines()[-1]) for file in printed)
    took = from_peers["took"] | from_host["took"]
    steps = len(took[BARE])
    fastest = {runner: sorted(round(each) for each in took[runner])[: round(steps * KEPT)] for runner in RUNNERS}
    return Set(name, from_host["host"], steps, fastest)


# --- all sets ---


def run_sets(names: list[str], sets: int, rounds: int, raw: Path) -> list[Set]:
    """Return the sets of the loops. Sets that are in the file `raw` are not run again.

    Raises:
        ValueError: a line of the file is not a set of this benchmark.
    """
    try:
        found = [Set(**json.loads(line)) for line in raw.read_text().splitlines()] if raw.exists() else []
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{raw} has lines that are not sets of this benchmark. Move the file away, or name another one with --raw."
        ) from error
    missing = set[str]()
    with raw.open("a", buffering=1) as file:
        for number in range(sets):  # one set of every loop in turn, so that a slow hour of the machine affects all
            for name in names:
                if name in missing or sum(each.loop == name for each in found) > number:
                    continue
                if sys.stderr.isatty():
                    print(f"\rset {number + 1} of {sets}, {name}" + " " * 20, end="\r", file=sys.stderr, flush=True)
                try:
                    found.append(run_set(name, rounds, number))
                except (ModuleNotFoundError, FileNotFoundError):
                    missing.add(name)
                    print(f"{name} is not installed here.", file=sys.stderr)
                else:
                    file.write(json.dumps(found[-1]._asdict()) + "\n")
    return [each for each in found if each.loop in names]


def microseconds(sets: Sequence[Set]) -> dict[str, float]:
    """Return the time of a step of each training, and the difference to the training that it is compared with."""
    place = round(QUANTILE * sum(each.steps for each in sets))
    took = {runner: float(sorted(step for each in sets for step in each.fastest[runner])[place]) for runner in RUNNERS}
    return took | {f"{runner} adds": took[runner] - took[baseline] for runner, baseline in BASELINES.items()}


def errors(sets: Sequence[Set]) -> dict[str, float]:
    """Return the standard errors of `microseconds`, from a bootstrap over the sets."""
    generator = random.Random(0)
    again = [microseconds(generator.choices(sets, k=len(sets))) for _ in range(1000)]
    return {name: statistics.stdev(each[name] for each in again) for name in again[0]}


def show(sets: list[Set]) -> None:
    """Print the table."""
    of_hosts = [[each for each in sets if each.loop == name] for name in sorted({each.loop for each in sets})]
    found = [(microseconds(of_host), errors(of_host)) for of_host in of_hosts]
    peer = statistics.fmean(took[f"{PEER} adds"] for took, _ in found)
    peer_error = sum(error[f"{PEER} adds"] ** 2 for _, error in found) ** 0.5 / len(found)
    heads = (
        *("host", "sets, steps each", "bare step, µs", "Ignite adds, µs", "with an empty callback of the framework, µs"),
        *("no listeners, µs added", "relative to Ignite", "ten callbacks, µs added", "relative to Ignite"),
    )
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for of_host, (took, error) in zip(of_hosts, found, strict=True):
        cells = [of_host[-1].host, f"{len(of_host)}, {of_host[0].steps}", f"{took[BARE]:.0f}"]
        cells += [f"{took[f'{PEER} adds']:.0f} ± {error[f'{PEER} adds']:.0f}", f"{took[EMPTY]:.0f}"]
        for runner in (NOBODY, TEN):
            more, spread = took[f"{runner} adds"], error[f"{runner} adds"]
            ratio_spread = ((spread / peer) ** 2 + (more / peer * peer_error / peer) ** 2) ** 0.5
            cells += [f"{more:+.0f} ± {spread:.0f}", f"{more / peer:.1f} ± {ratio_spread:.1f}"]
        print(f"| {' | '.join(cells)} |")
    print(f"\nOn average over the rows of this table, Ignite adds {peer:.1f} ± {peer_error:.1f} µs to a bare step.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=10, help="the number of sets of five processes, for each host")
    parser.add_argument("--rounds", type=int, default=80, help="the number of turns of each process in a set")
    parser.add_argument("--loops", default="", help="such as lightning,ignite; by default all that are installed")
    parser.add_argument(
        "--raw", type=Path, help="the file of the sets, one a line; the published one is benchmarks/results/bridges.jsonl"
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard the sets in the file; without this an interrupted run continues"
    )
    parser.add_argument("--start", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        start(given.start, given.loops, given.rounds, given.core)
        return
    if given.restart and given.raw:
        given.raw.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        names = given.loops.split(",") if given.loops else loops.names()
        sets = run_sets(names, given.sets, given.rounds, given.raw or Path(folder) / "sets")
    if not sets:
        sys.exit("There is no set to show. Run at least one, with --sets 1.")
    print(f"{machine()}; one thread, processor time of the thread\n")
    print(
        f"Targets: at most {TARGETS[NOBODY]} times what Ignite adds if no callback listens, and {TARGETS[TEN]} times with ten callbacks.\n"
    )
    show(sets)


if __name__ == "__main__":
    main()
