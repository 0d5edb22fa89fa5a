"""The run of a hand-written loop that iterates over `run.steps(...)`. This iterator fires the events around each batch."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from signal import Signals
from types import TracebackType
from typing import Any, Never, Self, TypedDict, Unpack

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from callsheet.bridges.data_position import DataPosition
from callsheet.bridges.giving_up import give_up
from callsheet.bridges.host_base import end_run
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.loop_arguments import check_results
from callsheet.bridges.loop_warnings import LoopWarnings
from callsheet.bridges.support_check import SupportCheck
from callsheet.bridges.training_hooks import TrainingHooks
from callsheet.bridges.unobserved_loop import UnobservedLoop
from callsheet.core.context import NO_VALUES, Across, Context, Loggable, Over
from callsheet.core.run_state import Outcome
from callsheet.errors import ConfigError, RequestRejected, mark_as_users
from callsheet.trainer.tasks import counts_of

logger = logging.getLogger("callsheet")

NO_BATCH: Any = object()
"""Marks the end of the data. None cannot mark it, because a batch may be None."""


class LogOptions(TypedDict, total=False):
    """The options of `AttachedRun.log`; see `Context.log`."""

    over: Over
    across: Across
    weight: float | Tensor | None


class AttachedRun:
    """The run that `callsheet.attach` returns. The user's loop iterates over `steps`, which fires the events around each batch."""

    def __init__(
        self,
        run: HostedRun,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        gradient_accumulation_steps: int,
        scaler: GradScaler | None,
        position: DataPosition,
        resume: str | None,
        strict: bool,
    ) -> None:
        self._run = run
        run.evaluation.before = run.eval.begin_all
        run.boundaries.waits_for_loop = True
        self._observe = partial(TrainingHooks, run, model, optimizer, scaler)
        self._hooks: Any = None  # set to the `TrainingHooks` when the `with` block starts
        self._removed_at_end: list[Any] = []  # everything that observes the loop; each has a method `remove()`
        self._batches_per_step = gradient_accumulation_steps
        self._resume = resume
        self._support = SupportCheck(run.manager, run.host, strict=strict)
        self._is_checked = False  # whether `_support` has checked which events were fired in the first step
        self._position = run.parts["place"] = position
        self._warnings = LoopWarnings(run)
        self._epoch: int | None = None  # the index of the epoch in the latest call of `steps`
        self._counts_epochs = False  # whether the loop iterates over `epochs()`
        self._is_iterating = False  # whether the loop is inside `steps`
        self._is_over = False
        self._has_exited = False  # whether the `with` block has ended
        self._unobserved: UnobservedLoop | None = None  # set when an error in callsheet has ended the run
        run.fails_by(self._give_up)
        self._support.before_run((), run.control)

    @property
    def ctx(self) -> Context:
        """The context that the callbacks receive."""
        return self._run.ctx

    @property
    def is_over(self) -> bool:
        """Whether training is over: it has reached `max_duration`, a callback has stopped it, or a signal has preempted it.

        In these cases `steps` yields no more batches.
        """
        return self._is_over or (self._unobserved is not None and self._unobserved.is_over)

    @property
    def preempted(self) -> bool:
        """Whether a signal other than Ctrl-C has preempted the run.

        A checkpoint was saved. If the signal arrived after an epoch's last step, it is saved when the loop continues or ends.
        """
        return self._run.lifetime.outcome is Outcome.PREEMPTED

    def log(self, values: Loggable = NO_VALUES, *misplaced: Never, **options: Unpack[LogOptions]) -> None:
        """Log numbers for the next metrics record; see `Context.log`."""
        if self._unobserved is None:
            self._run.ctx.log(values, *misplaced, **options)

    def evaluated(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Fire the start and end events of an evaluation that the loop has already carried out.

        `results` are the metrics by dataset name: `{"validation": {"loss": 1.2}}`.
        """
        check_results(results, "evaluated({})")
        if self._unobserved is not None:
            return
        if self._is_iterating:
            made = self._run.made
            for name, found in results.items():
                made[name] = {**made.get(name, {}), **found}
            return
        try:
            self._close_epoch(continues=True)
            if self._run.eval.order.allows("E"):
                self._is_over |= self._run.report_evaluation(results)
            else:
                self._warnings.warn_of_ignored_results()
        except Exception as error:
            self._give_up(error)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the index of each epoch, from 0 to `count - 1`. A resumed run leaves out the epochs that are complete."""
        if not hasattr(count, "__index__"):
            raise ConfigError(f"epochs({count!r}): give the number of epochs, a whole number")
        self._counts_epochs = True
        state = self._run.state
        is_resumed = self._epoch is None and state.baseline.batch > 0
        if is_resumed and not self.is_over and state.timestamp.epoch >= count:
            self._warnings.warn_of_complete_run(
                f"all {count} epochs of run.epochs({count}) are done", f"run.epochs a number above {count}"
            )
        epoch = state.timestamp.epoch
        while not self.is_over and epoch < count:
            yield epoch
            if self._unobserved is None:
                if not self.is_over and state.timestamp.epoch == epoch and self._run.ctx.step == state.baseline.batch:
                    raise RequestRejected(
                        "an epoch of run.epochs() has ended without a step: take its batches from run.steps(dataloader)"
                    )
                try:
                    self._finish_epoch(is_over=self.is_over)
                except Exception as error:
                    self._give_up(error)
            epoch = max(epoch + 1, state.timestamp.epoch)  # an epoch without steps is not counted in the timestamp

    def steps(self, dataloader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of one epoch.

        The loop must train on each batch before it requests the next. A resumed run leaves out the batches that it has trained on.

        Raises:
            RequestRejected: `steps` is called inside another call of `steps`, or outside the `with` block.
        """
        if (self._hooks is None or self._has_exited) and self._unobserved is None:
            message = "steps() after the run's end" if self._has_exited else "steps() before the run has begun"
            raise RequestRejected(f"{message}: write `with callsheet.attach(...) as run:` around the loop")
        if not self._begin_epoch():
            return
        run, driver, ctx, position, hooks = self._run, self._run.driver, self._run.ctx, self._position, self._hooks
        batches: Iterator[Any] | None = None
        group: list[Any] = []  # the batches of the current step
        given = 0  # how many batches of `group` the loop has received
        self._is_iterating = True
        try:
            if self._unobserved is None:
                self._is_over = run.finish_undone("epoch", position)
                if self._is_over:
                    return
                driver.start("epoch")
                batches = position.begin(dataloader, run.state.timestamp.epoch)
                self._is_over = run.finish_undone("step", position)
            while not self._is_over and self._unobserved is None:
                group, given = [], 0
                self._fetch(batches, group)  # type: ignore[arg-type]
                if not group:
                    break
                driver.start_step()
                run.counted = counts_of(group[0])
                if len(group) > 1:
                    samples, tokens = zip(*map(counts_of, group), strict=True)
                    run.counted = (sum(samples), sum(tokens))
                hooks.optimizer.has_stepped, hooks.backward.total = False, None
                hooks.backward.is_on, has_listeners = True, hooks.listens_to_microbatch
                position.taken += len(group)  # count the batches before the loop gets them, because the loop may `break`
                for batch in group:
                    ctx.batch = batch
                    if has_listeners:
                        ctx.microbatch = batch
                        driver.start("microbatch")
                        batch = ctx.microbatch
                        given += 1
                        yield batch
                        driver.end("microbatch")
                    else:
                        given += 1
                        yield batch
                    if given < len(group) and hooks.optimizer.has_stepped:
                        self._warnings.warn_of_early_step(given, self._batches_per_step)
                    if self._unobserved is not None:
                        break  # type: ignore[unreachable]  # a hook may have called `_give_up` after an error
                else:
                    hooks.backward.is_on = False
                    self._end_step()
            self._end_epoch()
        except Exception as error:
            self._give_up(error)
        finally:
            self._is_iterating = False
        yield from self._rest_of_epoch(dataloader, batches, group, given)

    def _begin_epoch(self) -> bool:
        """Begin the next epoch and return True, or return False if training is over."""
        if self._is_iterating:
            raise RequestRejected("steps() inside steps(): an epoch has to end before the next begins")
        if self._unobserved is None:
            try:
                self._finish_epoch()
            except Exception as error:
                self._give_up(error)
        if self._unobserved is not None:
            self._unobserved.begin_epoch()
        if self.is_over:
            self._warnings.warn_of_end()
            return False
        state = self._run.state
        if self._epoch is None and state.baseline.epoch and not self._counts_epochs and state.max_duration is None:
            self._warnings.warn_of_repeated_epochs()
        self._epoch = state.timestamp.epoch
        return True

    def _fetch(self, batches: Iterator[Any], group: list[Any]) -> None:
        """Append the batches of one step to `group`: `gradient_accumulation_steps` batches, or fewer at the end of the epoch."""
        driver, ctx = self._run.driver, self._run.ctx
        if driver.listen():
            self._hooks.listen()
        has_listeners = not driver.spans["fetch"].has_no_listeners
        for _ in range(self._batches_per_step):
            if has_listeners:
                driver.start("fetch")
            try:
                batch = next(batches, NO_BATCH)
            except Exception as error:
                # End training instead of only logging the error, because training cannot continue without data.
                mark_as_users(error)
                raise
            is_batch = batch is not NO_BATCH
            ctx.batch = batch if is_batch else None
            if is_batch:
                # Append the batch before `on_fetch_end`, so that the batch is not lost if a callback fails at that event.
                group.append(batch)
            if has_listeners:
                driver.end("fetch")
                if is_batch:
                    group[-1] = ctx.batch
            if not is_batch:
                self._position.is_exhausted = True
                break

    def _end_step(self) -> None:
        run = self._run
        run.step_skipped = not self._hooks.optimizer.has_stepped
        if run.end_step():
            self._is_over = run.is_over
        if self._is_checked:
            return
        if run.step_skipped and run.driver.is_loss_read and self._hooks.backward.total is None:
            run.driver.synthesized.clear()  # the loop has skipped the batch, so check a later step
        else:
            self._is_checked = True
            message = self._without_step if run.step_skipped else ""
            self._support.after_first_step(run.driver, may_skip_step=self._hooks.is_scaled, without_step=message)

    @property
    def _without_step(self) -> str:
        """Return the error message for a loop that has not called `optimizer.step()` in its first training step."""
        batches = self._batches_per_step
        return (
            f"the loop has not stepped the optimizer in its first {f'{batches} batches' if batches > 1 else 'batch'}; set "
            "gradient_accumulation_steps= to the number of batches of a step, and give attach the optimizer that the loop steps"
        )

    def _end_epoch(self) -> None:
        """End the epoch, unless an error in callsheet has ended the run. Count the epoch as complete if all its batches were used."""
        if self._unobserved is None:
            if is_whole := self._position.is_at_end:
                self._position.end()
            self._is_over |= self._run.end_epoch(is_whole=is_whole)

    def _finish_epoch(self, *, is_over: bool = False) -> None:
        """Save a checkpoint that is due at the end of the epoch, because the loop has done all that it does after the epoch's last step.

        If training is not over, first close the epoch, because the loop may have left `steps` with `break`.
        """
        if not is_over:
            self._close_epoch(continues=True)
        self._run.boundaries.fire_postponed()

    def _close_epoch(self, *, continues: bool) -> None:
        """End the step and the epoch that are still open because the loop has left them with `break`.

        `continues` says whether training may continue after this epoch.
        """
        run = self._run
        if run.driver.is_open("train_step"):
            self._end_step()
        if run.driver.is_open("epoch"):
            if continues:
                self._position.end()  # reset the position before the epoch ends, because the end of an epoch may write a checkpoint
            self._is_over = run.end_epoch(is_whole=continues) and (continues or self._is_over)

    # --- after an error in callsheet ---

    def _give_up(self, error: Exception) -> None:
        """End the run because of an error in callsheet itself, not in the user's code. Training continues without callbacks."""
        if self._unobserved is not None:  # the run has already ended because of an earlier error
            raise error
        was_in_step = self._run.driver.is_open("train_step")
        give_up(self._run, error)  # `give_up` raises the error if the error comes from the user's code
        self._unobserved = UnobservedLoop(self._run, self._ends_step, self._epoch, was_in_step=was_in_step)
        self._release()

    def _ends_step(self, given: int) -> bool:
        """Return whether `given` batches make a complete step."""
        return given >= self._batches_per_step

    def _rest_of_epoch(
        self, dataloader: Iterable[Any], batches: Iterator[Any] | None, group: list[Any], given: int
    ) -> Iterator[Any]:
        """If an error in callsheet has ended the run, yield the epoch's remaining batches; see `UnobservedLoop.rest_of_epoch`."""
        if self._unobserved is not None and not self.is_over:
            if batches is None:
                batches = self._position.begin_unobserved(dataloader, self._run.state.timestamp.epoch)
            yield from self._unobserved.rest_of_epoch(batches, group, given)

    def _release(self) -> None:
        end_run(self._run, self._removed_at_end)

    # --- the `with` block ---

    def __enter__(self) -> Self:
        if self._has_exited:
            raise RequestRejected(
                "this run has ended; call callsheet.attach again for another run, with resume='auto' to continue"
            )
        run = self._run
        run.is_busy = lambda: True  # no other run of this process may use the run's folder before the `with` block ends
        try:
            try:
                self._begin()
            except Exception as error:
                if self._resume is not None:  # a resume was requested, so training must not start from the beginning
                    raise
                self._give_up(error)
        except BaseException as error:
            run.fail(error)
            self._release()
            raise
        self._is_over = run.boundaries.is_over
        if run.control.stop_requested is not None:
            self._warnings.is_end_logged = True  # `run.begin` has already logged which callback stopped the run before the resume
        elif run.state.is_complete and run.state.baseline.batch:
            self._warnings.warn_of_complete_run(f"it has reached max_duration, {run.state.max_duration}", "a longer max_duration")
        return self

    def _begin(self) -> None:
        self._run.begin(self._resume)
        self._hooks = self._observe()
        self._removed_at_end.append(self._hooks)
        self._run.signals.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        run = self._run
        try:
            try:
                if error is None:
                    self._finish()
                elif isinstance(error, SystemExit) and self.preempted and self._unobserved is None:
                    run.boundaries.fire_postponed(is_loop_over=True)  # the loop exits on all ranks because the run is preempted
            except BaseException as raised:
                run.fail(raised)
                raise
            if error is not None:
                run.fail(error)
        finally:
            self._has_exited = True
            self._release()
            self._position.release()
        is_interrupted = self._unobserved is not None and run.signals.received is Signals.SIGINT
        if error is None and (is_interrupted or run.lifetime.outcome is Outcome.INTERRUPTED):
            raise KeyboardInterrupt

    def _finish(self) -> None:
        if self._unobserved is not None:
            return
        if self._epoch is None and not (self._is_over or self._warnings.is_end_logged):
            logger.warning(
                "callsheet.attach has observed no step: take the batches from run.steps(dataloader) within the `with` block"
            )
        try:
            self._close_epoch(continues=False)
            self._run.boundaries.fire_postponed(is_loop_over=True)
            # In a resumed run, `finish` may carry out an evaluation that a signal prevented before the resume.
            with self._position.at_checkpoint():
                self._run.finish()
        except Exception as error:
            self._give_up(error)
