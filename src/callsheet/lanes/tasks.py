"""Asyncio tasks that the handlers of a callback have started and not awaited."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

logger = logging.getLogger("callsheet")


async def finish_tasks(seconds: float, of: str) -> None:
    """Wait until all other tasks of the event loop are done. After `seconds`, log an error, and cancel the tasks that are left.

    Args:
        seconds: how long to wait.
        of: whose tasks they are, for the error.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        _, left = await asyncio.wait(tasks, timeout=max(0.0, until - loop.time()))
        if left:
            counts = Counter(getattr(task.get_coro(), "__qualname__", task.get_name()) for task in left)
            names = ", ".join(name if count == 1 else f"{name} ({count} tasks)" for name, count in sorted(counts.items()))
            logger.error(
                "asyncio tasks of %s are not done after %.3g s, and are cancelled: %s. Await them in the handler, or end them at on_run_end",
                *(of, seconds, names),
            )
            for task in left:
                task.cancel()
            return
