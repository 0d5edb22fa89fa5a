"""Ends the observation of a training loop. After an error of callsheet or of a callback, the script continues."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import current_thread, get_ident
from typing import Any, Protocol

from callsheet.bridges.giving_up import give_up
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.torch_hooks import not_compiled
from callsheet.errors import is_from_signal_handler, text_of

logger = logging.getLogger("callsheet")


class Removable(Protocol):
    """Protocol of the hooks that `LoopGuard` removes at the end of the observation."""

    def remove(self) -> None:
        """Remove the hook. The method may be called twice."""


class LoopGuard:
    """Ends the observation of a loop, at its end or after an error: removes the hooks, and fails the run if there was an error.

    Errors of callsheet and of callbacks do not reach the script. Errors that the script's signal handlers have raised while
    callsheet was running are raised.

    Args:
        run: the run of the loop.
    """

    def __init__(self, run: HostedRun) -> None:
        self._run = run
        self.hooks: list[Removable] = []
        """The hooks to remove when the observation is over."""
        self.has_failed = False
        """Whether an error of callsheet or of a callback has ended the observation."""
        self.thread = current_thread()
        """The thread that trains."""
        self.thread_id: int | None = get_ident()
        """The identifier of the thread that trains. Only calls in this thread are observed. None when the observation is over."""
        run.fails_by(self.fail)

    @property
    def is_over(self) -> bool:
        """Whether the hooks were removed, and no more events are fired."""
        return self.thread_id is None

    @not_compiled
    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function(*args)`. If it raises an error, end the observed run, but not the script.

        Hooks that run in most steps catch errors themselves, and call `fail`, to save this function call.
        """
        try:
            function(*args)
        except (Exception, SystemExit) as error:
            self.fail(error)

    def fail(self, error: Exception | SystemExit) -> None:
        """End the run because of an error of callsheet or a callback. The script continues.

        Raise the error if the script's own signal handler has raised it while callsheet was running.
        """
        if is_from_signal_handler(error):
            raise error
        if not self.is_over:
            self.has_failed = True
            self.release()
            try:
                give_up(self._run, error, contained=True)
            except Exception as fault:
                logger.error("The run of %s could not be ended in order: %s", self._run.host, text_of(fault), exc_info=fault)

    def release(self) -> None:
        """Remove all hooks, and fire no more events."""
        self.thread_id = None
        for hook in self.hooks:
            hook.remove()
