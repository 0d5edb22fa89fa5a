"""An exponential moving average of the weights: the built-in callback, and a handwritten one.

    python examples/moving_average.py [FOLDER]
    torchrun --nproc_per_node 2 examples/moving_average.py [FOLDER]

Both evaluate the average, with the same results. The built-in callback also saves the average in checkpoints, resumes exactly, leaves it in
the model for the export, averages buffers and shards, and keeps the average of half-precision weights in float32. The handwritten callback
shows how little code the idea needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from callsheet import Callback, Context, at
from callsheet.callbacks import EMA
from callsheet.recipes import ByteFiles, LanguageModel, PretrainConfig, pretrain


class HandwrittenEMA(Callback):
    """Evaluate with an average of the weights, `average += (1 - decay) * (weights - average)` after each step."""

    phase = "change"  # before all callbacks that read the model

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def on_train_start(self, ctx: Context) -> None:
        self.average = [weight.detach().clone() for weight in ctx.model.parameters()]

    @torch.no_grad()
    def on_train_step_end(self, ctx: Context) -> None:
        torch._foreach_lerp_(self.average, list(ctx.model.parameters()), 1 - self.decay)

    def on_eval_all_start(self, ctx: Context) -> None:
        self.swap(ctx)

    @at("restore")  # after all callbacks that read the model
    def on_eval_all_end(self, ctx: Context) -> None:
        self.swap(ctx)

    on_test_start, on_test_end = on_eval_all_start, on_eval_all_end

    @torch.no_grad()
    def swap(self, ctx: Context) -> None:
        for average, weight in zip(self.average, ctx.model.parameters(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def main(folder: str = "runs") -> None:
    averages: dict[str, list[Callback]] = {
        "no average": [],
        "built-in": [EMA(decay=0.9)],
        "by hand": [HandwrittenEMA(decay=0.9)],
    }
    for name, callbacks in averages.items():
        config = PretrainConfig(
            run_name=name.replace(" ", "-"),
            runs_folder=str(Path(folder) / "moving-average"),
            max_duration="60ba",
            eval_interval="30ba",
            batch_size=8,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.03),  # high, so that the weights oscillate
            model=LanguageModel(hidden_size=32, layers=1, heads=2, intermediate_size=64),
            data=ByteFiles(sequence_length=64, validation_windows=32),
            prompts=[],
            threads=1,
        )
        recipe = pretrain(config, callbacks=callbacks)
        if recipe.ranks.rank == 0:
            results = recipe.results
            print(
                f"{name:<10}  validation/loss {results['validation/loss']:.4f}  test/loss {results['test/loss']:.4f}", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
