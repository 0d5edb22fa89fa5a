"""A callback in the style of InstructLab Training, in a fine-tuning job. Only the import line differs from InstructLab's.

    python examples/instructlab_style.py [FOLDER]

The model is tiny, has random weights, and trains on the sums in `arithmetic/`. The callback is created here with its argument, and sent to
each of two ranks. A background thread calls it there, in InstructLab's order, and no event is dropped.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from callsheet.compat.instructlab import TorchrunArgs, TrainerCallback, TrainingArgs, TrainingContext, run_training

ROWS = Path(__file__).resolve().parent / "arithmetic"


class Progress(TrainerCallback):
    """Print the loss every few steps, on the first rank."""

    def __init__(self, every: int) -> None:
        self.every = every

    async def on_log(self, context: TrainingContext) -> None:
        if context.is_world_process_zero and context.step % self.every == 0:
            await asyncio.sleep(0)  # a real callback would await a request to a server here
            print(f"step {context.step}, epoch {context.epoch}: loss {context.loss:.3f}", flush=True)

    def on_evaluate(self, context: TrainingContext) -> None:
        if context.is_world_process_zero:
            print(f"step {context.step}: validation loss {context.val_metrics['val_loss']:.3f}", flush=True)

    def on_save(self, context: TrainingContext) -> None:
        if context.is_world_process_zero:
            print(f"step {context.step}: saved {context.checkpoint_path}", flush=True)

    def on_train_end(self, context: TrainingContext) -> None:
        if context.is_world_process_zero:
            print(f"trained for {context.step} steps on {context.world_size} ranks", flush=True)


def tiny_model(folder: Path) -> None:
    """Save a model with random weights, unless it exists."""
    import torch
    from transformers import AutoModelForCausalLM

    from callsheet.recipes import LanguageModel

    if not folder.exists():
        torch.manual_seed(1)
        shape = LanguageModel(hidden_size=32, layers=1, heads=2, intermediate_size=64)
        tokenizer: Any = shape.make_tokenizer()
        model: Any = shape.build(AutoModelForCausalLM, vocabulary=len(tokenizer), longest=128)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/instructlab")
    tiny_model(out / "model")
    run_training(
        torch_args=TorchrunArgs(nproc_per_node=2, nnodes=1, node_rank=0, rdzv_id=123, rdzv_endpoint="127.0.0.1:12345"),
        train_args=TrainingArgs(
            model_path=str(out / "model"),
            data_path=str(ROWS / "train.jsonl"),
            ckpt_output_dir=str(out),
            data_output_dir=str(out / "data"),
            max_seq_len=64,
            max_batch_len=512,
            num_epochs=1,
            effective_batch_size=16,
            learning_rate=1e-2,
            warmup_steps=2,
            validation_split=0.1,
            validation_frequency=6,
            log_level="WARNING",
            callbacks=[Progress(every=5)],
        ),
    )
