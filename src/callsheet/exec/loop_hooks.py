"""The hooks through which a recognized training loop is observed, on its losses' `backward` and on its optimizer.

The hooks on its model are in `loop_calls`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from callsheet.bridges.backward_watch import BackwardWatch
from callsheet.bridges.optimizer_hooks import OptimizerHooks
from callsheet.bridges.torch_hooks import untraced
from callsheet.exec.log_pace import FIRST_INTERVAL_STEPS

if TYPE_CHECKING:
    from callsheet.exec.bare_loop import BareLoop


class LoopBackwardWatch(BackwardWatch):
    """Notifies the loop when `backward` is called on a loss. If no handler listens to the step, this begins an `UnreportedStep`."""

    def __init__(self, loop: BareLoop, scaler: Any) -> None:
        super().__init__(loop.run.driver, loop.run.ctx, scaler)
        self._loop = loop
        self._batches = loop.batches
        self._unreported = loop.unreported
        self._before = self._begins
        # Store these objects as attributes, because every step reads them and `loop.run.spans` would be slower.
        self._spans, self._open_spans, self._epoch = loop.run.spans, loop.run.driver.opened, loop.run.driver.spans["epoch"]

    def _begins(self) -> None:
        try:
            batches, unreported = self._batches, self._unreported
            batch = batches.new
            if (
                batch is None
                or not unreported.is_allowed
                or unreported.counts is not None
                or self._open_spans[-1] is not self._epoch
                or self._driver.seen_links != self._spans.links
            ):
                self._loop.begin_backward()
            else:
                unreported.counts = counts = batches.counts_of(batch)
                batches.new = None
                if not counts[0]:
                    self._loop.be_irregular()
        except (Exception, SystemExit) as error:
            self._loop.guard.fail(error)


class LoopOptimizerHooks(OptimizerHooks):
    """Ends the loop's step when the optimizer has stepped. A step that was not reported to the lifecycle driver is only counted."""

    def __init__(self, loop: BareLoop) -> None:
        self._loop = loop
        super().__init__(loop.run.driver, loop.optimizer, watch=loop.watch, ended=loop.end_step)

    @untraced
    def _ends(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        loop, unreported = self._loop, self._loop.unreported
        if (counts := unreported.counts) is None:
            super()._ends(optimizer, args, kwargs)
            return
        try:
            unreported.counts = None
            loss, loop.watch.total = loop.watch.total, None
            steps = loop.run.count_unreported_step(optimizer, loss, *counts)
            if not steps % FIRST_INTERVAL_STEPS:
                loop.after_step(steps)
        except Exception as error:
            self._fail(error, self._after, getattr(optimizer, "_optimizer_step_post_hooks", {}), self._ends)
