"""What a trained language model writes at the end of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from callsheet.callbacks.continuations import Prompt, Prompts, written
from callsheet.trainer import Trainer

FINAL_TABLE = "generations/final"


def continued(
    trainer: Trainer, prompts: Sequence[Prompt], tokenizer: Any, most: int, *, temperature: float = 0.0, seed: int = 0
) -> list[tuple[str, str]]:
    """Each prompt, and how the model goes on from it, for the loggers as well; every rank does it, as sharded weights want it.

    Args:
        trainer: whose model.
        prompts: texts, special tokens included, or their ids.
        tokenizer: the model's.
        most: how many tokens at most.
        temperature: of the drawing; 0 takes the likeliest token.
        seed: of the drawing.
    """
    rows = said(trainer, prompts, tokenizer, most, temperature=temperature, seed=seed)
    if rows:
        trainer.ctx.log_table(FINAL_TABLE, ["prompt", "continuation"], [list(row) for row in rows])
    return rows


def said(
    trainer: Trainer,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    most: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
) -> list[tuple[str, str]]:
    """As `continued`, for nobody but the caller."""
    if not prompts:
        return []
    words: dict[str, Any] = {"max_new_tokens": most, "do_sample": temperature > 0}
    if temperature > 0:
        words["temperature"] = temperature
    return written(
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
    """Prompt and continuation, to be printed."""
    return [f"--- {prompt!r} goes on ---\n{prompt}{written}\n" for prompt, written in rows]
