"""What `import callsheet` costs over a bare Python, beside the standard modules that it needs, in processes of their own.

The ratio is of processor time, the least of all turns: bytecode is written before the first.

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
    def turn() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return (time.perf_counter() - began) * 1e3

    return turn


STANDARD = "import logging, dataclasses, inspect, typing, random, pathlib"


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
    print("| | figure | promise |\n| --- | --- | --- |")
    print(f"| `import callsheet` over bare Python, without torch | {difference(figures, 'callsheet', 'bare'):.0f} ms | 50 ms |")

    codes = {"bare": "pass", "standard": STANDARD, "callsheet": "import callsheet"}
    times = in_turns({name: partial(processor_time, code) for name, code in codes.items()}, turns)
    over = {name: least(times, name) - least(times, "bare") for name in codes}
    print(f"| `import callsheet` over `{STANDARD}` | {over['callsheet'] / over['standard']:.2f} x | |")


if __name__ == "__main__":
    main()
