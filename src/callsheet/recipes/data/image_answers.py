"""Generates answers of a trained vision-language model to questions about images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from callsheet.callbacks.support.continuations import evaluation_mode
from callsheet.recipes.data.image_batches import ImageBatches
from callsheet.recipes.data.image_text import Example
from callsheet.trainer import Trainer


def generate_answers(
    trainer: Trainer, questions: Sequence[Example], batches: ImageBatches, tokenizer: Any, most: int, *, batch_size: int
) -> Iterator[str]:
    """Yield the answer that the model generates for each question, by greedy decoding.

    If the weights are sharded, every rank must call this function. Each rank gets all answers.

    Args:
        trainer: the trainer of the model.
        questions: examples that end where the answer begins.
        batches: encodes the questions.
        tokenizer: the processor's tokenizer.
        most: the maximum number of tokens of an answer.
        batch_size: how many questions are answered together.
    """
    model: Any = trainer.model
    config = model.generation_config
    end = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    with evaluation_mode(model, seed=0) as is_sharded:
        for start in range(0, len(questions), batch_size):
            batch = batches.encode(questions[start : start + batch_size], side="left")
            made = model.generate(
                **{name: value.to(trainer.device) if isinstance(value, Tensor) else value for name, value in batch.items()},
                max_new_tokens=most,
                do_sample=False,
                eos_token_id=end,
                pad_token_id=tokenizer.pad_token_id,
                synced_gpus=is_sharded and trainer.run.world_size > 1,
            )
            for line in made[:, batch["input_ids"].shape[1] :].tolist():
                yield str(tokenizer.decode(line, skip_special_tokens=True)).strip()
