"""The parameters that the optimizer of an observed training loop updates."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class LoopParameters:
    """The parameters of the loop's optimizer.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._ids = {id(each) for each in parameters}
        # With FSDP, this list is empty, because between microbatches FSDP keeps the gradients elsewhere than in `.grad`.
        self._with_gradients = [] if any(hasattr(each, "placements") for each in parameters) else parameters

    def __contains__(self, parameter: Any) -> bool:
        """Return whether the optimizer updates this parameter."""
        return id(parameter) in self._ids

    def have_lost_gradients(self) -> bool:
        """Return whether no parameter has a gradient. After a backward pass, this means that the script has discarded the gradients."""
        parameters = self._with_gradients
        return bool(parameters) and all(each.grad is None for each in parameters)
