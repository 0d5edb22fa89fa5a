"""What `import callsheet` costs over a bare Python, in processes of their own.

python benchmarks/imports.py [--turns 20]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from timing import Turn, difference, in_turns, machine


def process(code: str) -> Turn:
    def turn() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return (time.perf_counter() - began) * 1e3

    return turn


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


if __name__ == "__main__":
    main()
