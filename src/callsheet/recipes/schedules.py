"""Learning rates over the steps of a run: a warm-up, and then what recipes are asked for most."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from callsheet.errors import ConfigError


class Warmup(LambdaLR):
    """A learning rate that rises in a straight line and then stays.

    Args:
        optimizer: whose learning rate it is.
        warmup_steps: how many steps it takes to get there; 0 is there at once.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 50) -> None:
        if warmup_steps < 0:
            raise ConfigError(f"warmup_steps={warmup_steps}: give 0 or more")
        super().__init__(optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup_steps)))


class WarmupCosine(LambdaLR):
    """A learning rate that rises in a straight line, and falls along half a cosine (Loshchilov and Hutter 2017, SGDR, without restarts).

    Args:
        optimizer: whose learning rate it is.
        total_steps: when it has fallen to the end; it stays there.
        warmup_steps: how many of them it rises.
        final: what it falls to, as a fraction of the full one.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> None:
        def cosine(part: float) -> float:
            return 0.5 * (1.0 + math.cos(math.pi * part))

        super().__init__(optimizer, _rise_and_fall(cosine, total_steps, warmup_steps, final))


class WarmupLinear(LambdaLR):
    """A learning rate that rises in a straight line, and falls in another.

    Args:
        optimizer: whose learning rate it is.
        total_steps: when it has fallen to the end; it stays there.
        warmup_steps: how many of them it rises.
        final: what it falls to, as a fraction of the full one.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> None:
        super().__init__(optimizer, _rise_and_fall(lambda part: 1.0 - part, total_steps, warmup_steps, final))


def _rise_and_fall(shape: Callable[[float], float], total_steps: int, warmup_steps: int, final: float) -> Callable[[int], float]:
    """The factor at a step; `shape` falls from 1 to 0 over what follows the warm-up."""
    if not 0 <= warmup_steps < total_steps:
        raise ConfigError(
            f"warmup_steps={warmup_steps} of total_steps={total_steps}: give fewer steps than there are in all, and 0 or more"
        )
    if not 0.0 <= final <= 1.0:
        raise ConfigError(f"final={final}: give a fraction of the full learning rate, from 0 to 1")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        part = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return final + (1.0 - final) * shape(part)

    return factor
