"""The lifetime of a run: fires `on_run_start` once, `on_exception` at most once, and `on_run_end` exactly once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from callsheet.core.background import inner
from callsheet.core.context import Context
from callsheet.core.control import Request
from callsheet.core.events import Event
from callsheet.core.manager import CallbackManager
from callsheet.core.page_locked import keep_if_device_failed
from callsheet.core.run_state import Outcome
from callsheet.core.spans import take_noted_span
from callsheet.errors import RunEndedError, RunLockLostError, text_of
from callsheet.run.costs import publish_costs
from callsheet.run.reasons import error_line, one_line

logger = logging.getLogger("callsheet")


class Lifetime:
    """Fires `on_run_start`, `on_exception` and `on_run_end`.

    A loop runs everything inside `with lifetime:` blocks, which may be nested. An exception that leaves the outermost block fires
    `on_exception`, ends the run, and is raised unchanged.

    Raises:
        RunEndedError: on entering the block after the run has ended.
    """

    def __init__(self, manager: CallbackManager, ctx: Context) -> None:
        self.outcome: Outcome = Outcome.FINISHED
        """The outcome of the run if no exception is raised. A loop changes it when the run is stopped or preempted."""
        self.reasons: dict[Outcome, str] = {}
        """For each outcome, the reason why the run ended that way, if the loop knows the reason."""
        self._manager = manager
        self._ctx = ctx
        self._depth = 0
        self._started = False
        self._ended = False
        self._pid = os.getpid()
        self._closers: list[Callable[[], object]] = []
        self.before_end: Callable[[], object] = lambda: None
        """A function that is called just before `on_run_end`, to end spans that are still open."""

    @property
    def has_started(self) -> bool:
        """Whether `on_run_start` has been fired."""
        return self._started

    @property
    def has_ended(self) -> bool:
        """Whether `on_run_end` has been fired."""
        return self._ended

    @property
    def is_entered(self) -> bool:
        """Whether the code of a `with lifetime:` block is running now."""
        return self._depth > 0

    def at_end(self, close: Callable[[], object]) -> None:
        """Register a function to call after `on_run_end`.

        The functions are called in reverse order of registration. If one raises an error, the others are still called.
        """
        self._closers.append(close)

    def start(self) -> None:
        """Compile the table of all handlers for this run, and fire `on_run_start`."""
        self._manager.open(self._ctx)
        self._started = True
        self._manager.fire(Event.RUN_START, self._ctx)

    def end(self, outcome: Outcome | None = None) -> None:
        """Fire `on_run_end`, unless it was fired before.

        All handlers of the event are called, even if one raises an error. Then the first error is raised.

        In a process that was forked from the run's process this does nothing, because the run continues in the parent.
        """
        if self._ended or os.getpid() != self._pid:
            return
        self._ended = True
        with ExitStack() as closing:
            for close in self._closers:
                closing.callback(close)
            if self._started:
                self._ctx.close_all(before=Event.RUN_END)
                run = self._ctx.run
                run.outcome = outcome or self.outcome
                run.outcome_reason = self.reasons.get(run.outcome) or self._reason(run.outcome)
                self._log_early_end(run.outcome)
                closing.callback(self._manager.close)
                closing.callback(self._ctx.close_all)
                closing.callback(self._manager.fire, Event.RUN_END, self._ctx)
                closing.callback(self.before_end)
                self._manager.drain(self._ctx)
                self._ctx.run.failures = self._manager.cost_report(self._ctx.step).failures
                publish_costs(self._manager, self._ctx, is_last=True)

    def __enter__(self) -> None:
        if self._ended:
            raise RunEndedError(
                f"the run {self._ctx.run.name!r} has ended ({self._ctx.run.outcome}); make a new trainer, with resume= to continue the run"
            )
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        self._depth -= 1
        if error is not None and self._depth == 0:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Fire `on_exception` and `on_run_end` for an error that leaves the trainer.

        Errors in the handlers of these events are added to `error` as notes.
        """
        keep_if_device_failed()
        if self._ended:
            return
        if not self._started:
            self.end()
            return
        span, ctx = take_noted_span(error) or ("run", self._ctx)
        ctx.exception, ctx.span = error, span
        if isinstance(error, RunLockLostError):  # rank 0 raises it first; then the other ranks raise it at a collective
            ctx.run.has_lost_folder = True
        outcome = Outcome.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Outcome.FAILED
        if outcome is Outcome.FAILED:
            self.reasons[outcome] = error_line(error)
        for fire in (partial(self._manager.fire, Event.EXCEPTION, ctx), partial(self.end, outcome)):
            try:
                fire()
            except BaseException as another:
                text = f"{type(another).__name__}: {text_of(another)}"
                logger.error("While the run was ending, another error was raised: %s", text, exc_info=another)
                error.add_note(f"while the run was ending, another error was raised: {text}")
        ctx.close_all()

    def _log_early_end(self, outcome: Outcome) -> None:
        """Log why training ended early, unless a callback shows the reason or this process has not trained."""
        run, state = self._ctx.run, self._ctx.state
        is_shown = any(inner(each).shows_outcome for each in self._manager.callbacks)
        has_trained = state.timestamp.batch > state.baseline.batch
        if outcome in (Outcome.STOPPED, Outcome.PREEMPTED) and has_trained and not is_shown:
            logger.warning("%s: training ended at step %d, %s", run.name, self._ctx.step, run.outcome_reason)

    def _reason(self, outcome: Outcome) -> str:
        """Return the reason for the run's outcome if the loop gave none, for example which request stopped the run."""
        ctx = self._ctx
        if outcome is Outcome.FINISHED:
            if ctx.state.is_complete:
                return f"reached max_duration, {ctx.state.max_duration}"
            return "the training loop ended" if ctx.state.timestamp.batch > ctx.state.baseline.batch else ""
        if outcome is Outcome.STOPPED and ctx.control.stop_requested is not None:
            return stop_reason(ctx.control.stop_requested)
        return _REASON_OF_OUTCOME[outcome]


def stop_reason(request: Request) -> str:
    """Return a sentence that says which callback stopped a run, and why."""
    return f"stopped by {one_line(f'{request.by}: {request.why}')}"


_REASON_OF_OUTCOME = {
    Outcome.STOPPED: "the training loop stopped early",
    Outcome.PREEMPTED: "the training loop was preempted",
    Outcome.INTERRUPTED: "interrupted with Ctrl-C",
    Outcome.FAILED: "the training loop was left before its end",
}
