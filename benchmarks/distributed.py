"""What the Trainer adds to bare DDP and FSDP2 loops on two gloo ranks, and what agreement and records cost a step of 1 ms.

Every loop runs the same forward, loss, backward, SGD step and zeroing of gradients, without gradient clipping. The steps that the
Trainer is compared in compute for about 20 ms. The steps of 1 ms sleep instead, so that two ranks on two cores do not disturb
each other.

    python benchmarks/distributed.py [--turns 8]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from callsheet import Trainer
from callsheet.core.control import Control
from callsheet.core.ranks import read_ranks
from callsheet.run.agreement import Agreement
from callsheet.run.metrics import MetricLog
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.signals import SignalWatch
from callsheet.testing import run_ranks
from callsheet.trainer.parallel import ParallelKind
from timing import machine

STEPS = 100
WIDTH, ROWS = 512, 640  # about 20 ms a step on one core
SHORT_STEPS = 1000

loss_function = nn.functional.mse_loss


def parts() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    return model, [batch] * STEPS


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def bare(kind: str) -> float:
    """Return the milliseconds per step of a hand-written loop."""
    model, batches = parts()
    module: nn.Module = model
    if kind == "ddp":
        module = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    model.train()
    distributed.barrier()
    began = time.perf_counter()
    for inputs, targets in batches:
        loss_function(module(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / STEPS * 1e3


def ours(kind: ParallelKind) -> float:
    """Return the milliseconds per step of the Trainer. It gets the batches of both ranks and distributes them."""
    model, batches = parts()
    with Trainer(
        model,
        loss_function,
        batches * 2,
        optimizer=make_optimizer,
        max_duration="1ep",
        device="cpu",
        parallel=kind,
        progress=False,
    ) as trainer:
        distributed.barrier()
        began = time.perf_counter()
        trainer.fit()
        return (time.perf_counter() - began) / STEPS * 1e3


def short(agreement: Agreement | None, metrics: MetricLog | None) -> float:
    """Return the microseconds of a step that sleeps 1 ms, with agreement on requests and a record every tenth step, if given."""
    loss = torch.ones(())
    distributed.barrier()
    began = time.perf_counter()
    for step in range(1, SHORT_STEPS + 1):
        time.sleep(0.001)
        if metrics is not None:
            metrics.log({"train/loss": loss, "train/grad_norm": loss}, over="mean")
            if step % 10 == 0:
                metrics.take()
        if agreement is not None and step >= agreement.next_step:
            agreement.look(step)
    took = (time.perf_counter() - began) / SHORT_STEPS * 1e6
    if agreement is not None:
        agreement.agree(SHORT_STEPS)
    return took


def on_each_rank(turns: int) -> dict[str, list[float]]:
    """Measure everything on this rank, and return the figures of each round."""
    distributed.init_process_group("gloo")
    groups = ProcessGroups(read_ranks(), torch.device("cpu"), 60)

    def new_agreement() -> Agreement:
        return Agreement(groups, Control(is_shared=True), SignalWatch(()))

    subjects: dict[str, Callable[[], float]] = {
        "ddp, bare": lambda: bare("ddp"),
        "ddp": lambda: ours("ddp"),
        "fsdp, bare": lambda: bare("fsdp"),
        "fsdp": lambda: ours("fsdp"),
        "short": lambda: short(None, None),
        "short, agreement": lambda: short(new_agreement(), None),
        "short, records": lambda: short(None, MetricLog(groups)),
    }
    figures: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(turns):
        # Every other round runs in the opposite order, because the loop after the sleeping steps is faster: the cores were idle.
        for name in list(subjects)[:: -1 if turn % 2 else 1]:
            figures[name].append(subjects[name]())
    groups.close()
    distributed.destroy_process_group()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    arguments = parser.parse_args()
    figures: dict[str, list[float]] = run_ranks(on_each_rank, 2, arguments.turns, timeout=3600)[0]
    middle = {name: statistics.median(several) for name, several in figures.items()}

    def more(name: str, floor: str) -> str:
        """Return the median of the differences per round in per cent, and their quartiles in brackets."""
        differences = [a / b - 1 for a, b in zip(figures[name], figures[floor], strict=True)]
        low, median, high = statistics.quantiles(differences, n=4)
        return f"{median:+.1%} ({low:+.1%} to {high:+.1%})".replace("%", " %")

    print(
        f"{machine()}; two gloo ranks, one thread each; medians over {arguments.turns} rounds of {STEPS} steps, and in brackets the 25th and 75th percentiles\n"
    )
    print("| loop | bare loop, ms per step | Trainer, ms per step | difference |\n| --- | --- | --- | --- |")
    for kind in ("ddp", "fsdp"):
        print(f"| {kind} | {middle[f'{kind}, bare']:.1f} | {middle[kind]:.1f} | {more(kind, f'{kind}, bare')} |")
    print("\n| in a step that sleeps 1 ms | µs per step | difference |\n| --- | --- | --- |")
    print(f"| nothing | {middle['short']:.0f} | |")
    for name, label in (("agreement", "agreement"), ("records", "two metrics, a record every tenth step")):
        print(f"| {label} | {middle[f'short, {name}']:.0f} | {more(f'short, {name}', 'short')} |")


if __name__ == "__main__":
    main()
