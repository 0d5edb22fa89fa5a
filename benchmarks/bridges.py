"""What a host adds to a step, beside one empty callback of its own framework that hears the same events in the same loop.

The loops are those of the tests (`tests/bridges/loops`): a small model, no evaluation. Five trainings stand side by side, each in a process of
its own, and pass a baton: a bare loop, the same in Ignite's engine without handlers, the framework with its empty callback, with a host that nobody
listens to, and with a host of ten callbacks. Whoever has the baton trains twenty steps, from one forward of the model to the next, and the others
wait: so all have the same weather. The first three steps with the baton do not count. The time is the training thread's own, and all five are on
one core.

Other work on a machine makes most steps slower, by more than a host does, and none faster. So what a step takes is what the fastest
two-hundredth of them take: in the quiet moments that all five had. A process is faster or slower than another for its whole life too, by where its memory
came to lie. So those that are compared are forked from one that has imported all that they have in common, and all are started again and again, in an
order of chance; the errors are those that other sets of five would have given (a bootstrap over sets, Efron 1979).

Machines differ, and five processes on one core are slower than one: a bare step takes more than twice what it took where the promises were made. So
what is added is held against a peer that is slowed down in the same way: what Ignite's engine adds to the bare loop, in the mean of all hosts' sets,
with which it has nothing to do. That took 10 µs a step where the promises were made: 20 µs are 2 of it, and 50 µs are 5.

Sets are kept in a file as they end: what was interrupted goes on from there, and `--sets 0` only shows what there is. It runs on Linux, which can hold a thread to a core.

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

MISSING = 3  # a child's status, where the framework is not installed
STRETCH, COLD = 20, 3  # steps with the baton, and those of them that do not count
WARM = 70  # steps before the first; records are in the midst of stretches
BARE, PEER = "bare", "peer"
PEERS = (BARE, PEER)
RUNNERS = (*PEERS, *loops.WITH)
PROMISED = {NOBODY: 2, TEN: 5}  # of what the peer adds
FLOORS = {PEER: BARE, NOBODY: EMPTY, TEN: EMPTY}
FASTEST = 0.005  # of all steps of a host's sets: what a step takes
KEPT = 0.1  # of a set's steps: enough for twenty sets, if all of the fastest were in one


# --- one who runs ---


class Baton:
    """Waits at a forward for its turn, takes the time of its stretch, and passes on. Who has failed passes on nothing: see `raced`.

    Args:
        turn: the descriptor from which the baton comes.
        following: that to which it goes.
        ready: where to say that the first stretch may begin.
        rounds: stretches.
        core: on which to run from the first stretch on.
    """

    def __init__(self, turn: int, following: int, ready: int, rounds: int, core: int) -> None:
        self.took: list[float] = []
        """Microseconds of each step that counts."""
        self._turn, self._following, self._ready, self._last, self._core = turn, following, ready, rounds * STRETCH, core
        self.steps = WARM + self._last + 2
        """That the training has to have."""
        self._place, self._began = -WARM, 0.0

    def forward(self) -> None:
        """The model's forward begins."""
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
                os.sched_setaffinity(0, {self._core})  # this thread alone
                os.write(self._ready, b".")
            if place < self._last:
                os.read(self._turn, 1)
            now = time.thread_time()
        self._began = now


def be_a_runner(runner: str, name: str, baton: Baton) -> list[float]:
    """A child's whole life; what it took."""
    torch.set_num_threads(1)
    if runner in loops.WITH:
        loops.train(name, runner, baton.forward, steps=baton.steps, log_every=STRETCH)
    else:
        loops.train_a_peer({BARE: peers.bare, PEER: lambda: peers.ignite(0)}[runner], baton.forward, steps=baton.steps)
    return baton.took


