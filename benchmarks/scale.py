"""What callsheet costs per step on rank 0 with 2 to 4,096 ranks.

A fake process group answers at once, so only callsheet's own work is measured. The model is sharded by FSDP2, whose own work
grows with the number of ranks, so the time of a bare loop over the same model is subtracted.

    python benchmarks/scale.py [--turns 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import tracemalloc

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from callsheet import Trainer
from timing import machine

STEPS = 400
SIZES = (2, 64, 4096)


def one(size: int) -> None:
    """Measure with this number of ranks, in a process that does nothing else, and print three figures.

    They are the microseconds per step more than the bare loop, the bytes that 400 further steps leave allocated, and their peak.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    torch.set_num_threads(1)
    batch = torch.randn(8, 16), torch.randn(8, 4)
    data: list[tuple[Tensor, Tensor]] = [batch] * STEPS
    model = nn.Linear(16, 4)
    bare_step = bare(batch, size)
    with Trainer(
        model,
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        max_duration="1ep",
        device="cpu",
        progress=False,
        parallel="fsdp",
        shard_data=False,
    ) as trainer:
        trainer.fit()
        began = time.perf_counter()
        trainer.fit("2ep")
        took = (time.perf_counter() - began) / STEPS * 1e6
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        trainer.fit("3ep")
        print(took - bare_step, tracemalloc.get_traced_memory()[0] - before, tracemalloc.get_traced_memory()[1] - before)


def bare(batch: tuple[Tensor, Tensor], size: int) -> float:
    """Return the microseconds per step of a hand-written loop."""
    model = nn.Linear(16, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):  # the first pass is a warm-up
        began = time.perf_counter()
        for _step in range(STEPS):
            nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return (time.perf_counter() - began) / STEPS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--one", type=int, help="measure once with this number of ranks")
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one)
        return
    found: dict[int, list[list[float]]] = {size: [] for size in SIZES}
    for _ in range(arguments.turns):
        for size in SIZES:
            ran = subprocess.run([sys.executable, __file__, "--one", str(size)], stdout=subprocess.PIPE, text=True, check=True)
            found[size].append([float(number) for number in ran.stdout.split()])
    print(
        f"{machine()}; a fake process group, FSDP2 over a tiny model; medians over {arguments.turns} processes of {STEPS} steps\n"
    )
    print("| ranks | µs per step more than the bare loop | kB left after 400 steps | peak kB |\n| --- | --- | --- | --- |")
    for size, several in found.items():
        took, left, most = (statistics.median(column) for column in zip(*several, strict=True))
        print(f"| {size} | {took:.0f} | {left / 1e3:.0f} | {most / 1e3:.0f} |")


if __name__ == "__main__":
    main()
