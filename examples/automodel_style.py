"""A script in the style of NeMo AutoModel, trained on the sums in `arithmetic/`. Only the import lines differ from AutoModel's.

    python examples/automodel_style.py [FOLDER]
    torchrun --nproc_per_node 2 examples/automodel_style.py [FOLDER]

It has two callbacks with AutoModel's hooks, one of which runs only on the first rank, and a configuration with AutoModel's keys. NeMo
AutoModel need not be installed. The section `callsheet` has fields of callsheet's recipe for which AutoModel has no key.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from callsheet.compat.automodel import (  # nemo_automodel.components.callbacks, nemo_automodel.recipes.llm.train_ft
    Callback,
    TrainFinetuneRecipeForNextTokenPrediction,
    rank_zero_only,
)

ROWS = Path(__file__).resolve().parent / "arithmetic"

logger = logging.getLogger("finetune")


class Log(Callback):
    """Log the progress of training. callsheet keeps the log of ranks above 0 quiet."""

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        logger.info("training for %d steps (ranks: %d)", recipe.step_scheduler.max_steps, recipe.dist_env.world_size)

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        if recipe.step_scheduler.step % 5 == 0:
            metrics = kwargs["train_log_data"].metrics
            logger.info("step %d: loss %.4f, lr %.2e", recipe.step_scheduler.step, metrics["loss"], metrics["lr"])

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        logger.info("saved %s", kwargs["checkpoint_info"]["checkpoint_path"])

    def on_exception(self, recipe: Any, **kwargs: Any) -> None:
        logger.error("failed: %r", kwargs["exception"])


class Post(Callback):
    """Collect on the first rank the results that a real callback would post to a service."""

    def __init__(self) -> None:
        self.posted: list[str] = []

    @rank_zero_only
    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        results = {name: sample.to_dict() for name, sample in kwargs["val_results"].items()}
        self.posted.append(json.dumps(results))


def main(folder: str = "runs") -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cfg = {
        "step_scheduler": {
            "global_batch_size": 16,
            "local_batch_size": 8,
            "max_steps": 20,
            "ckpt_every_steps": 10,
            "val_every_steps": 10,
        },
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
            },
        },
        "dataset": {"path_or_dataset_id": str(ROWS / "train.jsonl"), "seq_length": 64},
        "validation_dataset_addition": {"path_or_dataset_id": str(ROWS / "addition.jsonl")},
        "validation_dataset_subtraction": {"path_or_dataset_id": str(ROWS / "subtraction.jsonl")},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2},
        "checkpoint": {"enabled": True, "checkpoint_dir": f"{folder}/automodel", "best_metric_key": "addition"},
        "callsheet": {"threads": 1},
    }
    post = Post()
    recipe = TrainFinetuneRecipeForNextTokenPrediction(cfg, callbacks=[Log(), post])
    recipe.setup()
    recipe.run_train_validation_loop()
    if recipe.dist_env.is_main:
        print(f"{len(post.posted)} validations would have been posted")


if __name__ == "__main__":
    main(*sys.argv[1:])
