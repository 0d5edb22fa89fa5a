"""Learning-rate schedules with a warm-up, followed by a constant rate, a cosine decay or a linear decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from callsheet.errors import ConfigError


class _Schedule(LambdaLR):
    """A `LambdaLR` whose length may change at a resume. The first step after the resume already uses the new schedule's rate."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state. If this schedule has another rate at the present step, set that rate in the optimizer."""
        super().load_state_dict(state_dict)
        rates: list[Any] = [base * factor(self.last_epoch) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        if rates != self._last_lr:  # otherwise keep the optimizer's rate, which a callback may have changed
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            self._last_lr = rates


class Warmup(_Schedule):
    """A learning-rate schedule with linear warm-up, and then a constant rate.

    Args:
        optimizer: the optimizer whose learning rate is set.
        warmup_steps: the number of steps in which the rate rises to its full value; 0 means no warm-up.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 50) -> None:
        if warmup_steps < 0:
            raise ConfigError(f"warmup_steps={warmup_steps}: give 0 or more")
        super().__init__(optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup_steps)))


class WarmupCosine(_Schedule):
    """A learning-rate schedule with linear warm-up and cosine decay (Loshchilov and Hutter 2017, SGDR, without restarts).

    Args:
        optimizer: the optimizer whose learning rate is set.
        total_steps: the step at which the rate reaches its final value, which it keeps.
        warmup_steps: the number of steps at the start during which the rate rises.
        final: the final rate, as a fraction of the full one.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> None:
        def cosine(part: float) -> float:
            return 0.5 * (1.0 + math.cos(math.pi * part))

        super().__init__(optimizer, _rise_and_fall(cosine, total_steps, warmup_steps, final))


class WarmupLinear(_Schedule):
    """A learning-rate schedule with linear warm-up and linear decay.

    Args:
        optimizer: the optimizer whose learning rate is set.
        total_steps: the step at which the rate reaches its final value, which it keeps.
        warmup_steps: the number of steps at the start during which the rate rises.
        final: the final rate, as a fraction of the full one.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final: float = 0.0) -> None:
        super().__init__(optimizer, _rise_and_fall(lambda part: 1.0 - part, total_steps, warmup_steps, final))


def _rise_and_fall(shape: Callable[[float], float], total_steps: int, warmup_steps: int, final: float) -> Callable[[int], float]:
    """Return a function that maps a step to the factor by which the learning rate is multiplied.

    `shape` is the curve after the warm-up, and falls from 1 to 0.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ConfigError(
            f"warmup_steps={warmup_steps} of total_steps={total_steps}: give a number of steps from 0 to below total_steps"
        )
    if not 0.0 <= final <= 1.0:
        raise ConfigError(f"final={final}: give a fraction of the full learning rate, from 0 to 1")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        part = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return final + (1.0 - final) * shape(part)

    return factor
