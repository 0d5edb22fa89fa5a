"""A model and a forward step in Megatron's style: the model returns each token's loss, and a loss function combines these."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.bridges.megatron_bridge.run import LM_LOSS
from callsheet.bridges.megatron_bridge.state import GlobalState
from callsheet.errors import ConfigError, NotSupported

IGNORED_LABEL = -100


class GPTModel(nn.Module):
    """Gives a causal language model of the library transformers the call signature of Megatron's `GPTModel`.

    With labels it returns each token's loss, without labels the logits.

    The labels must already be aligned with the logits that predict them, because the model does not shift them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits of shape (batch, tokens, vocabulary) or, with labels, the losses (batch, tokens) in float32.

        `loss_mask` is not used.
        """
        logits: Tensor = self.module(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask).logits
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.transpose(1, 2).float(), labels, reduction="none")


def forward_step(state: GlobalState, data_iterator: Iterator[Any], model: nn.Module, return_schedule_plan: bool = False) -> Any:
    """Run the model on the next microbatch.

    Args:
        state: Megatron's global state.
        data_iterator: yields the batches, in Megatron's format.
        model: the model.
        return_schedule_plan: must be False.

    Returns:
        The losses of the tokens, and a loss function. The function takes these losses. It returns the sum of the losses of the
        counted tokens, the number of these tokens, and a dict `{"lm loss": ...}` with a tensor of that sum and number.

    Raises:
        NotSupported: `return_schedule_plan` is set.
    """
    if return_schedule_plan:
        raise NotSupported("forward_step makes no schedule plan: there are no pipelines here")
    batch = next(data_iterator)
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(_masked_loss, batch["loss_mask"])


def _masked_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    mask = loss_mask.flatten().float()
    loss, tokens = (losses.flatten().float() * mask).sum(), mask.sum()
    return loss, tokens.to(torch.int), {LM_LOSS: torch.stack([loss.detach(), tokens])}


def as_recipe_step(forward_step_func: Callable[..., Any], state: GlobalState) -> Callable[[nn.Module, Any], Any]:
    """Convert a Megatron forward step to a function of a model and a batch, as callsheet's recipe `pretrain` expects it.

    The forward step may take Megatron's state as its first argument, before the iterator.
    """
    if not callable(forward_step_func):
        raise ConfigError(
            f"forward_step is {forward_step_func!r}; give a function such as callsheet.compat.megatron_bridge.forward_step"
        )
    parameters = list(inspect.signature(forward_step_func).parameters.values())
    wants_state = any("GlobalState" in str(each.annotation) for each in parameters)
    wants_state |= bool(parameters) and parameters[0].name in ("state", "global_state")
    step = partial(forward_step_func, state) if wants_state else forward_step_func

    def recipe_step(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        outputs, loss_function = step(iter([as_megatron_batch(batch)]), model)
        return outputs, lambda outputs: _mean_and_reported(loss_function(outputs))

    return recipe_step


def as_megatron_batch(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Convert a batch to Megatron's format: tokens, labels (the next tokens) and a loss mask. The last token has no label."""
    tokens = batch["input_ids"]
    labels = batch["labels"].roll(-1, dims=1)
    labels[:, -1] = IGNORED_LABEL
    counts = labels != IGNORED_LABEL
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    return {
        "tokens": tokens,
        "labels": labels.where(counts, 0),
        "loss_mask": counts.float(),
        "attention_mask": None,
        "position_ids": positions,
    }


def _mean_and_reported(given: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Convert a loss function's result to the mean loss and the reported values. A reported pair (sum, count) becomes a mean."""
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[-1], Mapping):
        raise ConfigError(
            "the loss function of forward_step has to give (loss, reported by name), or (loss, tokens, reported by name)"
        )
    loss: Tensor = given[0] if len(given) == 2 else given[0] / given[1].clamp(min=1)
    reported = {}
    for name, value in given[-1].items():
        value = torch.as_tensor(value).detach().flatten()
        if value.numel() > 2:
            raise ConfigError(f"forward_step reports {name!r} as {value.numel()} numbers; give one, or a sum and its count")
        reported[name] = value[0] / value[1] if value.numel() == 2 else value[0]
    return loss, reported
