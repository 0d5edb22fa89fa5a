"""What the Trainer adds to a bare PyTorch loop, beside what Ignite adds, in one run.

The step is a small MLP's, about 250 to 350 µs on one core; every loop does the same forward, loss, backward, SGD step and zeroing.

    python benchmarks/trainer.py [--turns 30] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from callsheet import Callback, Context, Trainer
from timing import difference, in_turns, machine

STEPS = 500
loss_function = nn.functional.cross_entropy


def parts() -> tuple[nn.Module, list[tuple[Tensor, Tensor]], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    batches = [(torch.randn(64, 64), torch.randint(0, 10, (64,))) for _ in range(STEPS)]
    return model, batches, torch.optim.SGD(model.parameters(), lr=0.01)


def per_step(began: float) -> float:
    """Microseconds a step since `began`."""
    return (time.perf_counter() - began) / STEPS * 1e6


def bare() -> float:
    model, batches, optimizer = parts()
    model.train()
    began = time.perf_counter()
    for inputs, targets in batches:
        loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return per_step(began)


class TwoHooks(Callback):
    def on_train_step_start(self, ctx: Context) -> None:
        pass

    def on_train_step_end(self, ctx: Context) -> None:
        pass


def trainer(callbacks: int) -> Trainer:
    model, batches, optimizer = parts()
    hooks = [TwoHooks() for _ in range(callbacks)]
    return Trainer(
        model, loss_function, batches, optimizer=optimizer, max_duration="1ep", device="cpu", callbacks=hooks, progress=False
    )


def ours(callbacks: int) -> float:
    with trainer(callbacks) as made:
        began = time.perf_counter()
        made.fit()
        return per_step(began)


def ignite(callbacks: int) -> float:
    from ignite.engine import Engine, Events

    model, batches, optimizer = parts()
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
    began = time.perf_counter()
    engine.run(batches, max_epochs=1)
    return per_step(began)


def show_profile() -> None:
    """Where a fit without callbacks spends its time, function by function: calls a step, and microseconds a step under the profiler."""
    made = trainer(0)
    with cProfile.Profile() as profile:
        made.fit()
    made.close()
    rows = []
    for (file, _, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]  # not in its types
        if "callsheet" in Path(file).parts and own / STEPS * 1e6 >= 0.1:
            place = "/".join(Path(file).parts[Path(file).parts.index("callsheet") + 1 :])
            rows.append((own / STEPS * 1e6, calls / STEPS, f"{place}: {name}"))
    print(f"{machine()}; {sum(calls for _, calls, _ in rows):.0f} calls a step of callsheet's own functions\n")
    print("| µs a step, its own | calls a step | function |\n| --- | --- | --- |")
    for own, calls, function in sorted(rows, reverse=True):
        print(f"| {own:.2f} | {calls:.1f} | `{function}` |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="where the time of a fit goes, by function")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.profile:
        show_profile()
        return
    loops = {
        "bare": bare,
        "callsheet": lambda: ours(0),
        "callsheet, ten callbacks": lambda: ours(10),
        "ignite": lambda: ignite(0),
        "ignite, ten callbacks": lambda: ignite(10),
    }
    figures = in_turns(loops, arguments.turns)
    print(f"{machine()}; medians over {arguments.turns} turns of {STEPS} steps, one thread\n")
    print("| loop | µs a step over the bare loop |\n| --- | --- |")
    for name in loops:
        if name != "bare":
            print(f"| {name} | {difference(figures, name, 'bare'):.1f} |")
    print(f"| (the bare loop itself) | {sorted(figures['bare'])[arguments.turns // 2]:.0f} |")


if __name__ == "__main__":
    main()
