"""Fine-tuning with your own callbacks, on the sums in `arithmetic/`.

    python examples/finetune_with_callback.py [FOLDER]
    torchrun --nproc_per_node 8 examples/finetune_with_callback.py [FOLDER]

Two classes and a function in one manager: one writes log lines with a prefix, one collects metrics for a JSON report, and one prints the
largest gradient every few steps. None of them depends on fine-tuning: they work with any recipe and any Trainer.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from callsheet import Callback, CallbackManager, Context, rank_zero_only
from callsheet.callbacks import CheckpointSaver
from callsheet.recipes import FinetuneConfig, LanguageModel, Rows, finetune

ROWS = Path(__file__).resolve().parent / "arithmetic"

logger = logging.getLogger("finetune")


class PrefixedLog(Callback):
    """Log the progress of the run, each line with a prefix. The Trainer keeps the log of ranks above 0 quiet, so no rank gate is needed."""

    phase = "report"

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def on_train_start(self, ctx: Context) -> None:
        self.began = time.monotonic()
        self._say("training %s for %s (ranks: %d)", ctx.run.name, ctx.state.max_duration, ctx.run.world_size)

    def on_log(self, ctx: Context) -> None:
        if "train/loss" in ctx.record.values:
            self._say("step %d: loss %.4f", ctx.record.step, ctx.record.values["train/loss"])

    def on_eval_all_end(self, ctx: Context) -> None:
        for name, result in ctx.eval_results.items():
            self._say("step %d: %s loss %.4f", ctx.step, name, result["loss"])

    def on_checkpoint_published(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        self._say("step %d: saved %s (%s)", ctx.checkpoint.step, ctx.checkpoint.path, ctx.checkpoint.kind)

    def on_exception(self, ctx: Context) -> None:
        self._say("step %d: failed in %s: %r", ctx.step, ctx.span, ctx.exception)

    def on_train_end(self, ctx: Context) -> None:
        self._say("trained for %.1f seconds", time.monotonic() - self.began)

    def _say(self, message: str, *facts: object) -> None:
        logger.info(f"[{self.prefix}] {message}", *facts)


class MetricsCollector(Callback):
    """Collect records, evaluations and checkpoints, and write them to one JSON file when the run ends, even if it fails.

    All ranks collect, because a record is the same on all ranks; only the first rank writes the file. The collected values are this
    callback's state, so a resumed run continues with them.
    """

    phase = "report"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.collected: dict[str, list[dict[str, Any]]] = {"records": [], "evaluations": [], "checkpoints": []}

    def on_log(self, ctx: Context) -> None:
        self.collected["records"].append({"step": ctx.record.step, "epoch": ctx.epoch, **ctx.record.values})

    def on_eval_all_end(self, ctx: Context) -> None:
        losses = {name: result["loss"] for name, result in ctx.eval_results.items()}
        self.collected["evaluations"].append({"step": ctx.step, **losses})

    def on_checkpoint_published(self, ctx: Context) -> None:
        assert ctx.checkpoint is not None
        info = ctx.checkpoint
        self.collected["checkpoints"].append(
            {"step": info.step, "path": info.path, "best": info.best_metric_key, **info.val_losses}
        )

    @rank_zero_only
    def on_run_end(self, ctx: Context) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"run": ctx.run.name, "outcome": ctx.run.outcome, **self.collected}, indent=1))

    def state_dict(self) -> Mapping[str, Any]:
        return self.collected

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.collected = {name: list(state[name]) for name in self.collected}


@rank_zero_only
def look_at_gradients(ctx: Context) -> None:
    """Print the parameter with the largest gradient. Gradients are still available at the end of a step.

    (This does not work for sharded models, whose norms need all ranks. `OptimizerMonitor` supports them.)
    """
    norms = {name: weight.grad.norm() for name, weight in ctx.model.named_parameters() if weight.grad is not None}
    name = max(norms, key=lambda name: norms[name].item())
    print(f"step {ctx.step}: the largest gradient is that of {name}, {norms[name].item():.3g}", flush=True)


def main(folder: str = "runs") -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = FinetuneConfig(
        run_name="finetune",
        runs_folder=folder,
        max_duration="40ba",
        eval_interval="20ba",
        log_interval=10,
        batch_size=8,
        sequence_length=64,
        train=Rows(str(ROWS / "train.jsonl")),
        validation={name: Rows(str(ROWS / f"{name}.jsonl")) for name in ("addition", "subtraction")},
        model=LanguageModel(hidden_size=32, layers=1, heads=2, intermediate_size=64),  # path="..." loads a pretrained model
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        evaluate_first=False,
        samples=0,
        threads=1,
    )
    manager = CallbackManager()
    manager.add(PrefixedLog("arithmetic"))
    manager.add(
        [MetricsCollector(Path(folder) / "finetune-metrics.json"), CheckpointSaver(save_interval="20ba", monitor="addition/loss")]
    )
    manager.register("on_train_step_end", look_at_gradients, every="20ba")
    recipe = finetune(config, callbacks=manager)
    if recipe.ranks.rank == 0:
        print(recipe.report())


if __name__ == "__main__":
    main(*sys.argv[1:])
