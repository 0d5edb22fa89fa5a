"""What a host adds to a step, beside one empty callback of its own framework that hears the same events in the same loop.

The loops are those of the tests (`tests/bridges/homes`): a small model, no evaluation, a record every 20 steps. Five trainings stand side by
side, each in a process of its own, and pass a baton: a bare loop, the same in Ignite's engine without handlers, the framework with its
empty callback, with a host that nobody listens to, and with a host of ten callbacks. Whoever has the baton trains twenty steps, from one
forward of the model to the next, and the others wait: so all have the same weather, which lasts longer than that, and what is added is the
mean of the differences within a round, the middle half of them. The first three steps with the baton do not count. The time is the training thread's own,
and all five are on one core.

A process is faster or slower than another for its whole life, by where its memory came to lie, and that is as much as a host adds. So the five are
started again and again, in an order of chance, and a set of five says one figure; the mean is over sets, and so is the error. Sets are kept in a
file as they end: what was interrupted goes on from there, and `--sets 0` only shows what there is.

Python that runs once a step, between operations that have emptied the caches, is slowed down by a machine far more than the operations are. So
what is added is held against a peer that is slowed down in the same way: what Ignite's engine adds to the bare loop. That took 10 µs a step where
the promises were made: 20 µs are 2 of it, and 50 µs are 5. What Ignite adds has nothing to do with the host, so the sets of all hosts say what it
is; since the machine is slower in one set than in another, both are taken as shares of the bare step of their set.

    python benchmarks/bridges.py [--sets 16] [--rounds 30] [--homes lightning,ignite] [--raw FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

import homes
import trainer as peers
from homes import EMPTY, NOBODY, TEN
from timing import machine, middle_mean

MISSING = 3  # a child's status, where the framework is not installed
STRETCH, COLD = 20, 3  # steps with the baton, and those of them that do not count
WARM = 70  # steps before the first; records are in the midst of stretches
BARE, PEER = "bare", "peer"
RUNNERS = (BARE, PEER, *homes.WITH)
PROMISED = {NOBODY: 2, TEN: 5}  # of what the peer adds


# --- one who runs ---


class Baton:
    """Waits at a forward for its turn, takes the time of its stretch, and passes on.

    Args:
        turn: the descriptor from which the baton comes.
        following: that to which it goes.
        ready: where to say that the first stretch may begin.
        rounds: stretches.
        core: on which to run from the first stretch on.
    """

    def __init__(self, turn: int, following: int, ready: int, rounds: int, core: int) -> None:
        self.took: list[float] = []
        """Microseconds a step, of each stretch."""
        self._turn, self._following, self._ready, self._last, self._core = turn, following, ready, rounds * STRETCH, core
        self.steps = WARM + self._last + 2
        """That the training has to have."""
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
                os.sched_setaffinity(0, {self._core})  # this thread alone
                os.write(self._ready, b".")
            if place < self._last and not os.read(self._turn, 1):
                sys.exit("the one before this has failed")


def be_a_runner(runner: str, name: str, baton: Baton) -> None:
    """A child's whole life; what it took goes to the standard output, in one line."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    said, sys.stdout = sys.stdout, sys.stderr  # frameworks print
    host = None
    if runner in homes.WITH:
        try:
            home = homes.home(name)
        except ModuleNotFoundError:
            sys.exit(MISSING)
        host = f"{home.NAME} {home.VERSION}"
        homes.train(name, runner, baton.forward, steps=baton.steps, log_every=STRETCH)
    else:
        homes.train_a_peer({BARE: peers.bare, PEER: lambda: peers.ignite(0)}[runner], baton.forward, steps=baton.steps)
    print(json.dumps({"host": host, "took": baton.took}), file=said)


# --- around them ---


class Set(NamedTuple):
    """What a set of five says: microseconds of a step in its median, and shares of the bare one's in the mean of its rounds."""

    home: str
    host: str
    bare: float
    empty: float
    peer: float
    """That Ignite's engine adds to the bare step."""
    nobody: float
    """That the host adds to an empty callback of the framework's."""
    ten: float


