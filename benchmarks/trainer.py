"""What the Trainer adds to a step of a bare PyTorch loop, compared with what Ignite adds, in one run.

The step is that of a small MLP and takes about 250 to 350 µs on one core. Every loop runs the same forward, loss, backward, SGD
step and zeroing of gradients. With `--device cuda` the batches are on the device from the start, a turn is timed until the device
has finished, and a further run of each loop counts its device synchronizations. Loops of packages that are not installed are left
out.

    python benchmarks/trainer.py [--turns 30] [--device cuda] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import pstats
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from callsheet import Callback, Context, Trainer
from devices import Section, add_device, check_device
from timing import difference, in_turns, machine

STEPS = 500
loss_function = nn.functional.cross_entropy


def parts(device: str = "cpu") -> tuple[nn.Module, list[tuple[Tensor, Tensor]], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    batches = [(torch.randn(64, 64).to(device), torch.randint(0, 10, (64,)).to(device)) for _ in range(STEPS)]
    return model, batches, torch.optim.SGD(model.parameters(), lr=0.01)


def per_step(section: Section, counts: bool) -> float:
    """Return the section's microseconds per step, or its synchronizations per step."""
    return section.figure / STEPS * (1 if counts else 1e6)


def bare(device: str = "cpu", *, counts: bool = False) -> float:
    model, batches, optimizer = parts(device)
    model.train()
    with Section(device, counts=counts) as section:
        for inputs, targets in batches:
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return per_step(section, counts)


class TwoHooks(Callback):
    def on_train_step_start(self, ctx: Context) -> None:
        pass

    def on_train_step_end(self, ctx: Context) -> None:
        pass


def trainer(callbacks: int, device: str = "cpu") -> Trainer:
    model, batches, optimizer = parts(device)
    hooks = [TwoHooks() for _ in range(callbacks)]
    return Trainer(
        model, loss_function, batches, optimizer=optimizer, max_duration="1ep", device=device, callbacks=hooks, progress=False
    )


def ours(callbacks: int, device: str = "cpu", *, counts: bool = False) -> float:
    with trainer(callbacks, device) as made, Section(device, counts=counts) as section:
        made.fit()
    return per_step(section, counts)


def ignite(callbacks: int, device: str = "cpu", *, counts: bool = False) -> float:
    from ignite.engine import Engine, Events

    model, batches, optimizer = parts(device)
    model.train()

    def step(engine: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_function(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    engine = Engine(step)
    for _ in range(callbacks):
        engine.add_event_handler(Events.ITERATION_STARTED, lambda engine: None)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: None)
    with Section(device, counts=counts) as section:
        engine.run(batches, max_epochs=1)
    return per_step(section, counts)


def show_profile() -> None:
    """Profile a fit without callbacks, and print the calls and microseconds per step of each function of callsheet."""
    made = trainer(0)
    with cProfile.Profile() as profile:
        made.fit()
    made.close()
    rows = []
    for (file, _, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]  # not in its types
        if "callsheet" in Path(file).parts and own / STEPS * 1e6 >= 0.1:
            place = "/".join(Path(file).parts[Path(file).parts.index("callsheet") + 1 :])
            rows.append((own / STEPS * 1e6, calls / STEPS, f"{place}: {name}"))
    print(f"{machine()}; in each step, functions of callsheet are called {sum(calls for _, calls, _ in rows):.0f} times\n")
    print("| µs per step, without callees | calls per step | function |\n| --- | --- | --- |")
    for own, calls, function in sorted(rows, reverse=True):
        print(f"| {own:.2f} | {calls:.1f} | `{function}` |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="print the time of a fit by function instead")
    add_device(parser)
    arguments = parser.parse_args()
    device = arguments.device
    check_device(device)
    torch.set_num_threads(1)
    if arguments.profile:
        show_profile()
        return
    loops: dict[str, Callable[..., float]] = {
        "bare": partial(bare, device),
        "callsheet": partial(ours, 0, device),
        "callsheet, ten callbacks": partial(ours, 10, device),
    }
    if importlib.util.find_spec("ignite") is not None:
        loops |= {"ignite": partial(ignite, 0, device), "ignite, ten callbacks": partial(ignite, 10, device)}
    else:
        print("Ignite is not installed and is left out", file=sys.stderr)
    figures = in_turns(loops, arguments.turns)
    print(f"{machine(device)}; medians over {arguments.turns} rounds of {STEPS} steps, one thread\n")
    print("| loop | µs per step more than the bare loop |\n| --- | --- |")
    for name in loops:
        if name != "bare":
            print(f"| {name} | {difference(figures, name, 'bare'):.1f} |")
    print(f"| (the bare loop) | {sorted(figures['bare'])[arguments.turns // 2]:.0f} |")
    if device == "cuda":
        print("\n| loop | device synchronizations per step |\n| --- | --- |")
        for name, loop in loops.items():
            print(f"| {name} | {loop(counts=True):.3f} |")


if __name__ == "__main__":
    main()
