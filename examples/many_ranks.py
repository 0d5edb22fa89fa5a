"""Training on several ranks of one machine, sharded, with checkpoints that are written while training goes on.

    torchrun --nproc_per_node 2 examples/many_ranks.py [FOLDER]

Run it again and it goes on from where it was; with another number of ranks too, from the end of an epoch.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Context, Trainer, rank_zero_only
from callsheet.callbacks import CheckpointSaver
from callsheet.trainer import Parallel


class Say(Callback):
    """The record, which is the same on all ranks, told by one of them."""

    @rank_zero_only
    def on_log(self, ctx: Context) -> None:
        values = ", ".join(f"{name} {value:.4f}" for name, value in ctx.record.values.items() if name.endswith("/loss"))
        print(f"step {ctx.record.step}: {values}", flush=True)


def main(folder: str) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(1000, 16)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(4)), torch.nn.Linear(16, 1)
    )
    with Trainer(
        model,
        torch.nn.functional.mse_loss,
        lambda: DataLoader(data, batch_size=16, shuffle=True),
        lambda: DataLoader(data, batch_size=64),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        max_duration="4ep",
        log_interval="1ep",
        parallel=Parallel("fsdp"),
        save_in_background=True,
        run_name="many-ranks",
        runs_folder=folder,
        resume="auto",
        seed=1,
        callbacks=[Say(), CheckpointSaver()],
    ) as trainer:
        trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
