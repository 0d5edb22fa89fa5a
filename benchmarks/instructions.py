"""The instructions and estimated cycles that hosts, guests and trainers add to a step.

Other work on the machine does not change these counts. Valgrind counts the instructions that the training thread executes in
forty steps, two metrics records among them. It also simulates the machine's caches, because Python code that runs once per step
finds the caches full of the operations' data. The cycles are estimated as KCachegrind does: one for each instruction, ten more
for each miss of the first-level cache and a hundred more for each miss of the last-level cache.

What a host adds is the difference between its run and the same loop with one empty callback of the host's framework. It is
divided by what Ignite's engine without handlers adds to a bare loop, counted in the same way. A ratio of 2 means that the host
adds twice as much as Ignite. The targets are the ratios of `bridges.py`, and for the Trainer at most what Ignite adds.

A guest is compared with its own framework's dispatch: see `guests.py`.

    python benchmarks/instructions.py hosts [--of lightning,ignite]
    python benchmarks/instructions.py guests [--of lightning,ignite]
    python benchmarks/instructions.py bytecodes [--of lightning,ignite]

`hosts` and `guests` need `valgrind`, and take about four minutes for each host, and two for each guest.

`bytecodes` takes a few seconds for each host and needs nothing else. It counts the bytecodes of Python that the training thread executes in the same steps as
`hosts`. Two counts differ by less than 0.1 %, so that two versions of callsheet can be compared; but a bytecode may take one instruction or,
if it calls an operation of torch, thousands.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch

import loops
import trainer as peers
from timing import machine

MISS, LAST_MISS = (
    10,
    100,
)  # cycles per cache miss: <https://valgrind.org/docs/manual/cg-manual.html>, and KCachegrind's formula
WARM, COUNTED = 30, 40  # steps before the count, and steps whose instructions are counted
RECORD_EVERY = 20
HOSTS, GUESTS, BYTECODES, PEERS = "hosts", "guests", "bytecodes", "peers"
FRAMEWORKS = ("composer", "huggingface", "ignite", "keras", "lightning", "megatron_bridge", "torchtnt")


# --- in the process that is counted ---


class Valgrind:
    """Lets valgrind count the instructions between `start` and `stop`."""

    def prepare(self) -> None:
        """Let valgrind instrument the program from here on, because it would only make the imports slow."""
        subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, capture_output=True)

    def start(self) -> None:
        torch._C._valgrind_toggle()

    def stop(self) -> None:
        torch._C._valgrind_toggle_and_dump_stats()


class Bytecodes:
    """Counts the bytecodes that this thread executes between `start` and `stop`. `found` has one number for each count."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self._count = 0

    def prepare(self) -> None: ...

    def start(self) -> None:
        self._count = 0
        frame: FrameType | None = sys._getframe()
        while frame is not None:  # also count the bytecodes of the functions that are already running, such as the training loop
            frame.f_trace, frame.f_trace_opcodes = self._trace, True
            frame = frame.f_back
        sys.settrace(self._trace)

    def stop(self) -> None:
        sys.settrace(None)
        self.found.append(self._count)

    def _trace(self, frame: FrameType, event: str, value: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._count += event == "opcode"
        return self._trace


counter: Valgrind | Bytecodes = Valgrind()


class Forwards:
    """Counts the forwards of a model, one for each step, and makes `counter` count `COUNTED` steps after `warm`."""

    def __init__(self, warm: int = WARM) -> None:
        self.seen, self._warm = 0, warm

    def on_forward(self) -> None:
        """Count a forward, and start or stop `counter`. Called in each forward."""
        self.seen += 1
        if self.seen == self._warm:
            counter.start()
        elif self.seen == self._warm + COUNTED:
            counter.stop()


def run_a_loop(name: str) -> None:
    """Train with an empty callback of the framework, with a host without callbacks, and with a host of ten callbacks."""
    loops.loop_of(name)
    start_instrumentation()
    for having in loops.WITH:
        loops.train(name, having, Forwards().on_forward, steps=WARM + COUNTED + 8, log_every=RECORD_EVERY)


def run_peers() -> None:
    """Train with the bare loop, and with Ignite and callsheet's Trainer without and with ten callbacks."""
    start_instrumentation()
    for loop in (peers.bare, lambda: peers.ignite(0), lambda: peers.ignite(10), lambda: peers.ours(0), lambda: peers.ours(10)):
        loops.train_peer(loop, Forwards().on_forward, steps=WARM + COUNTED + 8)


class CountingClock:
    """Replaces a clock: each first read starts `counter`, and each second read stops it."""

    def __init__(self) -> None:
        self._reads = 0

    def __call__(self) -> float:
        self._reads += 1
        if self._reads % 2:
            counter.start()
        else:
            counter.stop()
        return float(self._reads)


def run_a_framework(name: str) -> None:
    """Call ten callbacks as their framework does; then run our loop without guests, and with the callbacks as ten guests."""
    import guests

    framework = getattr(guests, name)()
    made = [framework.make_callback() for _ in range(guests.GUESTS)]
    dispatch = framework.dispatch(made)

    def all_three() -> None:
        with tempfile.TemporaryDirectory() as folder:
            guests.in_framework(dispatch)()
            guests.in_callsheet(list, folder)()
            guests.in_callsheet(
                lambda: [framework.guest(framework.make_callback(), name=str(number)) for number in range(guests.GUESTS)], folder
            )()

    guests.STEPS = COUNTED
    all_three()
    vars(guests)["time"] = SimpleNamespace(thread_time=CountingClock())
    start_instrumentation()
    all_three()


def start_instrumentation() -> None:
    """Prepare `counter`, and switch off garbage collection: one collection has more instructions than forty steps, at a random time."""
    gc.collect()
    gc.disable()
    counter.prepare()


# --- in the parent process ---


class Count(NamedTuple):
    """The instructions and cycles of a step."""

    instructions: float
    cycles: float

    def over(self, floor: Count) -> Count:
        """Return the difference to `floor`."""
        return Count(self.instructions - floor.instructions, self.cycles - floor.cycles)

    def shown(self, unit: Count) -> str:
        """Return four cells of a table: instructions and cycles, each with its ratio to that of `unit`."""
        return f"{self.instructions:,.0f} | {self.instructions / unit.instructions:.1f} | {self.cycles:,.0f} | {self.cycles / unit.cycles:.1f}"

    @classmethod
    def read(cls, path: Path) -> Count:
        """Read one of callgrind's files."""
        text = path.read_text()
        names, numbers = (re.findall(rf"^{line}: (.*)", text, re.M)[-1].split() for line in ("events", "totals"))
        # Callgrind leaves out zeros.
        of = {name: int(number) / COUNTED for name, number in itertools.zip_longest(names, numbers, fillvalue="0")}
        misses, last = ([value for name, value in of.items() if name[:2] in level] for level in (("I1", "D1"), ("IL", "DL")))
        return cls(of["Ir"], of["Ir"] + MISS * sum(misses) + LAST_MISS * sum(last))


def counted(whose: str, script: str, *arguments: str, caches: bool = True) -> list[Count]:
    """Return the counts per step of each training in a child process.

    Args:
        whose: the name of a loop of `loops.py`, whose interpreter runs the child process, or any other name for this interpreter.
        script: the file that the child process runs.
        arguments: the arguments of the child process.
        caches: whether valgrind simulates the caches, which takes twice as long.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *("valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no", "--trace-children=no"),
                *(f"--cache-sim={'yes' if caches else 'no'}", f"--callgrind-out-file={folder}/out"),
                *(loops.python_of(whose), script, *arguments),
            ],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONHASHSEED": "0"},  # the hashes of strings change the number of instructions of dicts and sets
        )
        if done.returncode:
            raise RuntimeError(f"{whose}: {done.stderr[-2000:]}")
        return [Count.read(path) for path in sorted(Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:]))]


def bytecodes_of(whose: str) -> list[float]:
    """Return the bytecodes per step of each training, counted in a child process. `whose` is as in `counted`."""
    words = [loops.python_of(whose), __file__, BYTECODES, "--child", whose]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONHASHSEED": "0"})
    if done.returncode:
        raise RuntimeError(f"{whose}: {done.stderr[-2000:]}")
    return [count / COUNTED for count in json.loads(done.stdout.splitlines()[-1])]


def prepare_child() -> None:
    """Switch off logging, warnings and additional threads of torch, which would change the counts."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def check_valgrind(parser: argparse.ArgumentParser) -> None:
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed; it is a package of that name in most distributions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(HOSTS, GUESTS, BYTECODES))
    parser.add_argument("--of", default="", help="such as lightning,ignite; by default all, which must be installed")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        prepare_child()
        global counter
        if given.what == BYTECODES:
            counter = Bytecodes()
        if given.child == PEERS:
            run_peers()
        elif given.what == GUESTS:
            run_a_framework(given.child)
        else:
            run_a_loop(given.child)
        if isinstance(counter, Bytecodes):
            print(f"\n{json.dumps(counter.found)}", flush=True)
        return
    wanted = [name for name in given.of.split(",") if name]
    if given.what == BYTECODES:
        print_bytecodes(wanted)
        return
    check_valgrind(parser)
    if given.what == GUESTS:
        print_guests(wanted)
    else:
        print_hosts(wanted)


