"""The hooks through which a recognized training loop is observed: on its model, on its losses' `backward`, and on its optimizer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from callsheet.bridges.backward_watch import BackwardWatch
from callsheet.bridges.optimizer_hooks import OptimizerHooks
from callsheet.bridges.torch_hooks import Hook, untraced
from callsheet.exec.log_pace import FIRST_INTERVAL_STEPS

if TYPE_CHECKING:
    from callsheet.exec.bare_loop import BareLoop


class LoopForwardHooks:
    """Registers hooks in the loop's model that notify the loop of the model's calls, in training and in evaluations.

    Args:
        loop: the loop.
        model: the module that the loop calls.
    """

    def __init__(self, loop: BareLoop, model: nn.Module) -> None:
        self._loop = loop
        self._before = Hook(partial(model.register_forward_pre_hook, with_kwargs=True))
        self._after = Hook(model.register_forward_hook)

    def install(self, *, needs_calls: bool, needs_outputs: bool) -> None:
        """Register a hook that is called before the model, if `needs_calls`, and one that is called after it, if `needs_outputs`."""
        self._before.install(needs_calls, self._loop.forward_begins)
        self._after.install(needs_outputs, self._loop.forward_ends)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        self._before.remove()
        self._after.remove()


class LoopBackwardWatch(BackwardWatch):
    """Notifies the loop when `backward` is called on a loss. If calls of the model are not observed, a step begins with its first loss."""

    def __init__(self, loop: BareLoop, scaler: Any) -> None:
        super().__init__(loop.run.driver, loop.run.ctx, scaler)
        self._before = loop.backward_begins


class LoopOptimizerHooks(OptimizerHooks):
    """Ends the loop's step when the optimizer has stepped. A step that was not reported to the lifecycle driver is only counted."""

    def __init__(self, loop: BareLoop) -> None:
        self._loop = loop
        super().__init__(loop.run.driver, loop.optimizer, watch=loop.watch, ended=loop.end_step)

    @untraced
    def _ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        loop = self._loop
        if (counts := loop.unreported_counts) is None:
            super()._ends(optimizer, args, kwargs)
            return
        try:
            loop.unreported_counts = None
            loss, loop.watch.total = loop.watch.total, None
            steps = loop.run.count_unreported_step(optimizer, loss, *counts)
            if not steps % FIRST_INTERVAL_STEPS:
                loop.after_step(steps)
        except Exception as error:
            self._fail(error, self._after, getattr(optimizer, "_optimizer_step_post_hooks", {}), self._ends)
