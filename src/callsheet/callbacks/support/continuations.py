"""Lets a language model continue prompts: encodes the prompts, generates tokens, and decodes them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from callsheet.core.randomness import random_state, restore_random_state, seed_all
from callsheet.errors import ConfigError, NonFiniteError, check_characters
from callsheet.run.copies import add_hook

Prompt = str | Sequence[int]

_NOT_FINITE_MESSAGE = "the model's outputs are NaN or infinite"
_CANNOT_SAMPLE_PATTERN = re.compile(r"probability tensor contains")
"""The start of the error message that `torch.multinomial` raises if logits are NaN or infinite.

If a model's `generate` does not call the module itself, no forward hook can check the logits, and only this message reveals them.
"""


class Prompts:
    """The prompts, given as texts or as lists of token ids, with the tokenizer that encodes and decodes texts.

    Args:
        prompts: the texts or lists of token ids to be continued.
        tokenizer: an object with `encode` and `decode`, or the name or folder of a transformers tokenizer. None uses the bytes of a
            text as its ids, and shows ids as numbers.

    Raises:
        ConfigError: a prompt has no tokens, or half of a surrogate pair.
    """

    def __init__(self, prompts: Sequence[Prompt], tokenizer: Any = None) -> None:
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self._tokenizer = tokenizer
        self._prompts = prompts
        check_prompts(prompts)
        self.ids = [self._encode(prompt) for prompt in prompts]

    def rows(self, written: Sequence[Sequence[int]]) -> list[tuple[str, str]]:
        """Return each prompt and its continuation as texts. `written` contains the token ids of each continuation."""
        return [
            (prompt if isinstance(prompt, str) else self._decode(prompt, prompt), self._decode(ids, prompt))
            for prompt, ids in zip(self._prompts, written, strict=True)
        ]

    def _encode(self, prompt: Prompt) -> list[int]:
        ids: Any = prompt
        if isinstance(prompt, str):
            ids = list(prompt.encode()) if self._tokenizer is None else self._tokenizer.encode(prompt)
        tokens = [int(token) for token in getattr(ids, "ids", ids)]
        if not tokens:
            raise ConfigError(f"the prompt {prompt!r} has no tokens to continue; leave it out")
        return tokens

    def _decode(self, ids: Sequence[int], prompt: Prompt) -> str:
        if self._tokenizer is not None:
            return str(self._tokenizer.decode(list(ids)))
        if isinstance(prompt, str):
            # Without a tokenizer, each token id is taken as a byte, so leave out ids above 255.
            return bytes(token for token in ids if token < 256).decode(errors="replace")
        return " ".join(map(str, ids))


def check_prompts(prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if a prompt is a text with half of a surrogate pair, which no tokenizer can encode."""
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_characters(prompt, f"prompts[{number}]")


def generate_continuations(
    model: Any,
    prompts: Prompts,
    device: str,
    *,
    world_size: int,
    seed: int,
    batch_size: int,
    words: Mapping[str, Any],
    options: Mapping[str, Any],
) -> list[tuple[str, str]]:
    """Generate a continuation of every prompt. Return each prompt and its continuation as texts.

    Afterwards, the model, its modules' modes and the random states are as before.

    If the model is sharded, every rank must call this.

    Args:
        seed: the seed for sampling.
        words, options: see `continuations`.

    Raises:
        NonFiniteError: the model's outputs are NaN or infinite, so no token can be chosen.
    """
    with evaluation_mode(model, seed) as is_sharded, finite_outputs(model):
        # With `synced_gpus`, all ranks of a sharded model generate equally many tokens, so no rank waits for another forever.
        words = {**words, "synced_gpus": is_sharded and world_size > 1}
        lines = continuations(model, prompts.ids, device, batch_size=batch_size, words=words, options=options)
    return prompts.rows(lines)


@contextmanager
def evaluation_mode(model: Any, seed: int) -> Iterator[bool]:
    """While the `with` block runs, keep the model in evaluation mode without gradients. Then restore modes and random states.

    Yield whether the model is sharded.
    """
    modes = [(module, module.training) for module in model.modules()]
    shards = [module for module, _ in modes if isinstance(module, FSDPModule)]
    random = random_state()
    try:
        model.eval()
        seed_all(seed)
        with torch.no_grad():
            yield bool(shards)
    finally:
        restore_random_state(random)
        for module, training in modes:
            module.training = training
        for shard in shards:  # reshard now: FSDP keeps the root module unsharded until a backward pass, which never comes
            shard.reshard()


@contextmanager
def finite_outputs(model: Any) -> Iterator[None]:
    """While the `with` block runs, raise NonFiniteError if the logits of the last position are NaN or infinite.

    On a GPU, sampling from such logits would abort the process.

    All ranks of a sharded model have the same logits, so all of them raise.
    """

    def check(_: Any, __: Any, outputs: Any) -> None:
        logits = getattr(outputs, "logits", outputs)
        # Accept -inf, because a model may mask tokens with -inf.
        if isinstance(logits, torch.Tensor) and logits.ndim == 3 and not bool((logits[:, -1] < torch.inf).all()):
            raise NonFiniteError(_NOT_FINITE_MESSAGE)

    remove_hook = add_hook(model.register_forward_hook, check)
    try:
        yield
    except RuntimeError as error:
        if _CANNOT_SAMPLE_PATTERN.search(str(error)):
            raise NonFiniteError(_NOT_FINITE_MESSAGE) from error
        raise
    finally:
        remove_hook()


def continuations(
    model: Any,
    prompts: Sequence[Sequence[int]],
    device: str,
    *,
    batch_size: int,
    words: Mapping[str, Any],
    options: Mapping[str, Any],
) -> list[list[int]]:
    """Return the token ids that `model.generate` writes after each prompt, up to the end token.

    Prompts of equal length share a batch of at most `batch_size`, so that no prompt needs padding.

    Args:
        words: keyword arguments; only those that `generate` accepts are passed.
        options: further keyword arguments, which are always passed.
    """
    written: list[list[int]] = [[]] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for _, equal in groupby(order, key=lambda i: len(prompts[i])):
        places = list(equal)
        for start in range(0, len(places), batch_size):
            part = places[start : start + batch_size]
            ids = torch.tensor([list(prompts[i]) for i in part], device=device)
            for place, line in zip(part, _generate(model, ids, words, options), strict=True):
                written[place] = line
    return written


def _generate(model: Any, ids: torch.Tensor, words: Mapping[str, Any], options: Mapping[str, Any]) -> list[list[int]]:
    config = getattr(model, "generation_config", None)
    ends = options.get("eos_token_id", getattr(config, "eos_token_id", None))
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    pad = getattr(config, "pad_token_id", None)
    if pad is None:
        pad = ends[0] if ends else 0  # pad shorter continuations with the end token
    given = {"attention_mask": torch.ones_like(ids), "use_cache": True, "pad_token_id": pad, **words}
    takes = inspect.signature(model.generate).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        given = {word: value for word, value in given.items() if word in takes}
    made = model.generate(ids, **{**given, **options})
    is_decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    lines: list[list[int]] = getattr(made, "sequences", made)[:, ids.shape[1] if is_decoder else 1 :].tolist()
    return [line[: next((i for i, token in enumerate(line) if token in ends), None)] for line in lines]
