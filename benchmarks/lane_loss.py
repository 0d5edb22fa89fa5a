"""What a callback in a lane that reads the loss costs the training thread per event, in a run of the Trainer.

The manager measures the time to enqueue each event (`CallbackManager(costs="all")`). The same run measures, for comparison, a
callback in a lane that reads only plain fields, one that reads tensors that the snapshot has to copy (`loss_dict`), and a
callback that only clones the loss.

    python benchmarks/lane_loss.py [--steps 4000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch

from callsheet import Background, Callback, CallbackManager, Context, Trainer
from timing import machine


class Plain(Callback):
    snapshot_fields: tuple[str, ...] = ("learning_rate", "step_skipped")

    def on_train_step_end(self, ctx: Context) -> None: ...


class Loss(Plain):
    snapshot_fields = ("loss",)


class LossDict(Plain):
    snapshot_fields = ("loss_dict",)


class Clone(Callback):
    def on_train_step_end(self, ctx: Context) -> None:
        ctx.loss.detach().clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    lanes: list[Callback] = [Background(each, overflow="drop_oldest") for each in (Plain(), Loss(), LossDict())]
    manager = CallbackManager([*lanes, Clone()], costs="all", warn_share=None)
    data = [(torch.randn(8, 64), torch.randn(8, 1))] * 100
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        "max_duration": f"{steps}ba",
    }
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(
            torch.nn.Linear(64, 1),
            torch.nn.functional.mse_loss,
            train_dataloader=data,
            callbacks=manager,
            runs_folder=folder,
            **arguments,
        ) as trainer,
    ):
        trainer.fit()
        costs = {
            cost.callback: cost.seconds / cost.calls * 1e6
            for cost in manager.cost_report(steps).costs
            if cost.event == "on_train_step_end"
        }
    print(f"{machine()}; one thread, {steps:,} steps of {(time.perf_counter() - began) / steps * 1e6:.0f} µs\n")
    print("| on the training thread, per event | µs | relative to a clone |\n| --- | --- | --- |")
    for name, label in (
        ("Plain", "plain fields"),
        ("Loss", "the loss"),
        ("LossDict", "the losses, which are copied"),
        ("Clone", "only a clone of the loss, inline"),
    ):
        print(f"| {label} | {costs[name]:.1f} | {costs[name] / costs['Clone']:.2f} |")


if __name__ == "__main__":
    main()