def print_hosts(wanted: list[str]) -> None:
    """Print the tables of the trainers and the hosts."""
    bare, ignite, ignite_ten, ours, ours_ten = counted(PEERS, __file__, HOSTS, "--child", PEERS)
    unit = ignite.over(bare)
    print(
        f"{machine()}; {COUNTED} steps of each run; a bare step has {bare.instructions:,.0f} instructions in {bare.cycles:,.0f} cycles,"
    )
    print(f"and Ignite adds {unit.instructions:,.0f} and {unit.cycles:,.0f}\n")
    figures = "instructions added | relative to Ignite | cycles added | relative to Ignite"
    print(f"| trainer, compared with the bare loop | {figures} | with ten callbacks for two events: {figures} |\n|{' --- |' * 9}")
    for name, none, ten in (("Ignite", ignite, ignite_ten), ("callsheet", ours, ours_ten)):
        print(f"| {name} | {none.over(bare).shown(unit)} | {ten.over(bare).shown(unit)} |")
    print(
        f"\n| host, without listeners | {figures} | with ten callbacks for four events: {figures} |\n|{' --- |' * 9}", flush=True
    )
    for name in wanted or loops.names():
        empty, nobody, ten = counted(name, __file__, HOSTS, "--child", name)
        print(f"| {loops.shown(name)} | {nobody.over(empty).shown(unit)} | {ten.over(empty).shown(unit)} |", flush=True)


