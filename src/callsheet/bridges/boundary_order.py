"""Decides which events may be fired between two steps, epochs or rounds of another framework's loop, to keep callsheet's order of events."""

from __future__ import annotations

from collections.abc import Callable

from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.core.context import Boundary, Context
from callsheet.run.boundaries import Boundaries
from callsheet.run.records import Records


class BoundaryOrder:
    """Checks the order of metrics records, evaluations and checkpoints between two steps of another framework's loop.

    Args:
        host: the name of the framework in messages.
        driver: the lifecycle driver of the training.
        eval_driver: the lifecycle driver of the evaluations.
        leave_evaluation: ends an evaluation that is still open because the framework has not reported its end.
    """

    def __init__(
        self,
        host: str,
        driver: LifecycleDriver,
        eval_driver: LifecycleDriver,
        leave_evaluation: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._driver = driver
        self.evaluations = eval_driver.opened
        """The open spans of evaluations. The first is always `run`, so an evaluation is open if there is a second one."""
        self._leave_evaluation = leave_evaluation
        self.fired: str | None = None
        """The letters (see `allows`) of the events that were fired at the current boundary. None if training is not at a boundary."""

    def reach(self) -> None:
        """Record that a step, epoch or round has ended: training is at a boundary until the next step, epoch or round begins."""
        self.fired = ""

    def leave(self) -> None:
        """Record that the next step, epoch or round begins. First end an evaluation that is still open."""
        if len(self.evaluations) > 1:
            self._leave_evaluation()
        self.fired = None

    def allows(self, what: str) -> bool:
        """Return whether the event `what` may be fired now: L is `on_log`, E an evaluation, D `on_checkpoint_due`, and S a save.

        At a boundary of training, L, D and S may each be fired once before E and once after E, in the lifecycle's order.
        """
        inside = self._driver.innermost
        if len(self.evaluations) > 1:
            return False
        if inside not in ("train", "round", "epoch"):
            return inside == "run"
        return self.fired is not None and self.fired + what in _BOUNDARY_PREFIXES

    def allows_save(self) -> bool:
        """Return whether the events of a checkpoint that the framework writes may be fired now."""
        # Try the order `DS` too: if `on_checkpoint_due` (D) has no listeners, D is not fired before the save (S).
        return self.allows("S") or self.allows("DS")

    def may_come(self, what: str) -> bool:
        """Return whether the event `what` may be fired now; see `allows`. If so, record that it is fired."""
        if not self.allows(what):
            return False
        if self.fired is not None:
            self.fired += what
        return True

    def is_barred(self, name: str) -> bool:
        """Return whether the evaluation, test or prediction `name` must not begin now. If so, log a warning."""
        if self._driver.innermost == "run" or (name == "eval_all" and self.may_come("E")):
            return False
        self._driver.warn_once(
            f"{self._host} begins {name} where callsheet does not expect it: in or before a step, or a second time between two steps. Its "
            "events are not fired; training continues."
        )
        return True

    def warn_of_checkpoint(self) -> None:
        """Log a warning that the framework writes a checkpoint at a place where the checkpoint's events cannot be fired."""
        self._driver.warn_once(
            f"{self._host} writes a checkpoint where callsheet does not expect it: within a step or an evaluation, or a second time "
            "between two steps. Its events are not fired; training continues."
        )

    def warn_of_missing_end(self, name: str) -> None:
        """Log a warning that the framework continues to train, but has not reported the end of the evaluation or test `name`."""
        self._driver.warn_once(
            f"{self._host} continues, and the end of {name} was not reported. It is ended here; training continues."
        )

    def excuse(self, what: str) -> None:
        """Log a warning that a handler is not called because the framework has provided no value for a field that the handler reads."""
        self._driver.warn_once(
            f"{what}, and {self._host} has not provided it there. The handler is skipped each time this happens; training continues."
        )


_BOUNDARY_PREFIXES = frozenset(
    whole[:length]
    for record in ("", "L")
    for first in ("D", "DS")
    for last in ("D", "DS")
    for whole in (f"{record}EL{last}", f"{record}E{last}", f"{record}{first}EL{last}", f"{record}{first}E{last}")
    for length in range(1, len(whole) + 1)
)
"""All prefixes of the event sequences that `lifecycle.BOUNDARY_ORDER` allows, with a letter for each event.

The events are a record (L), an evaluation (E), a due checkpoint (D), and its save (S).
"""


class HostedRecords(Records):
    """The metrics records of a run in another framework's loop.

    If a record is due where the lifecycle allows no `on_log`, no record is made, and the next record contains what was logged.
    """

    order: BoundaryOrder

    def fire_log(self, ctx: Context) -> None:
        if self.order.may_come("L"):
            super().fire_log(ctx)


class HostedBoundaries(Boundaries):
    """Carries out the actions that are due at the end of a step, epoch or round (a boundary) in another framework's loop.

    If a save is requested where the lifecycle allows no `on_checkpoint_due`, the request waits until after the next step.
    """

    order: BoundaryOrder
    waits_for_loop = False
    """Whether a checkpoint that is due at the end of an epoch waits for `fire_postponed`.

    A hand-written loop does more after the last batch, such as an evaluation and a step of the scheduler. A checkpoint that is saved
    before lacks it, and so does the resumed run.
    """
    _is_between_epochs = False  # whether a whole epoch has ended after the latest step at which something was due
    _is_postponed = False
    _saved_step = -1  # the step of the latest checkpoint that a callback or a signal requested

    def reach(self, boundary: Boundary) -> bool:
        self._is_between_epochs = boundary == "epoch" and self.waits_for_loop
        return super().reach(boundary)

    def fire_checkpoint_due(self, boundary: Boundary) -> None:
        if boundary == "epoch" and self._is_between_epochs:
            self._is_postponed = True
        elif self.order.may_come("D"):
            super().fire_checkpoint_due(boundary)

    def fire_postponed(self, *, is_loop_over: bool = False) -> None:
        """Fire `on_checkpoint_due` if it waits because an epoch has ended. The loop calls this when its part of the epoch is done.

        If the loop is over because it has seen that the run is preempted, it may not have done its part. So nothing is saved if a
        checkpoint of the epoch's last step exists, from which a resumed run does that part.
        """
        if not self._is_postponed:
            return
        self._is_postponed = False
        is_saved = self.is_preempted and self._saved_step == self._ctx.step
        if not (is_loop_over and is_saved) and self.order.may_come("D"):
            super().fire_checkpoint_due("epoch")

    def _save_requested(self) -> None:
        self._saved_step = self._ctx.step
        super()._save_requested()
