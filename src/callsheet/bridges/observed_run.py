"""The base class of runs in other frameworks' loops: how such a run fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from callsheet.bridges.giving_up import weakly
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.core.spans import note_span
from callsheet.run.run import Run


class ObservedRun(Run):
    """A run of callsheet's callbacks that observes another framework's loop. Two lifecycle drivers fire its events."""

    host: str
    """The name of the framework in messages."""
    driver: LifecycleDriver
    """Fires the events of training."""
    eval_driver: LifecycleDriver
    """Fires the events of evaluations."""

    def begin(self, *args: Any, **options: Any) -> None:
        """Start the run. The arguments depend on the kind of run."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """End the run as failed because of an error, without the events that are still due: fire `on_exception` and `on_run_end`."""
        innermost = next((driver.innermost for driver in (self.eval_driver, self.driver) if len(driver.opened) > 1), "run")
        note_span(error, innermost, self.ctx)
        self.driver.forget()
        self.eval_driver.forget()
        self.groups.publish_failure(self.ctx.step, error)
        self.lifetime.fail(error)
        self.lifetime.end()

    def fails_by(self, leave: Callable[[Exception], None]) -> None:
        """Store `leave`, a method of the host, which is called with each error that is raised in a hook that observes the loop.

        `leave` raises an error if the user must know about it. Otherwise, the user's training continues. Only a weak reference to
        the host is kept.
        """
        self.driver.give_up = self.eval_driver.give_up = weakly(leave)
