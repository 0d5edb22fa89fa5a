"""Sends the measured time of callbacks to the loggers."""

from __future__ import annotations

from callsheet.core.context import Context
from callsheet.core.manager import CallbackManager


def publish_costs(manager: CallbackManager, ctx: Context, *, is_last: bool = False) -> None:
    """Send the time of the callbacks and the latest timeline to the loggers, if they are due. Called after each metrics record.

    Args:
        manager: the manager that has measured the times.
        ctx: the context of the training loop.
        is_last: whether the run is ending. The times are then sent even if they are not due.
    """
    report = manager.cost_report(ctx.step) if is_last else None
    if manager.costs.should_publish(is_last=is_last) or (report is not None and report.failures):
        manager.notify_loggers("log_costs", ctx, report=report or manager.cost_report(ctx.step))
        if (window := manager.costs.take_window()) is not None:
            manager.notify_loggers("log_timeline", ctx, window=window)
