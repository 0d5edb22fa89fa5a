"""Sharded training on several ranks of one machine, with checkpoints that are written in the background.

    torchrun --nproc_per_node 2 examples/many_ranks.py [FOLDER]

Run it again to resume. After a complete epoch it also resumes with another number of ranks.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Context, Trainer, rank_zero_only
from callsheet.callbacks import CheckpointSaver
from callsheet.trainer import Parallel


class PrintLosses(Callback):
    """Print the losses of each record, on one rank: a record is the same on all ranks."""

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
        callbacks=[PrintLosses(), CheckpointSaver()],
    ) as trainer:
        trainer.fit()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