def start(descriptors: Mapping[str, list[int]], name: str, rounds: int, core: int) -> None:
    """Import what these runners have in common, fork them, and print what they took, in one line.

    Args:
        descriptors: `Baton`'s, of each runner.
        name: the name of the loop.
        rounds: as for `Baton`.
        core: as for `Baton`.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    said, sys.stdout = sys.stdout, sys.stderr  # frameworks print
    host = None
    if set(descriptors) <= set(PEERS):
        importlib.import_module("ignite.engine")
    else:
        try:
            loop = loops.loop_of(name)
        except ModuleNotFoundError:
            sys.exit(MISSING)
        host = f"{loop.NAME} {loop.VERSION}"
    batons = [Baton(turn, following, ready, rounds, core) for turn, following, ready in descriptors.values()]
    with ProcessPoolExecutor(len(batons), get_context("fork")) as pool:  # all at once, one each
        took = dict(zip(descriptors, pool.map(be_a_runner, descriptors, [name] * len(batons), batons), strict=True))
    print(json.dumps({"host": host, "took": took}), file=said)


# --- around them ---


class Set(NamedTuple):
    """What a set of five says."""

    loop: str
    host: str
    steps: int
    """Of each of the five."""
    fastest: dict[str, list[int]]
    """Microseconds of the fastest of them, in order."""


def raced(name: str, rounds: int, number: int) -> Set:
    """Five trainings, from their start to their end.

    Args:
        name: the name of the loop.
        rounds: how often each has the baton.
        number: of the set; says on which core, and in which order.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        RuntimeError: one of them has failed; with the end of what it said.
    """
    order = random.Random(f"{name} {number}").sample(RUNNERS, len(RUNNERS))
    cores = sorted(os.sched_getaffinity(0))
    pipes, (is_ready, ready) = [os.pipe() for _ in order], os.pipe()
    descriptors = {runner: [pipes[place][0], pipes[(place + 1) % len(pipes)][1], ready] for place, runner in enumerate(order)}
    starters, said = list[subprocess.Popen[bytes]](), tempfile.TemporaryFile()  # noqa: SIM115  # gone with this call
    printed = [tempfile.TemporaryFile() for _ in (PEERS, loops.WITH)]  # noqa: SIM115  # more than a pipe holds

    def look() -> bool:
        """Whether all are done."""
        ended = [each.poll() for each in starters]
        if MISSING in ended:
            raise ModuleNotFoundError(name)
        if any(ended):
            said.seek(0)
            raise RuntimeError(f"{name}: {said.read().decode()[-2000:]}")
        return None not in ended

    try:
        for python, runners, file in zip((sys.executable, loops.python_of(name)), (PEERS, loops.WITH), printed, strict=True):
            own = {runner: descriptors[runner] for runner in runners}
            command = [python, __file__, "--start", json.dumps(own), "--loops", name, "--rounds", str(rounds)]
            command += ["--core", str(cores[number % len(cores)])]
            passed = {descriptor for each in own.values() for descriptor in each}
            starter = subprocess.Popen(command, pass_fds=passed, stdout=file, stderr=said, start_new_session=True)
            starters.append(starter)
        waiting = 0
        while waiting < len(order):
            if select.select([is_ready], [], [], 1.0)[0]:
                waiting += len(os.read(is_ready, len(order)))
            look()
        os.write(pipes[0][1], b".")
        while not look():
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
    of_peers, of_host = (json.loads(file.read().splitlines()[-1]) for file in printed)
    took = of_peers["took"] | of_host["took"]
    steps = len(took[BARE])
    fastest = {runner: sorted(round(each) for each in took[runner])[: round(steps * KEPT)] for runner in RUNNERS}
    return Set(name, of_host["host"], steps, fastest)


# --- and around all of them ---


def raced_all(names: list[str], sets: int, rounds: int, raw: Path) -> list[Set]:
    """Return the sets of the loops. Sets that the file has are not run again.

    Raises:
        ValueError: the file has something else.
    """
    try:
        found = [Set(**json.loads(line)) for line in raw.read_text().splitlines()] if raw.exists() else []
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{raw} has lines that are no sets of this benchmark: move it away, or name another with --raw"
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
                    found.append(raced(name, rounds, number))
                except (ModuleNotFoundError, FileNotFoundError):
                    missing.add(name)
                    print(f"{name} is not installed here.", file=sys.stderr)
                else:
                    file.write(json.dumps(found[-1]._asdict()) + "\n")
    return [each for each in found if each.loop in names]


def microseconds(sets: Sequence[Set]) -> dict[str, float]:
    """What a step of each of the five takes, and what it adds to its floor's."""
    place = round(FASTEST * sum(each.steps for each in sets))
    took = {runner: float(sorted(step for each in sets for step in each.fastest[runner])[place]) for runner in RUNNERS}
    return took | {f"{runner} adds": took[runner] - took[floor] for runner, floor in FLOORS.items()}


def errors(sets: Sequence[Set]) -> dict[str, float]:
    """The standard error of each of them, over other sets that might have been."""
    chance = random.Random(0)
    again = [microseconds(chance.choices(sets, k=len(sets))) for _ in range(1000)]
    return {name: statistics.stdev(each[name] for each in again) for name in again[0]}


def show(sets: list[Set]) -> None:
    """The table."""
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
    print(f"\nIn the mean of all sets of all hosts, Ignite adds {peer:.1f} ± {peer_error:.1f} µs to a bare step.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=10, help="of five processes, for every host")
    parser.add_argument("--rounds", type=int, default=80, help="of the baton, in a set")
    parser.add_argument("--loops", default="", help="such as lightning,ignite; all that are installed")
    parser.add_argument(
        "--raw", type=Path, help="where sets are kept, a line each; benchmarks/results/bridges.jsonl is the published"
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
        sets = raced_all(names, given.sets, given.rounds, given.raw or Path(folder) / "sets")
    if not sets:
        sys.exit("there is no set to show")
    print(f"# {machine()}; one thread, processor time of the thread\n")
    print(
        f"Targets, relative to what Ignite adds: at most {PROMISED[NOBODY]} without listeners, {PROMISED[TEN]} with ten callbacks.\n"
    )
    show(sets)


if __name__ == "__main__":
    main()
