"""What hosts, guests and trainers add to a step, in instructions, which no other tenant of the machine can disturb.

Valgrind counts the instructions of forty steps, two records among them, of the training process with all its threads. What a host adds is
what its run takes more than the same loop with one empty callback of the host's framework; it is given as a multiple of what Ignite's
engine without handlers adds to a bare loop, counted in the same way. That took 10 µs a step where the promises were made: 20 µs are 2 of
it, 50 µs are 5, and the Trainer was to add no more than Ignite does.

A guest is held against its own framework's dispatch: see `guests.py`.

    python benchmarks/instructions.py hosts [--of lightning,ignite]
    python benchmarks/instructions.py guests [--of lightning,ignite]

It needs `valgrind`, and takes about three minutes a host, and one a guest.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

import homes
import trainer as peers
from timing import machine

WARM, COUNTED = 30, 40  # steps that are passed over, and those whose instructions are counted
RECORD_EVERY = 20
HOSTS, GUESTS, PEERS = "hosts", "guests", "peers"
FRAMEWORKS = ("composer", "huggingface", "ignite", "keras", "lightning", "megatron_bridge", "torchtnt")


# --- within valgrind ---


class Forwards:
    """Counts the forwards of a model, which are steps, and has valgrind collect during those that matter."""

    def __init__(self) -> None:
        self.seen = 0

    def noted(self) -> None:
        self.seen += 1
        if self.seen == WARM:
            torch._C._valgrind_toggle()
        elif self.seen == WARM + COUNTED:
            torch._C._valgrind_toggle_and_dump_stats()


def run_a_home(name: str) -> None:
    """Train with an empty callback of its own, with a host of nothing, and with a host of ten."""
    homes.home(name)
    collecting()
    for having in homes.WITH:
        homes.train(name, having, Forwards().noted, steps=WARM + COUNTED + 8, log_every=RECORD_EVERY)


def run_peers() -> None:
    """The bare loop, and the trainers over it."""
    collecting()
    for loop in (peers.bare, lambda: peers.ignite(0), lambda: peers.ignite(10), lambda: peers.ours(0), lambda: peers.ours(10)):
        homes.train_a_peer(loop, Forwards().noted, steps=WARM + COUNTED + 8)


class Clock:
    """In the place of a clock that is read at the beginning and at the end of what matters."""

    def __init__(self) -> None:
        self._reads = 0

    def __call__(self) -> float:
        self._reads += 1
        if self._reads % 2:
            torch._C._valgrind_toggle()
        else:
            torch._C._valgrind_toggle_and_dump_stats()
        return float(self._reads)


def run_a_framework(name: str) -> None:
    """Tell ten of its callbacks at home; then nobody, and ten guests, here."""
    import guests

    framework = getattr(guests, name)()
    made = [framework.made() for _ in range(guests.GUESTS)]
    dispatch = framework.dispatch(made)

    def all_three() -> None:
        with tempfile.TemporaryDirectory() as folder:
            guests.at_home(dispatch)()
            guests.here(list, folder)()
            guests.here(lambda: [framework.guest(framework.made(), name=str(place)) for place in range(guests.GUESTS)], folder)()

    guests.STEPS = COUNTED
    all_three()
    vars(guests)["time"] = SimpleNamespace(thread_time=Clock())
    collecting()
    all_three()


def collecting() -> None:
    """From here on valgrind counts where it is asked to; until here it would only have taken long."""
    subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, capture_output=True)


# --- around it ---


def counted(what: str, whose: str) -> list[float]:
    """Instructions a step, of every run of a child."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *("valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no", "--trace-children=no"),
                *(f"--callgrind-out-file={folder}/out", homes.python_of(whose), __file__, what, "--child", whose),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{whose}: {done.stderr[-2000:]}")
        files = sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:]))
        totals = [int(re.findall(r"^totals: (\d+)", path.read_text(), re.M)[-1]) for path in files]
    return [total / COUNTED for total in totals]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(HOSTS, GUESTS))
    parser.add_argument("--of", default="", help="such as lightning,ignite; all that are installed")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        if given.child == PEERS:
            run_peers()
        elif given.what == GUESTS:
            run_a_framework(given.child)
        else:
            run_a_home(given.child)
        return
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not here; it is a package of that name in most distributions")
    wanted = [name for name in given.of.split(",") if name]
    if given.what == GUESTS:
        print_guests(wanted)
    else:
        print_hosts(wanted)


def print_hosts(wanted: list[str]) -> None:
    """Of trainers too."""
    bare, ignite, ignite_ten, ours, ours_ten = counted(HOSTS, PEERS)
    unit = ignite - bare
    print(f"# {machine()}; {COUNTED} steps of each run; a bare step has {bare:,.0f} instructions, and Ignite adds {unit:,.0f}\n")
    print("| trainer | instructions a step over the bare loop | of Ignite's | with ten callbacks of two events | of Ignite's |")
    print("| --- | --- | --- | --- | --- |")
    for name, none, ten in (("Ignite", ignite, ignite_ten), ("callsheet", ours, ours_ten)):
        print(f"| {name} | {none - bare:,.0f} | {(none - bare) / unit:.1f} | {ten - bare:,.0f} | {(ten - bare) / unit:.1f} |")
    print("\n| host | instructions a step more, nobody listens | of Ignite's | ten callbacks of four events | of Ignite's |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for name in wanted or homes.names():
        empty, nobody, ten = counted(HOSTS, name)
        added = [each - empty for each in (nobody, ten)]
        shown = " | ".join(f"{each:,.0f} | {each / unit:.1f}" for each in added)
        print(f"| {name} | {shown} |", flush=True)


def print_guests(wanted: list[str]) -> None:
    """Of each framework."""
    print(f"# {machine()}; {COUNTED} steps, ten callbacks\n")
    print("| a callback of | instructions a step at home | instructions a step as a guest | |")
    print("| --- | --- | --- | --- |", flush=True)
    for name in wanted or FRAMEWORKS:
        home, none, ten = (each / 10 for each in counted(GUESTS, name))
        print(f"| {name} | {home:,.0f} | {ten - none:,.0f} | {(ten - none) / home:.2f} x |", flush=True)


if __name__ == "__main__":
    main()
