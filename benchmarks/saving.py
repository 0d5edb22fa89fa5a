"""How long an asynchronous checkpoint blocks the training thread, beside one copy of the state in memory; and steps meanwhile.

python benchmarks/saving.py [--turns 7] [--megabytes 400]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from callsheet.checkpoint import AsyncWriter, write_checkpoint
from timing import machine

TENSORS = 48


def state(megabytes: int) -> dict[str, Tensor]:
    return {f"weight.{i}": torch.randn(megabytes * 2**20 // 4 // TENSORS) for i in range(TENSORS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=400)
    arguments = parser.parse_args()
    tensors = state(arguments.megabytes)
    buffers = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    copies, blocked, in_line, durable = [], [], [], []
    writer = AsyncWriter()
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.turns + 1):  # the first one allocates the buffers
            began = time.perf_counter()
            for name, tensor in tensors.items():
                buffers[name].copy_(tensor)
            copies.append(time.perf_counter() - began)
            began = time.perf_counter()
            writer.begin(Path(folder) / "behind", tensors, {}, {"step": turn}, overwrite=True)
            blocked.append(time.perf_counter() - began)
            writer.result()
            durable.append(time.perf_counter() - began)
            began = time.perf_counter()
            write_checkpoint(Path(folder) / "line", tensors, {}, {"step": turn}, overwrite=True)
            in_line.append(time.perf_counter() - began)
        writer.close()
    ratios = [a / b for a, b in zip(blocked[1:], copies[1:], strict=True)]
    print(f"{machine()}; {arguments.megabytes} MB in {TENSORS} tensors; medians over {arguments.turns} turns\n")
    print("| what | ms |\n| --- | --- |")
    for name, several in (
        ("one copy of the state into buffers that are there", copies[1:]),
        ("blocked by a save in the background", blocked[1:]),
        ("until that is sealed on disk", durable[1:]),
        ("blocked by a save in line, synced", in_line[1:]),
        ("blocked by the first save in the background, which makes the buffers", blocked[:1]),
    ):
        print(f"| {name} | {statistics.median(several) * 1e3:.0f} |")
    print(f"\nBlocked, over one copy: {statistics.median(ratios):.2f}.")


if __name__ == "__main__":
    main()
