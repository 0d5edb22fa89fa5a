"""What `import callsheet` adds to the start of Python, compared with the standard modules that it needs.

Each import runs in its own process. The ratio is one of processor times, of the fastest of all turns. The first process writes
the bytecode. `import callsheet` loads what a file of callbacks needs. The second ratio includes what a loop also needs: the
callback manager and the state of a run.

    python benchmarks/imports.py [--turns 20]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from functools import partial

from timing import Turn, difference, fastest, in_turns, machine


def process(code: str) -> Turn:
    """Return a turn that measures the milliseconds of a process with this code."""

    def turn() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return (time.perf_counter() - began) * 1e3

    return turn


STANDARD = "import logging, dataclasses, inspect, typing, random, pathlib"
CALLSHEET = "import callsheet"
MANAGER = "from callsheet import CallbackManager, TrainState"


def processor_time(code: str) -> float:
    """Return the seconds of processor time that a process with this code takes."""
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""})
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    turns = parser.parse_args().turns
    figures = in_turns(
        {"bare": process("pass"), "callsheet": process("import callsheet, sys; assert 'torch' not in sys.modules")}, turns
    )
    print(f"{machine()}; median over {turns} pairs of processes\n")
    print("| | figure | target |\n| --- | --- | --- |")
    print(
        f"| `import callsheet`, minus starting Python; without torch | {difference(figures, 'callsheet', 'bare'):.0f} ms | 50 ms |"
    )

    times = in_turns({code: partial(processor_time, code) for code in ("pass", STANDARD, CALLSHEET, MANAGER)}, turns)
    added = {code: fastest(times, code) - fastest(times, "pass") for code in times}
    print(f"| `{CALLSHEET}` over `{STANDARD}` | {added[CALLSHEET] / added[STANDARD]:.2f} x | 1.5 x |")
    print(f"| `{MANAGER}` over the same | {added[MANAGER] / added[STANDARD]:.2f} x | |")


if __name__ == "__main__":
    main()