def print_bytecodes(wanted: list[str]) -> None:
    """Print the bytecodes that the trainers and the hosts add to a step."""
    bare, ignite, ignite_ten, ours, ours_ten = bytecodes_of(PEERS)
    print(
        f"{machine()}; {COUNTED} steps of each run\n\n| loop | bytecodes added to a step | with ten callbacks |\n| --- | --- | --- |"
    )
    print(f"| Ignite, compared with the bare loop | {ignite - bare:,.0f} | {ignite_ten - bare:,.0f} |")
    print(f"| callsheet's Trainer, compared with the bare loop | {ours - bare:,.0f} | {ours_ten - bare:,.0f} |")
    for name in wanted or loops.names():
        empty, nobody, ten = bytecodes_of(name)
        print(f"| {loops.shown(name)} | {nobody - empty:,.0f} | {ten - empty:,.0f} |", flush=True)


def print_guests(wanted: list[str]) -> None:
    """Print the table of the guests."""
    print(f"{machine()}; {COUNTED} steps, ten callbacks\n")
    print(
        "| callback of | instructions per step in its framework | as a guest | ratio | cycles in its framework | as a guest | ratio |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in wanted or FRAMEWORKS:
        own, none, ten = counted(name, __file__, GUESTS, "--child", name)
        shown = [
            f"{in_framework / 10:,.0f} | {as_guest / 10:,.0f} | {as_guest / in_framework:.2f} x"
            for in_framework, as_guest in zip(own, ten.over(none), strict=True)
        ]
        print(f"| {name} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