def raced(name: str, rounds: int, number: int) -> Set:
    """Five trainings, from their start to their end.

    Args:
        name: of the home.
        rounds: how often each has the baton.
        number: of the set; says on which core, and in which order.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        RuntimeError: one of them has failed; with the end of what it said.
    """
    order = random.Random(f"{name} {number}").sample(RUNNERS, len(RUNNERS))
    cores = sorted(os.sched_getaffinity(0))
    pipes, (is_ready, ready) = [os.pipe() for _ in order], os.pipe()
    runners, said = [], tempfile.TemporaryFile()  # noqa: SIM115  # gone with this call
    for i, runner in enumerate(order):
        descriptors = pipes[i][0], pipes[(i + 1) % len(pipes)][1], ready
        python = homes.python_of(name) if runner in homes.WITH else sys.executable
        command = [python, __file__, "--child", runner, "--homes", name, "--rounds", str(rounds)]
        command += ["--descriptors", ",".join(map(str, descriptors)), "--core", str(cores[number % len(cores)])]
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
        while waiting < len(order):
            if select.select([is_ready], [], [], 1.0)[0]:
                waiting += len(os.read(is_ready, len(order)))
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
        found = {runner: json.loads(lines[-1]) for runner, lines in zip(order, printed, strict=True)}
        took = {runner: each["took"] for runner, each in found.items()}
        bare = statistics.median(took[BARE])
        shares = (added(took, runner, floor) / bare for runner, floor in ((PEER, BARE), (NOBODY, EMPTY), (TEN, EMPTY)))
        return Set(name, found[EMPTY]["host"], bare, statistics.median(took[EMPTY]), *shares)
    finally:
        for each in runners:
            each.kill()
        for descriptor in (is_ready, ready, *(beginning for beginning, _ in pipes)):
            os.close(descriptor)


def added(took: dict[str, list[float]], runner: str, floor: str) -> float:
    """Microseconds that it takes more."""
    return middle_mean([more - less for more, less in zip(took[runner], took[floor], strict=True)])[0]


# --- and around all of them ---


def raced_all(names: list[str], sets: int, rounds: int, raw: Path) -> list[Set]:
    """The sets of the homes, as many as there were to be; those that the file has are not raced again.

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
        for number in range(sets):  # of every home in turn, so that none has an hour of bad weather for itself
            for name in names:
                if name in missing or sum(each.home == name for each in found) > number:
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
    return [each for each in found if each.home in names]


def show(sets: list[Set]) -> None:
    """The table."""
    share, share_error = middle_mean([each.peer for each in sets])
    heads = (
        *("host", "sets", "µs, a bare step", "an empty callback of its own"),
        *("more with nobody", "of Ignite's", "more with ten callbacks", "of Ignite's"),
    )
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for name in sorted({each.home for each in sets}):
        of_host = [each for each in sets if each.home == name]
        cells = [of_host[-1].host, f"{len(of_host)}"]
        cells += [
            f"{statistics.median(values):.0f}" for values in ([each.bare for each in of_host], [each.empty for each in of_host])
        ]
        for values in ([each.nobody for each in of_host], [each.ten for each in of_host]):
            more, error = middle_mean(values)
            spread = ((error / share) ** 2 + (more / share * share_error / share) ** 2) ** 0.5
            cells += [f"{more:+.1%} ± {error:.1%}", f"{more / share:.1f} ± {spread:.1f}"]
        print(f"| {' | '.join(cells)} |")
    print(f"\nOver all sets, Ignite adds {share:.1%} ± {share_error:.1%} of a bare step.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=16, help="of five processes, for every host")
    parser.add_argument("--rounds", type=int, default=30, help="of the baton, in a set")
    parser.add_argument("--homes", default="", help="such as lightning,ignite; all that are installed")
    parser.add_argument(
        "--raw", type=Path, help="where sets are kept, a line each; benchmarks/results/bridges.jsonl is the published"
    )
    parser.add_argument("--child", choices=RUNNERS, help=argparse.SUPPRESS)
    parser.add_argument("--descriptors", help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        turn, following, ready = map(int, given.descriptors.split(","))
        be_a_runner(given.child, given.homes, Baton(turn, following, ready, given.rounds, given.core))
        return
    with tempfile.TemporaryDirectory() as folder:
        names = given.homes.split(",") if given.homes else homes.names()
        sets = raced_all(names, given.sets, given.rounds, given.raw or Path(folder) / "sets")
    if not sets:
        sys.exit("there is no set to show")
    print(f"# {machine()}; sets of {given.rounds} rounds of {STRETCH} steps, one thread, its own time\n")
    print(
        f"Promised, of what Ignite adds: no more than {PROMISED[NOBODY]} with nobody who listens, {PROMISED[TEN]} with ten callbacks.\n"
    )
    show(sets)


if __name__ == "__main__":
    main()
