"""Tutorial, chapter 5: two processes, of which one is killed. The launcher starts both again, and they resume from a checkpoint.

torchrun --nproc_per_node 2 --max-restarts 1 examples/tutorial/killed_and_resumed.py FOLDER [STEP_OF_THE_KILL]
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Context, Trainer, rank_zero_only
from callsheet.callbacks import CheckpointSaver


class Kill(Callback):
    """Kill this process at a step with SIGKILL, which no program can handle, but only before the first restart."""

    phase = "report"
    ranks = {1}

    def __init__(self, *, step: int) -> None:
        self.step = step

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.step and ctx.run.restart_count == 0:
            print(f"rank {ctx.run.rank}: killed at step {ctx.step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


class Progress(Callback):
    """Print where training starts, each checkpoint, and a digest of the weights at the end."""

    phase = "report"

    @rank_zero_only
    def on_train_start(self, ctx: Context) -> None:
        print(f"start {ctx.run.restart_count}: at step {ctx.step}", flush=True)

    @rank_zero_only
    def on_checkpoint_published(self, ctx: Context) -> None:
        print(f"checkpoint of step {ctx.checkpoint.step}", flush=True)

    @rank_zero_only
    def on_train_end(self, ctx: Context) -> None:
        digest = hashlib.sha256()
        for weights in ctx.model.state_dict().values():
            digest.update(weights.numpy().tobytes())
        print(f"step {ctx.step}: the digest of the weights is {digest.hexdigest()[:16]}", flush=True)


def main(folder: str, step_of_the_kill: int = 0) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(640, 8)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    with Trainer(
        model,
        torch.nn.functional.mse_loss,
        lambda: DataLoader(data, batch_size=8, shuffle=True),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        max_duration="40ba",
        parallel="ddp",
        run_name="two-processes",
        runs_folder=folder,
        resume="auto",
        seed=1,
        progress=False,
        callbacks=[CheckpointSaver(save_interval="10ba"), Kill(step=step_of_the_kill), Progress()],
    ) as trainer:
        trainer.fit()
    if trainer.run.rank == 0:
        print(f"{trainer.run.outcome}: {trainer.run.outcome_reason}")


if __name__ == "__main__":
    main(sys.argv[1], *(int(step) for step in sys.argv[2:]))
