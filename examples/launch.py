"""Training on two ranks of this machine, started from this script without torchrun. The callbacks are created here.

    python examples/launch.py [FOLDER]

The callbacks are sent to each rank with their arguments and their state. On Ctrl-C or SIGTERM all ranks save a checkpoint. Run the script
again to resume from it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Context, Trainer, launch, rank_zero_only
from callsheet.callbacks import CheckpointSaver
from callsheet.trainer import Parallel


class Milestones(Callback):
    """Print when the loss falls below each of some limits. The number of limits reached is saved in checkpoints."""

    phase = "report"

    def __init__(self, limits: list[float]) -> None:
        self.limits = limits
        self.reached = 0

    @rank_zero_only
    def on_log(self, ctx: Context) -> None:
        loss = ctx.record.values.get("train/loss", float("inf"))  # an evaluation's record has none
        while self.reached < len(self.limits) and loss < self.limits[self.reached]:
            print(f"step {ctx.record.step}: train/loss below {self.limits[self.reached]:g}", flush=True)
            self.reached += 1

    def state_dict(self) -> Mapping[str, Any]:
        return {"reached": self.reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reached = state["reached"]


def train(folder: str, epochs: int, callbacks: list[Callback]) -> dict[str, float]:
    """Train on one rank."""
    torch.manual_seed(0)
    inputs = torch.randn(1000, 16)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    with Trainer(
        model,
        torch.nn.functional.mse_loss,
        lambda: DataLoader(data, batch_size=16, shuffle=True),
        lambda: DataLoader(data, batch_size=64),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        max_duration=f"{epochs}ep",
        log_interval="10ba",
        parallel=Parallel("ddp"),
        run_name="launch",
        runs_folder=folder,
        resume="auto",
        seed=1,
        callbacks=callbacks,
    ) as trainer:
        trainer.fit()
        return dict(trainer.evaluate()["validation"])


def main(folder: str) -> None:
    milestones = Milestones([200.0, 50.0, 20.0, 5.0])
    results = launch(train, (folder, 8), callbacks=[milestones, CheckpointSaver()], nproc_per_node=2)
    for rank, losses in enumerate(results):
        print(f"rank {rank}: validation/loss {losses['loss']:.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
