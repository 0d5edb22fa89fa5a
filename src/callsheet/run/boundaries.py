"""Boundaries: the ends of steps, epochs and rounds (groups of epochs), where the requests of callbacks are carried out.

At a boundary, the ranks agree on requests, `on_log` is fired, evaluations run, and checkpoints are saved.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from callsheet.checkpoint.disk_thread import finish_deletions
from callsheet.core.context import Boundary, Context
from callsheet.core.control import Request
from callsheet.core.events import Event
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo, Outcome
from callsheet.core.time import Interval, TimeUnit
from callsheet.run.agreement import Agreement
from callsheet.run.lifetime import Lifetime, stop_reason
from callsheet.run.parts import CheckpointsPart, DueEvaluation, EvaluationPart
from callsheet.run.records import Records
from callsheet.run.run_guard import RunGuard

logger = logging.getLogger("callsheet")

# The run's counts of samples, tokens and seconds are updated only at metrics records and at the ends of epochs.
_UNITS_COUNTED_AT_RECORDS = frozenset({TimeUnit.SAMPLE, TimeUnit.TOKEN, TimeUnit.SECOND})


class Boundaries:
    """Carries out what is due after a step, an epoch or a round (group of epochs): logging, evaluations, checkpoints and requests.

    Every decision is based on values that all ranks share, so all ranks decide the same. Calling `reach` when
    nothing is due is harmless.
    """

    def __init__(
        self,
        manager: CallbackManager,
        ctx: Context,
        lifetime: Lifetime,
        agreement: Agreement,
        records: Records,
        evaluation: EvaluationPart,
        checkpoints: CheckpointsPart,
        guard: RunGuard,
    ) -> None:
        self._manager = manager
        self._ctx = ctx
        self._lifetime = lifetime
        self._agreement = agreement
        self._records = records
        self._evaluation = evaluation
        self._checkpoints = checkpoints
        self._guard = guard
        self._is_alone = ctx.run.world_size == 1
        self._next_due = 0  # before this step, only a metrics record can be due, so the other checks are skipped
        self.is_preempted = False
        """True once a signal has preempted the run and `on_preempt` has been fired."""

    @property
    def is_over(self) -> bool:
        """Whether training has reached its duration, was stopped, or is preempted."""
        return self._ctx.state.is_complete or self._ctx.control.stop_requested is not None or self._agreement.signal is not None

    def next_step(self) -> int:
        """Return the next step after which something may be due, such as a metrics record, an evaluation or a checkpoint.

        Units other than batches advance only at log boundaries and ends of epochs.
        """
        ctx = self._ctx
        step, longest = ctx.state.timestamp.batch, ctx.state.max_duration
        self._next_due = 0
        if self._evaluation.due(ctx, is_over=False):  # after a resume, an unfinished evaluation runs after the first step
            return step + 1
        if self._checkpoints.is_writing and self._is_alone:  # with several ranks, `Agreement` checks whether a save is done
            return step + 1
        ctx.control.is_rescheduled = False
        ctx.control.look_again()
        steps = [self._agreement.next_step, self._manager.next_step, self._checkpoints.next_step]
        moves_at_logs = longest is not None and longest.unit in _UNITS_COUNTED_AT_RECORDS
        if longest is not None and longest.unit is TimeUnit.BATCH:
            steps.append(int(longest.value))
        for schedule in self._evaluation.schedules.values():
            if schedule.every is not None:
                steps.append(self._next_of(schedule.every))
                moves_at_logs = moves_at_logs or schedule.every.every.unit in _UNITS_COUNTED_AT_RECORDS
        if not moves_at_logs:
            self._next_due = min(steps)
        return min(*steps, self._next_of(self._records.every))

    def _next_of(self, every: Interval) -> int:
        """Return the next step at which `every`, an interval such as "every 100 batches", may be due.

        For a unit that advances only at log boundaries, return `sys.maxsize`.
        """
        unit, now = every.every.unit, self._ctx.state.timestamp
        if unit is TimeUnit.BATCH:
            return int((every.index(now) + 1) * every.every.value)
        return now.batch + 1 if unit is TimeUnit.DURATION else sys.maxsize

    def reach(self, boundary: Boundary) -> bool:
        """At the end of a step, epoch or round: log, evaluate and save whatever is due. Return whether training is over."""
        ctx, records, agreement = self._ctx, self._records, self._agreement
        self._guard.raise_if_lost()
        if boundary == "step" and ctx.step < self._next_due and self._is_unread:
            self._manager.process_lane_messages(ctx)
            records.tally.update_timestamp(ctx.state)
            records.fire_log(ctx)
            self.fire_checkpoint_due(boundary)
            return False
        if boundary == "step":
            agreement.look(ctx.step)
        else:
            agreement.agree(ctx.step)
        self._manager.process_lane_messages(ctx)
        self._checkpoints.publish(agreement.published)
        self._checkpoints.prepare(ctx.step)
        self._preempt()
        logs = records.are_due(ctx)
        if logs or boundary != "step" or self.is_over or self._due():
            records.tally.update_timestamp(ctx.state)
        if self.is_over:  # the next record may be the last, so wait for values that callbacks in other threads are logging
            self._manager.flush_lanes(ctx)
        if logs or self.is_over or self._due():  # call `_due` again, because the updated counts may have reached `max_duration`
            records.fire_log(ctx)
            self._preempt()
        return self._end(boundary)

    def finish_undone(self, boundary: Boundary) -> bool:
        """After a resume, run the evaluation that was due but not done when the checkpoint was saved. Then save a checkpoint if one is due.

        Do this only if the evaluation was due at `boundary` (`step`, `epoch` or `round`). Otherwise return False.

        Return whether training is over after the evaluation.
        """
        undone = self._evaluation.undone
        return undone is not None and undone.boundary == boundary and self._end(boundary)

    def _end(self, boundary: Boundary) -> bool:
        """Evaluate and save what is due at the end of a step, epoch or round. Return whether training is over."""
        ctx = self._ctx
        if self._plan(boundary):
            self._fire_before_evaluation()
            with self._training_stopped():
                self._evaluate()
            self._agreement.agree(ctx.step)
            self._preempt()
        is_over = self.is_over
        self.fire_checkpoint_due(boundary)
        if boundary == "step" and ctx.step >= self._manager.next_step:
            self._manager.between_steps(ctx.step)
        return is_over  # as it was before `on_checkpoint_due`: a stop that was requested there takes effect at the next boundary

    def leave_evaluation(self) -> bool:
        """Carry out the requests that handlers have made during an evaluation between two epochs.

        Return whether training is over after that. This is a collective.
        """
        self._manager.process_lane_messages(self._ctx)
        self._agreement.agree(self._ctx.step)
        self._preempt()
        is_over = self.is_over
        self.fire_checkpoint_due("epoch")
        return is_over

    def fire_checkpoint_due(self, boundary: Boundary) -> None:
        """Fire `on_checkpoint_due`, at which callbacks request checkpoints, and save a checkpoint if one was requested."""
        if self._manager.has_listeners.on_checkpoint_due:
            self._ctx.boundary = boundary
            self._manager.fire(Event.CHECKPOINT_DUE, self._ctx)
            self._ctx.close("on_checkpoint_due")
        if self._ctx.control.save_requested is not None:
            with self._training_stopped():
                self._save_requested()

    def finish_save(self) -> None:
        """Before `on_train_end`, wait for the background save, so that `on_checkpoint_published` is fired first."""
        if self._checkpoints.is_writing:
            self._records.tally.stop()
            self._checkpoints.finish()

    def finish(self) -> None:
        """After training, carry out the requests, evaluations and saves that are left.

        Save a checkpoint that was requested after the last boundary, such as at `on_train_end`. Run the evaluation that a signal
        prevented, if it is still due. Wait for background saves.
        """
        self._manager.process_lane_messages(self._ctx)
        self._agreement.agree(self._ctx.step)
        self._preempt()
        if self._due():
            self._end("round")
            self._records.tally.stop()
        if self._ctx.control.save_requested is not None:
            self._save_requested()
        self._checkpoints.finish()
        finish_deletions()

    def begin(self) -> None:
        """Begin training, or stop at once if a callback stopped the run before it was resumed.

        The run is not stopped again if `max_duration` or that callback's settings have changed since.

        Raises:
            CheckpointError: callbacks request regular checkpoints, but the folder for checkpoints is not writable.
        """
        self._checkpoints.check_writable()
        self._checkpoints.stopped_by = None
        request = self._checkpoints.earlier_stop()
        if request is None:
            return
        ctx = self._ctx
        ctx.control.agree(request)
        if ctx.run.is_world_process_zero:
            logger.warning(
                "%s was stopped by %s at step %d: %s. The run is complete, and no further step is taken. To continue, change the settings of %s "
                "or remove it, or give a longer max_duration. To train from the start, give the run another name or folder",
                ctx.run.folder or ctx.run.name,
                request.by,
                ctx.step,
                request.why,
                request.by,
            )

    def conclude(self) -> None:
        """After training, set the run's outcome, unless a preemption signal has already set the outcome."""
        if self.is_preempted:
            return
        stop = self._checkpoints.stopped_by = self._ctx.control.stop_requested
        self._lifetime.outcome = Outcome.FINISHED if stop is None else Outcome.STOPPED
        if stop is not None:
            self._lifetime.reasons[Outcome.STOPPED] = stop_reason(stop)

    def evaluate(self, loaders: Mapping[str, Any], *, standalone: bool) -> dict[str, dict[str, float]]:
        """Evaluate the datasets in `loaders`, and fire `on_log` with the values that were logged during the evaluation."""
        results = self._evaluation.evaluate(loaders, standalone=standalone)
        self._records.fire_evaluation(self._ctx, self._evaluation.take())
        return results

    def save(self, requests: tuple[Request, ...] = (), path: str | None = None, *, waits: bool = False) -> CheckpointInfo | None:
        """Save a checkpoint for these requests. `requests` is empty if the user has called `Trainer.save_checkpoint`.

        Return None if another framework's loop saves the checkpoint later.
        """
        val_losses = {name: result["loss"] for name, result in self._evaluation.results.items() if "loss" in result}
        return self._checkpoints.save(requests, path, train_loss=self._records.mean_loss(), val_losses=val_losses, waits=waits)

    @property
    def _is_unread(self) -> bool:
        """Whether a metrics record that is due now can be discarded, because no callback reads it.

        False if a request is pending, a checkpoint is being written, or training is over.
        """
        return not (self._records.are_read or self._ctx.control.pending or self._checkpoints.is_writing or self.is_over)

    def _due(self) -> list[str]:
        """Return the names of the datasets whose evaluation is due.

        After a preemption signal, due evaluations do not run, but a checkpoint can store their names for the resumed run. A signal
        alone does not make an evaluation due.
        """
        if self.is_preempted and not self._evaluation.is_resumed:
            return []
        ctx = self._ctx
        is_over = ctx.state.is_complete or ctx.control.stop_requested is not None
        return self._evaluation.due(ctx, is_over)

    def _plan(self, boundary: Boundary) -> bool:
        """Record which evaluations are due. Checkpoints contain this record (a `DueEvaluation`) until the evaluations are done.

        Return whether to run the evaluations now.
        """
        due = self._due()
        undone = self._evaluation.undone
        if due and (undone is None or undone.boundary != boundary or undone.step != self._ctx.step):
            self._evaluation.undone = DueEvaluation(self._ctx.step, boundary, due)
        return bool(due) and self._agreement.signal is None

    def _fire_before_evaluation(self) -> None:
        """Fire `on_checkpoint_due` before an evaluation, so that a checkpoint can be saved first.

        If the run is resumed from that checkpoint, the event is not fired again.
        """
        undone = self._evaluation.undone
        if undone is not None and not undone.is_checkpoint_due_fired:
            undone.is_checkpoint_due_fired = True
            self.fire_checkpoint_due("before_eval")

    def _evaluate(self) -> None:
        undone = self._evaluation.undone
        assert undone is not None
        self.evaluate({name: self._evaluation.loaders[name] for name in undone.names}, standalone=False)
        # If a preemption signal has ended the evaluation early, do not record it as done, so that a resumed run repeats it.
        if self._agreement.signal is None or not self._evaluation.ends_at_signal:
            self._evaluation.mark_done(self._ctx, undone.names)

    def _save_requested(self) -> None:
        requests = self._ctx.control.save_requests
        self._ctx.control.done("save")
        self.save(requests, waits=self.is_preempted)

    def _preempt(self) -> None:
        """If a preemption signal has arrived, fire `on_preempt` once and request a checkpoint."""
        received = self._agreement.signal
        if received is None or self.is_preempted:
            return
        self.is_preempted = True
        self._manager.limit_lane_waits(self._agreement.seconds_left)  # the launcher will kill all ranks soon
        is_ctrl_c = received is signal.SIGINT
        outcome = self._lifetime.outcome = Outcome.INTERRUPTED if is_ctrl_c else Outcome.PREEMPTED
        self._lifetime.reasons[outcome] = f"signal {received.name}{' (Ctrl-C)' if is_ctrl_c else ''}"
        self._manager.fire(Event.PREEMPT, self._ctx)
        request = self._ctx.control.save_requested
        if request is None or request.kind != "preempt":  # a handler of `on_preempt` may already have made this request
            self._ctx.control.save(f"signal {received.name}", kind="preempt", replicated=True)

    @contextmanager
    def _training_stopped(self) -> Iterator[None]:
        """While the `with` block runs, stop the clock that measures the seconds of training."""
        self._records.tally.stop()
        yield
        self._records.tally.start()
