"""Reduce the learning rate when the validation loss stops improving.

python examples/plateau.py [FOLDER]
torchrun --nproc_per_node 2 examples/plateau.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from callsheet import Callback, Context, rank_zero_only
from callsheet.callbacks import LRMonitor
from callsheet.recipes import ByteFiles, LanguageModel, PretrainConfig, pretrain


class ReduceOnPlateau(Callback):
    """Multiply the learning rate by `factor` when the metric has not fallen by `min_delta` in `patience` evaluations in a row.

    Results of evaluations are the same on all ranks, so all ranks make the same decision. Do not combine it with a scheduler, which would
    overwrite the rate at the next step.
    """

    phase = "change"

    def __init__(
        self, *, monitor: str = "validation/loss", factor: float = 0.3, patience: int = 1, min_delta: float = 0.0
    ) -> None:
        self.dataset, _, self.metric = monitor.partition("/")
        self.factor = factor
        self.patience = patience
        self.min_delta = min_delta
        self.best = float("inf")
        self.waited = 0

    def on_eval_all_end(self, ctx: Context) -> None:
        if ctx.standalone or self.dataset not in ctx.eval_results:  # a standalone evaluation, or the dataset was not due
            return
        value = ctx.eval_results[self.dataset][self.metric]
        if value < self.best - self.min_delta:
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.waited < self.patience:
            return
        self.waited = 0
        for group in ctx.optimizer.param_groups:
            group["lr"] *= self.factor
        self.print_rate(ctx, value)

    @rank_zero_only
    def print_rate(self, ctx: Context, value: float) -> None:
        rate = ctx.optimizer.param_groups[0]["lr"]
        print(f"step {ctx.step}: {self.metric} {value:.3f}, the best is {self.best:.3f}: learning rate {rate:.2g}", flush=True)

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


def main(folder: str = "runs") -> None:
    config = PretrainConfig(
        run_name="plateau",
        runs_folder=folder,
        max_duration="100ba",
        eval_interval="10ba",
        log_interval=10,
        batch_size=8,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),  # too high
        model=LanguageModel(hidden_size=32, layers=1, heads=2, intermediate_size=64),
        data=ByteFiles(sequence_length=64, validation_windows=32),
        prompts=[],
        threads=1,
    )
    recipe = pretrain(config, callbacks=[ReduceOnPlateau(), LRMonitor()])
    if recipe.ranks.rank == 0:
        print(f"validation/loss {recipe.results['validation/loss']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
