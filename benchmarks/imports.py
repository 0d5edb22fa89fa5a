"""What `import callsheet` costs over a bare Python, and beside the standard modules that it needs, each in a process of its own.

The ratio is of processor time, of the fastest of all turns. Bytecode is written before the first turn. `import callsheet` loads what a file
of callbacks needs. The second ratio includes what a loop needs besides: the callback manager and the state of a run.

    python benchmarks/imports.py [--turns 20]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from functools import partial

from timing import Turn, difference, in_turns, least, machine


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
    over = {code: least(times, code) - least(times, "pass") for code in times}
    print(f"| `{CALLSHEET}` over `{STANDARD}` | {over[CALLSHEET] / over[STANDARD]:.2f} x | 1.5 x |")
    print(f"| `{MANAGER}` over the same | {over[MANAGER] / over[STANDARD]:.2f} x | |")


if __name__ == "__main__":
    main()
