"""Pretraining a decoder with the Trainer and with a bare loop, in one run: tokens per second and MFU.

The decoder is plain torch, in bf16 autocast, with AdamW. MFU is what `SpeedMonitor` logs: the FLOPs of forward and backward
divided by the peak of the device according to its vendor. On the CPU there is no MFU, because its peak is not known. The two
loops take turns; the first turn of each is left out.

    python benchmarks/pretraining.py [--device cuda] [--turns 5] [--steps 100]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from callsheet import Callback, Trainer
from callsheet.callbacks import History, SpeedMonitor
from decoder import SHAPES, Decoder, RandomTokens, next_token_loss
from devices import Section, add_device, check_device
from timing import in_turns, machine

adamw = partial(torch.optim.AdamW, lr=1e-4)


def bare(device: str, steps: int, *, counts: bool = False) -> float:
    """Return the seconds of the bare loop or, with `counts`, its device synchronizations."""
    torch.manual_seed(0)
    shape = SHAPES[device]
    model, batches = Decoder(shape).to(device), RandomTokens(shape, steps, device)
    optimizer = adamw(model.parameters())
    with Section(device, counts=counts) as section:
        for inputs, targets in batches:
            with torch.autocast(device, torch.bfloat16):
                loss = next_token_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return section.figure


def ours(device: str, steps: int, folder: Path, monitors: Sequence[Callback] = (), *, counts: bool = False) -> float:
    """Return the seconds of the Trainer's `fit` or, with `counts`, its device synchronizations."""
    torch.manual_seed(0)
    shape = SHAPES[device]
    with Trainer(
        Decoder(shape),
        next_token_loss,
        RandomTokens(shape, steps, device),
        optimizer=adamw,
        max_duration="1ep",
        precision="bf16",
        device=device,
        progress=False,
        callbacks=monitors,
        runs_folder=folder,
        run_name=f"run-{time.monotonic_ns()}",
    ) as trainer:
        with Section(device, counts=counts) as section:
            trainer.fit()
    return section.figure


def mfu(device: str, steps: int, folder: Path) -> float | None:
    """Return the MFU in the last record of a run with `SpeedMonitor`, or None if the device's peak is unknown."""
    history = History()
    ours(device, steps, folder, [SpeedMonitor(), history])
    return history.records[-1][1].get("throughput/device/mfu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="the number of steps of each turn")
    arguments = parser.parse_args()
    check_device(arguments.device)
    device, steps, shape = arguments.device, arguments.steps, SHAPES[arguments.device]
    if device == "cpu":
        torch.set_num_threads(1)
    logging.getLogger("callsheet").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        loops: dict[str, Callable[..., float]] = {
            "the bare loop": partial(bare, device, steps),
            "callsheet": partial(ours, device, steps, folder),
        }
        in_turns(loops, 1)
        figures = in_turns(loops, arguments.turns)
        utilization = mfu(device, steps, folder)
        waits = {name: f"{loop(counts=True) / steps:.2f}" for name, loop in loops.items()} if device == "cuda" else {}
    print(f"{machine(device)}; medians over {arguments.turns} rounds of {steps} steps, bf16; {shape}\n")
    print("| loop | ms per step | tokens per second | device synchronizations per step |\n| --- | --- | --- | --- |")
    for name, found_seconds in figures.items():
        seconds = statistics.median(found_seconds)
        rate = steps * shape.sequences * shape.tokens / seconds
        print(f"| {name} | {seconds / steps * 1e3:.2f} | {rate:,.0f} | {waits.get(name, '')} |")
    print(f"\nMFU by `SpeedMonitor`: {'the peak of this device is not known' if utilization is None else f'{utilization:.1%}'}")


if __name__ == "__main__":
    main()
