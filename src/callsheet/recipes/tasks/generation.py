"""Generates text with the trained language model at the end of a recipe."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from callsheet.callbacks.support.continuations import Prompt, Prompts, generate_continuations
from callsheet.errors import NonFiniteError
from callsheet.trainer import Trainer

logger = logging.getLogger("callsheet")

FINAL_TABLE = "generations/final"


def log_continuations(
    trainer: Trainer, prompts: Sequence[Prompt], tokenizer: Any, most: int, *, temperature: float = 0.0, seed: int = 0
) -> list[tuple[str, str]]:
    """Let the model continue the prompts. Log and return each prompt with its continuation.

    If the weights are sharded, every rank must call this function.

    If the model's outputs are NaN or infinite, log a warning and return nothing.

    Args:
        trainer: the trainer of the model.
        prompts: texts (special tokens included), or the ids of their tokens.
        tokenizer: the model's tokenizer.
        most: the maximum number of tokens to generate.
        temperature: the sampling temperature; 0 chooses the most likely token.
        seed: the seed of the sampling.
    """
    try:
        rows = continuations(trainer, prompts, tokenizer, most, temperature=temperature, seed=seed)
    except NonFiniteError as error:
        if trainer.run.is_world_process_zero:
            logger.warning("no samples are generated: %s", error)
        return []
    if rows:
        trainer.ctx.log_table(FINAL_TABLE, ["prompt", "continuation"], [list(row) for row in rows])
    return rows


def continuations(
    trainer: Trainer,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    most: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
) -> list[tuple[str, str]]:
    """Let the model continue the prompts, like `log_continuations`, but do not log the results.

    Raises:
        NonFiniteError: the model's outputs are NaN or infinite.
    """
    if not prompts:
        return []
    words: dict[str, Any] = {"max_new_tokens": most, "do_sample": temperature > 0}
    if temperature > 0:
        words["temperature"] = temperature
    return generate_continuations(
        trainer.model,
        Prompts(list(prompts), tokenizer),
        str(trainer.device),
        world_size=trainer.run.world_size,
        seed=seed,
        batch_size=batch_size,
        words=words,
        options={},
    )


def passages(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return the prompts with their continuations as texts to print."""
    return [f"--- {prompt!r} continued ---\n{prompt}{written}\n" for prompt, written in rows]
