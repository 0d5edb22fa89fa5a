"""Tutorial, chapter 2: a callback that stops training on a plateau, and whose state survives a resume.

python examples/tutorial/plateau_stopper.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver


class PlateauStopper(Callback):
    """Stop when the validation loss has not improved in `patience` evaluations in a row."""

    phase = "decide"

    def __init__(self, *, patience: int = 3) -> None:
        self.patience = patience
        self.best = float("inf")
        self.waited = 0

    def on_run_start(self, ctx: Context) -> None:
        self.best, self.waited = float("inf"), 0

    def on_eval_all_end(self, ctx: Context) -> None:
        loss = ctx.eval_results["validation"]["loss"]
        if loss < self.best:
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        print(f"evaluation {loss:.4f}, best {self.best:.4f}, waited {self.waited}")
        if self.waited >= self.patience:
            ctx.control.stop(f"no improvement on {self.best:.4f} in {self.waited} evaluations", replicated=True)

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy points of a sine: with few of them, a model soon overfits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, generator=generator) * 6 - 3
    return x, torch.sin(x) + 0.3 * torch.randn(count, 1, generator=generator)


def train(folder: str, run_name: str, max_duration: str) -> None:
    """Train until `max_duration`, from the newest checkpoint of the run if there is one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    with Trainer(
        model,
        torch.nn.functional.mse_loss,
        [samples(12, seed=1)] * 50,
        [samples(64, seed=2)],
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        max_duration=max_duration,
        eval_interval="1ep",
        run_name=run_name,
        runs_folder=folder,
        resume="auto",
        progress=False,
        callbacks=[PlateauStopper(), CheckpointSaver(save_interval="1ep")],
    ) as trainer:
        trainer.fit()
    print(f"{run_name}: {trainer.run.outcome} after epoch {trainer.state.timestamp.epoch}, {trainer.run.outcome_reason}")


def main(folder: str | None = None) -> None:
    folder = folder or tempfile.mkdtemp()
    train(folder, "in-two-parts", "5ep")
    train(folder, "in-two-parts", "30ep")
    train(folder, "in-one-part", "30ep")


if __name__ == "__main__":
    main(*sys.argv[1:])
