"""What a host adds to a step, beside one empty callback of its own framework that hears the same events in the same loop.

The loops are those of the tests (`tests/bridges/homes`): a small model, no evaluation, a record every 20 steps. Five trainings stand side by
side, each in a process of its own, and pass a baton: a bare loop, the same in Ignite's engine without handlers, the framework with its
empty callback, with a host that nobody listens to, and with a host of ten callbacks. Whoever has the baton trains twenty steps, from one
forward of the model to the next, and the others wait: so all have the same weather, which lasts longer than that, and what is added is the
mean of the differences within a round, the middle half of them. The first three steps with the baton do not count. The time is the training thread's own.

Python that runs once a step, between operations that have emptied the caches, is slowed down by a machine far more than the operations are. So
what is added is held against a peer that is slowed down in the same way: what Ignite's engine adds to the bare loop. That took 10 µs a step where
the promises were made: 20 µs are 2 of it, and 50 µs are 5. What Ignite adds has nothing to do with the host, so the rounds of all hosts say what it
is; since the machine is slower at one host than at another, both are taken as shares of the bare step of their rounds.

    python benchmarks/bridges.py [--rounds 400] [--homes lightning,ignite]
"""

from __future__ import annotations

import argparse
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
    """

    def __init__(self, turn: int, following: int, ready: int, rounds: int) -> None:
        self.took: list[float] = []
        """Microseconds a step, of each stretch."""
        self._turn, self._following, self._ready, self._last = turn, following, ready, rounds * STRETCH
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


def raced(name: str, rounds: int) -> tuple[str, dict[str, list[float]]]:
    """The host, and what each of the five took, round by round.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        RuntimeError: one of them has failed; with the end of what it said.
    """
    pipes, (is_ready, ready) = [os.pipe() for _ in RUNNERS], os.pipe()
    runners, said = [], tempfile.TemporaryFile()  # noqa: SIM115  # gone with this call
    for i, runner in enumerate(RUNNERS):
        descriptors = pipes[i][0], pipes[(i + 1) % len(pipes)][1], ready
        python = homes.python_of(name) if runner in homes.WITH else sys.executable
        command = [python, __file__, "--child", runner, "--homes", name, "--rounds", str(rounds)]
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
        return found[-1]["host"], {runner: each["took"] for runner, each in zip(RUNNERS, found, strict=True)}
    finally:
        for each in runners:
            each.kill()
        for descriptor in (is_ready, ready, *(beginning for beginning, _ in pipes)):
            os.close(descriptor)


def differences(took: dict[str, list[float]], runner: str, floor: str) -> list[float]:
    """Microseconds that it takes more, round by round."""
    return [more - less for more, less in zip(took[runner], took[floor], strict=True)]


def added(took: dict[str, list[float]], runner: str, floor: str) -> tuple[float, float]:
    """Microseconds that it takes more, and their standard error."""
    return middle_mean(differences(took, runner, floor))


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
    names = given.homes.split(",") if given.homes else homes.names()
    print(f"# {machine()}; {given.rounds} rounds of {STRETCH} steps, one thread, its own time\n")
    print(
        f"Promised, of what Ignite adds: no more than {PROMISED[NOBODY]} with nobody who listens, {PROMISED[TEN]} with ten callbacks.\n"
    )
    heads = (
        *("host", "µs, a bare step", "Ignite adds", "an empty callback of its own"),
        *("µs more, nobody", "of Ignite's", "µs more, ten callbacks", "of Ignite's"),
    )
    missing, raced_by = [], dict[str, dict[str, list[float]]]()
    for number, name in enumerate(names, 1):
        if sys.stderr.isatty():
            print(f"\r{name}, {number} of {len(names)}   ", end="\r", file=sys.stderr, flush=True)
        try:
            host, took = raced(name, given.rounds)
        except (ModuleNotFoundError, FileNotFoundError):
            missing.append(name)
        else:
            raced_by[host] = took
    shares = [each / statistics.median(took[BARE]) for took in raced_by.values() for each in differences(took, PEER, BARE)]
    share, share_error = middle_mean(shares)
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for host, took in raced_by.items():
        bare, (peer, error) = statistics.median(took[BARE]), added(took, PEER, BARE)
        cells = [host, f"{bare:.0f}", f"{peer:.0f} ± {error:.0f}", f"{statistics.median(took[EMPTY]):.0f}"]
        for runner in (NOBODY, TEN):
            more, error = added(took, runner, EMPTY)
            of_peer = more / bare / share
            spread = ((error / bare / share) ** 2 + (of_peer * share_error / share) ** 2) ** 0.5
            cells += [f"{more:+.0f} ± {error:.0f}", f"{of_peer:.1f} ± {spread:.1f}"]
        print(f"| {' | '.join(cells)} |")
    print(f"\nOver the rounds of all hosts, Ignite adds {share:.1%} ± {share_error:.1%} of a bare step.")
    if missing:
        print(f"\nNot installed here: {', '.join(missing)}.")


if __name__ == "__main__":
    main()
