"""Passes callbacks' requests for evaluations and checkpoints to the framework in whose loop callsheet runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from callsheet.bridges.loop_arguments import check_results
from callsheet.core.context import Context
from callsheet.core.control import Request
from callsheet.core.run_state import CheckpointInfo
from callsheet.core.spans import Spans
from callsheet.errors import mark_as_users
from callsheet.run.parts import DueEvaluation, Stateful

Evaluates = Callable[[], Mapping[str, Mapping[str, Any]]]


class HostEvaluation:
    """Passes callbacks' requests for evaluations to the framework in whose loop callsheet runs, and keeps the latest results.

    `results` contains the latest results by dataset name.
    """

    ends_at_signal = False

    def __init__(
        self,
        ctx: Context,
        evaluates: Evaluates | None,
        fire: Callable[[Mapping[str, Mapping[str, Any]]], None],
        *,
        is_resumed: bool,
    ) -> None:
        self.is_resumed = is_resumed
        """Whether callsheet writes the checkpoints. Only callsheet's checkpoints store an evaluation that a signal has prevented."""
        self.loaders: dict[str, Any] = {"": None}
        self.schedules: dict[str, Any] = {}
        self.results: dict[str, dict[str, float]] = {}
        self.undone: DueEvaluation | None = None
        """The evaluation that is due between the last step and the next step, and that was not done yet, or None."""
        self._ctx = ctx
        self._evaluates = evaluates
        self._fire = fire
        self.request: Callable[[], None] | None = None
        """A function that asks the host for an evaluation that the host carries out and reports later.

        None: `evaluates` carries it out at once.
        """
        self.before: Callable[[], None] = lambda: None
        """A function that is called before `evaluates`: it fires the start of the evaluation, if `evaluates` does not report it."""

    def due(self, ctx: Context, is_over: bool) -> list[str]:
        """Return `[""]` (a single dataset without a name) if `evaluate` must be called now, otherwise an empty list.

        If an evaluation was requested, and the host carries out evaluations later (see `request`), ask the host for the evaluation.
        """
        is_left = self.undone is not None and self.undone.step == ctx.step
        if ctx.control.evaluate_requested is None:
            return [""] if is_left and self._evaluates is not None else []
        if self.request is None:
            return [""]
        self.request()
        ctx.control.done("evaluate")
        return []

    def evaluate(self, loaders: Any, *, standalone: bool) -> dict[str, dict[str, float]]:
        """Make the framework evaluate, and fire the events of the evaluation with the results."""
        assert self._evaluates is not None  # `evaluate` is called only for hosts that have this function
        self.before()
        try:
            found = self._evaluates()
        except BaseException as error:
            # End training instead of only logging the error, because the framework's own evaluation has failed.
            mark_as_users(error)
            raise
        check_results(found, "evaluate= has returned {}")
        self._fire(found)
        return self.results

    def take(self) -> dict[str, float]:
        """Return an empty dict, because `evaluate` has already logged the results."""
        return {}

    def mark_done(self, ctx: Context, names: Iterable[str]) -> None:
        """Record that the requested evaluation was carried out."""
        self.undone = None
        ctx.control.done("evaluate")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the evaluation that is due but not done yet, if there is one."""
        return {"undone": asdict(self.undone) if self.undone is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the evaluation that was due but not done when `state_dict` was called, if there was one."""
        self.undone = DueEvaluation.from_state(state["undone"]) if state["undone"] is not None else None


class HostCheckpoints:
    """Passes callbacks' save requests to the framework in whose loop callsheet runs, because that framework writes the checkpoints.

    The host reports a checkpoint after the framework has written the checkpoint.
    """

    is_writing = False
    next_step = sys.maxsize

    def __init__(self, ctx: Context, spans: Spans, saves: Callable[[tuple[Request, ...]], None]) -> None:
        self.shared: dict[str, Stateful] = {}
        self.local: dict[str, Stateful] = {}
        self.optional: set[str] = set()
        self.stopped_by: Request | None = None
        self.requests: tuple[Request, ...] = ()
        """The callbacks' save requests that the framework's next checkpoint will satisfy."""
        self.loads: Callable[[], CheckpointInfo | None] | None = None
        """A function that loads the callbacks' states from the checkpoint from which the host resumes; None if it starts a new run.

        The function returns the checkpoint's `CheckpointInfo`, or None if there is no such checkpoint. It is called once and then
        forgotten, because it may hold a reference to the host, whose garbage collection ends the run.
        """
        self._ctx = ctx
        self._spans = spans
        self._saves = saves

    def durable(self) -> int:
        """Return 0 as the number of finished background saves, because the framework does not report any."""
        return 0

    def load(self, resume: str | os.PathLike[str] | None) -> None:
        """Load the callbacks' states. The framework has already loaded the model and the optimizer."""
        loads, self.loads = self.loads, None
        with self._spans.checkpoint_load:
            self._ctx.checkpoint = loads() if loads is not None else None
        self._ctx.close("on_checkpoint_load_end")

    def save(self, requests: tuple[Request, ...], path: str | None, **_: Any) -> CheckpointInfo | None:
        """Ask the framework to save. Return None, because the host reports the checkpoint later, when it has been written."""
        self.requests += requests
        try:
            self._saves(requests)
        except BaseException as error:
            mark_as_users(error)  # end training instead of only logging the error, because the framework's own save has failed
            raise
        return None

    def earlier_stop(self) -> Request | None:
        """Return None (no earlier request has stopped the run), because the framework decides whether a stopped run continues."""
        return None

    def check_writable(self) -> None:
        """Do nothing, because the framework writes the checkpoints."""

    def publish(self, durable: int) -> None:
        """Do nothing, because no checkpoint is being written in the background."""

    def prepare(self, step: int) -> None:
        """Do nothing, because the framework writes the checkpoints."""

    def finish(self) -> None:
        """Do nothing, because the framework has finished all checkpoints when the framework's training ends."""

    def close(self) -> None:
        """Do nothing, because the framework writes and finishes the checkpoints."""
