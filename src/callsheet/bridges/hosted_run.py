"""A run of callsheet's callbacks in another framework's loop."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from callsheet.bridges.boundary_order import HostedBoundaries, HostedRecords
from callsheet.bridges.count_check import CountCheck
from callsheet.bridges.data_position import DataPosition
from callsheet.bridges.epoch_position import EpochPosition
from callsheet.bridges.eval_events import EvalEvents
from callsheet.bridges.host_parts import Evaluates, HostCheckpoints, HostEvaluation
from callsheet.bridges.lifecycle_driver import LifecycleDriver
from callsheet.bridges.observed_run import ObservedRun
from callsheet.core.callback import Callback
from callsheet.core.callbacks_argument import manager_of
from callsheet.core.context import Boundary
from callsheet.core.control import SAVE_KINDS, Control, Request
from callsheet.core.lifecycle import EVENTS
from callsheet.core.manager import CallbackManager
from callsheet.core.ranks import Ranks, read_ranks
from callsheet.core.run_state import CheckpointInfo, TrainState
from callsheet.core.time import Time
from callsheet.errors import mark_as_users
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, LOG_INTERVAL, TIMEOUT_SECONDS
from callsheet.run.log_ranks import LogRanks
from callsheet.run.parts import Stateful
from callsheet.run.process_groups import ProcessGroups
from callsheet.run.run import run_info
from callsheet.run.run_guard import check_lock_timeout
from callsheet.run.run_names import check_folder, check_run_name, new_name
from callsheet.run.signals import SignalWatch
from callsheet.run.typed_state import Typed
from callsheet.trainer.arguments import duration, log_boundary

_CHECKPOINT_EVENTS = ("on_checkpoint_save_start", "on_checkpoint_save_end", "on_checkpoint_published")
"""The events of a checkpoint that the framework writes."""


class HostedRun(ObservedRun):
    """A run of callsheet's callbacks in another framework's loop.

    A host, the adapter for that framework, reports to `driver` how far the loop has come.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        model: the trained model as callbacks see it. With DDP, give the module inside the wrapper.
        optimizer, scheduler: those of the loop.
        host: the name of the framework in messages.
        run_name, runs_folder: the run's name, and the folder that contains the run's folder.
        config: the host's settings, plain data.
        max_duration: how long the loop will train, if that is known.
        log_interval: how often a metrics record is made.
        device: the model's device. None: the device of its first parameter.
        evaluates: makes the host evaluate, and returns the results by dataset name. None: the host cannot evaluate on request.
        able: the requests that the host can carry out, in addition to an evaluation.
        signals: the signals that preempt the run.
        save_in_background: see the Trainer.
        saves: makes the host write a checkpoint for the given save requests. None: callsheet writes the checkpoints.
        timeout_seconds: the run fails if a rank does not answer for this long.
        lock_timeout_seconds: how long to wait if another process trains in the run's folder.
        is_alone: whether this rank is observed without the others, so that no collective is called.
    """

    RECORDS = HostedRecords
    BOUNDARIES = HostedBoundaries
    records: HostedRecords
    boundaries: HostedBoundaries
    checkpoints: Any
    losses: Callable[[], Tensor | None] = staticmethod(lambda: None)
    """A function that returns the step's loss, or None. The host replaces the default, which returns None."""
    other_losses: Mapping[str, Tensor] = MappingProxyType({})
    """The losses of the current step, by name, that callbacks see in addition to the loss that `losses` returns."""
    step_skipped = False
    """Whether the optimizer has skipped the current step."""
    grad_norm: Any = None
    """The gradient norm of the step if the host knows it when `clip_gradients` ends, otherwise None."""
    counted = (0, 0)
    """The numbers of samples and tokens in the current step."""
    is_over = False
    """Whether training had to end when `end_step` last returned True."""
    _next_boundary = 0  # the next step after which something may be due, such as a metrics record, even without a request
    _is_dropping = False  # whether `drop_step` is ending a step that must not be counted

    def __init__(
        self,
        callbacks: CallbackManager | Callback | Iterable[Callback] | None,
        *,
        model: nn.Module,
        optimizer: Any = None,
        scheduler: Any = None,
        host: str = "this loop",
        run_name: str | None = None,
        runs_folder: str | os.PathLike[str] = "runs",
        config: Mapping[str, Any] | None = None,
        max_duration: str | Time | None = None,
        log_interval: str | int | Time = LOG_INTERVAL,
        device: torch.device | str | None = None,
        evaluates: Evaluates | None = None,
        able: Iterable[str] = ("stop", "save"),
        signals: Collection[str | int] = (),
        save_in_background: bool = False,
        saves: Callable[[tuple[Request, ...]], None] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
        is_alone: bool = False,
    ) -> None:
        check_run_name(run_name, None)
        check_folder("runs_folder", runs_folder)
        check_lock_timeout(lock_timeout_seconds)
        log_every = log_boundary(log_interval)
        manager = manager_of(callbacks)
        ranks, run_device = read_ranks(), torch.device(device) if device is not None else _device_of(model)
        groups = ProcessGroups(Ranks() if is_alone else ranks, run_device, timeout_seconds)
        name = run_name or groups.of_rank_zero(new_name())
        self.host, self.model = host, model
        self._optimizer, self._scheduler = optimizer, scheduler
        self._has_own_name = run_name is not None
        self.is_busy: Callable[[], bool] = partial(_is_other_and_alive, threading.current_thread())
        """A function that returns whether the loop may still be running.

        While it returns True, no other run of this process takes over the run's folder.
        """
        super().__init__(
            manager,
            run_info(name, runs_folder, ranks, run_device, config),
            model=model,
            state=TrainState(max_duration=duration(max_duration, 1) if max_duration is not None else None),
            control=Control({*able, *(["evaluate"] if evaluates is not None else [])}, is_shared=groups.size > 1, host=host),
            signals=SignalWatch(signals),
            groups=groups,
            log_every=log_every,
            device=run_device,
            log_ranks=LogRanks("zero", ranks),
            lock_timeout=lock_timeout_seconds,
            is_busy=lambda _: self.is_busy(),
        )
        self.parts: dict[str, Stateful] = {}
        """Objects whose states are saved in checkpoints, in addition to model, optimizer, scheduler and callbacks.

        Each rank saves its own states.
        """
        self._connect_parts(evaluates, saves, in_background=save_in_background)
        self.driver = self._make_driver()
        self.eval = EvalEvents(host, manager, self.ctx, self.driver, self.records.tally, self.evaluation.results)
        self.eval_driver = self.eval.driver
        self.made: dict[str, dict[str, Any]] = {}
        """Results, by dataset name, of the evaluation that the loop carried out within the current step.

        Its events are fired when the step has ended.
        """
        self.counts = CountCheck(host, self.ctx)
        """Compares callsheet's counts of steps and epochs with the framework's, if the host has called `counts.follow`."""
        self._order = self.eval.order
        self.records.order = self.boundaries.order = self._order
        self.ctx.excuse = self.eval.ctx.excuse = self._order.excuse
        self.lifetime.before_end = self.eval.leave

    def _connect_parts(
        self, evaluates: Evaluates | None, saves: Callable[[tuple[Request, ...]], None] | None, *, in_background: bool
    ) -> None:
        """Let `evaluates` carry out evaluations, and `saves` write checkpoints. If `saves` is None, callsheet writes them itself."""
        self.evaluation = HostEvaluation(self.ctx, evaluates, lambda results: self.eval.fire(results), is_resumed=saves is None)
        checkpoints = HostCheckpoints(self.ctx, self.spans, saves) if saves is not None else None
        self.connect(self.evaluation, checkpoints, in_background=in_background)

    @property
    def _writes_checkpoints(self) -> bool:
        """Whether callsheet writes the checkpoints, and not the framework."""
        return not isinstance(self.checkpoints, HostCheckpoints)

    def _make_driver(self) -> LifecycleDriver:
        """Create the driver that fires the events of training."""
        # A checkpoint contains the last step's loss. If callsheet writes checkpoints, handlers of all events may request them.
        # If the framework writes the checkpoints, only handlers of checkpoint events may read the last step's loss.
        # In a run without any handler, only a signal or the user's loop can request a checkpoint. It then contains no loss.
        may_read_loss = EVENTS if self._writes_checkpoints else _CHECKPOINT_EVENTS
        return LifecycleDriver(
            self.spans,
            {
                **dict.fromkeys(("on_train_start", "on_round_start", "on_fetch_start"), lambda: self._order.leave()),
                **dict.fromkeys(("on_epoch_end", "on_round_end"), self._reach_boundary),
                "on_train_end": lambda: self.eval.leave(),
                "on_epoch_start": self._prepare_epoch,
                "on_train_step_start": self._prepare_step,
                "on_forward_backward_end": self._set_loss,
                "on_clip_gradients_end": self._set_grad_norm,
                "on_optimizer_step_start": self.set_learning_rate,
                "on_optimizer_step_end": self._set_step_skipped,
                "on_train_step_end": self._complete_step,
            },
            step_passes=self._complete_step_without_listeners,
            is_recorded=lambda: self.records.are_read,
            is_loss_needed=lambda: any(getattr(self.manager.has_listeners, event) for event in may_read_loss),
        )

    # --- beginning and end ---

    def begin(self, resume: str | None = None, *, data_is_made: bool = True) -> None:
        """Begin the run.

        Acquire the lock of the run's folder, fire `on_run_start`, load the checkpoint that `resume` names, and fire
        `on_data_init_start`. With `data_is_made`, also fire `on_data_init_end`.

        Raises:
            RunInUseError: another process trains in the run's folder.
        """
        try:
            self._begin(resume, data_is_made=data_is_made)
        except Exception as error:
            if resume is not None:
                # Raise the error and do not only log it, because training must not begin from the start if a resume was requested.
                mark_as_users(error)
            raise

    def _begin(self, resume: str | None, *, data_is_made: bool) -> None:
        is_writing = self._writes_checkpoints or self.has_writing_callbacks
        self.start(locks=self._has_own_name and is_writing)
        shared: dict[str, Stateful] = {"state": self.state, "model": self.model, "tally": self.records.tally}
        for name, part in (("optimizer", self._optimizer), ("scheduler", self._scheduler)):
            if part is not None:
                shared[name] = Typed(part, rate_is_fixed=self._scheduler is None)
        local: dict[str, Stateful] = {
            "callbacks": self.callback_states,
            "records": self.records,
            "evaluation": self.evaluation,
            **self.parts,
        }
        self.checkpoints.optional.add("evaluation")
        self.load(shared, local, resume)
        for each in (self.ctx, self.eval.ctx):
            each.optimizer, each.scheduler = self._optimizer, self._scheduler
        self.driver.start("data_init")
        if data_is_made:
            self.driver.end("data_init")
        self.begin_training(marks=is_writing)
        self.boundaries.begin()

    def finish(self) -> None:
        """Fire the events that end training, carry out the callbacks' last requests, and end the run."""
        self.finish_training()
        self.lifetime.end()

    def finish_training(self) -> None:
        """Fire the events that end training, carry out the callbacks' last requests, and make a last metrics record.

        Unlike `finish`, do not end the run, because the host may still evaluate or test.
        """
        self.eval.leave()
        self.records.tally.stop()
        self.records.tally.update_timestamp(self.state)
        self.driver.end("train_step")
        self.boundaries.finish_save()
        self.counts.check()
        self.driver.end("train")
        self.manager.flush_lanes(self.ctx)
        self.records.fire_log(self.ctx)
        self.boundaries.finish()
        self.boundaries.conclude()

    def finish_undone(self, boundary: Boundary, position: EpochPosition | DataPosition) -> bool:
        """In a resumed run, carry out the evaluation that a signal prevented at the end of a step or epoch (`boundary`).

        The random states of the evaluation are those of the checkpoint. Return whether training is over after the evaluation.
        """
        undone = self.evaluation.undone
        if undone is None or undone.boundary != boundary or undone.step != self.ctx.step:
            return False
        self.driver.start("epoch" if boundary == "step" else "round")
        self._order.reach()  # training is at the boundary (end of a step or epoch) at which the checkpoint was saved
        with position.at_checkpoint():
            return self.boundaries.finish_undone(boundary)

    # --- after a step and an epoch ---

    def end_step(self) -> bool:
        """End the current step, and carry out what is due after it.

        Return whether anything was due or requested. If so, `is_over` says whether training has to end. After the first step, always
        return True.
        """
        self.driver.end_step()
        ctx, made = self.ctx, self.made
        if made or ctx.step >= self._next_boundary or self.control.pending or self.signals.received is not None:
            if made:
                self.made = {}
                self.fire_record()
                self._fire_evaluation(made)
            self.is_over = self.boundaries.reach("step")
            self._next_boundary = self.boundaries.next_step()
            return True
        if self.manager.has_listeners.on_checkpoint_due:
            self.boundaries.fire_checkpoint_due("step")
            # A stop that a handler has requested at `on_checkpoint_due` is carried out only at the end of the next step or epoch.
            self.is_over = False
            return self.control.pending
        return False

    def drop_step(self) -> None:
        """End the current step, if there is one, without counting it, because the loop has left it before the optimizer's step."""
        if self.driver.is_open("train_step"):
            self.step_skipped = self._is_dropping = True
            try:
                self.driver.end("train_step")
            finally:
                self._is_dropping = False
            self.ctx.step -= 1

    def close_epoch(self, *, is_whole: bool) -> None:
        """End the current epoch, but do not yet carry out the actions that are due after it, such as a save.

        The host carries out these actions later, after the evaluation of the epoch.
        """
        # A step is still open if the loop has left the step early. A fetch is still open if the data ran out.
        for span in ("train_step", "fetch"):
            self.driver.end(span)
        self.records.tally.update_timestamp(self.state)
        if is_whole:
            self.state.timestamp = self.state.timestamp.next_epoch()
        else:
            self.counts.leave_epoch()
        self.counts.check()
        if self.ctx.has("batch"):
            del self.ctx.batch
        self.driver.end("epoch")

    def end_epoch(self, *, is_whole: bool) -> bool:
        """End the current epoch. If it is complete, carry out what is due at its end, such as an evaluation.

        Return whether training must end.
        """
        self.close_epoch(is_whole=is_whole)
        return self.boundaries.reach("epoch") if is_whole else True

    # --- checkpoints that the framework writes ---

    def fire_checkpoint(
        self,
        path: str,
        write: Callable[[CheckpointInfo], Any],
        *,
        is_durable: bool = True,
        step: int | None = None,
        has_trained_weights: bool = False,
    ) -> CheckpointInfo:
        """Add the callbacks' states to a checkpoint that the framework has just written, and fire the checkpoint's events.

        Args:
            path: where the checkpoint is.
            write: adds the callbacks' states to the checkpoint.
            is_durable: whether the whole checkpoint is on the disk. If not, `publish` must be called as soon as it is.
            step: the step of the checkpoint. None: the last step.
            has_trained_weights: whether the framework has already written the model's trained weights. Then the callbacks' states are
                written before callbacks handle the save, because a callback such as `EMA` changes the weights for the save.
        """
        if not self.driver.is_open("train_step"):
            self.counts.check(epochs=False)
        ctx, checkpoints = self.ctx, self.checkpoints
        requests, checkpoints.requests = checkpoints.requests, ()
        kinds = [request.kind for request in requests]
        ctx.checkpoint = info = CheckpointInfo(
            path,
            self.state.timestamp.batch if step is None else step,
            self.state.timestamp.epoch,
            max(kinds, key=SAVE_KINDS.index, default="periodic"),
            train_loss=self.records.mean_loss(),
            val_losses={name: found["loss"] for name, found in self.evaluation.results.items() if "loss" in found},
            best_metric_key=next((request.metric for request in requests if request.metric), None),
            requested_by=tuple(dict.fromkeys(request.by for request in requests)),
        )
        # In the order of events, a save follows `on_checkpoint_due`. Without listeners, this event was not fired, so record it here.
        if not self.manager.has_listeners.on_checkpoint_due and self._order.allows("DS"):
            self._order.may_come("D")
        if not self._order.may_come("S"):
            self._order.warn_of_checkpoint()
            ctx.close("on_checkpoint_published")
            write(info)
            return info
        if has_trained_weights:
            write(info)
        with self.spans.checkpoint_save:
            if not has_trained_weights:
                write(info)
        ctx.close("on_checkpoint_save_end")
        if is_durable:
            self.publish(info)
        return info

    def publish(self, info: CheckpointInfo) -> None:
        """Fire `on_checkpoint_published`, because the framework has completely written the checkpoint."""
        ctx = self.ctx
        ctx.checkpoint = info
        self.manager.fire("on_checkpoint_published", ctx)
        ctx.close("on_checkpoint_published")

    # --- records and evaluations ---

    def fire_record(self) -> None:
        """Make a metrics record and fire `on_log`, if anything was logged since the last record."""
        self.records.tally.update_timestamp(self.state)
        self.records.fire_log(self.ctx)

    def report_evaluation(self, results: Mapping[str, Mapping[str, Any]]) -> bool:
        """Fire the events of an evaluation that the loop has carried out between two epochs, or outside training.

        A metrics record and a checkpoint may follow. Return whether training must end.
        """
        self.records.tally.update_timestamp(self.state)
        self._fire_evaluation(results)
        self._next_boundary = 0  # after an evaluation, the ranks exchange messages at the next step
        return self.boundaries.leave_evaluation()

    def _fire_evaluation(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        self.eval.fire(results, standalone=not self.driver.is_open("train"))
        self.records.fire_log(self.ctx)

    # --- functions that are called just before an event is fired ---

    def _reach_boundary(self) -> None:
        self.eval.leave()
        self._order.reach()

    def _prepare_epoch(self) -> None:
        self._order.leave()
        self.ctx.epoch = self.state.timestamp.epoch + 1
        self._next_boundary = 0  # after an epoch, the ranks exchange messages at the next step
        self.records.tally.start()

    def _prepare_step(self) -> None:
        order = self._order
        if len(order.evaluations) > 1:
            order.leave()
        order.fired = None  # as `leave` does, but without a function call, for speed
        self.ctx.step += 1
        self.step_skipped, self.grad_norm = False, None

    def _set_loss(self) -> None:
        loss = self.losses()
        if loss is not None:
            self.ctx.loss = loss

    def _set_grad_norm(self) -> None:
        self.ctx.grad_norm = self.grad_norm

    def set_learning_rate(self) -> None:
        """Set the context's learning rate to the learning rate that the current step uses."""
        if self._optimizer is not None:
            rate: Any = self._optimizer.param_groups[0].get("lr")  # None if the optimizer has no learning rate
            if isinstance(rate, Tensor):
                rate = rate.clone()  # copy the rate, because a scheduler changes the tensor in place
            self.ctx.learning_rate = self.records.learning_rate = rate

    def _set_step_skipped(self) -> None:
        self.ctx.step_skipped = self.step_skipped

    def _complete_step(self) -> None:
        ctx, loss = self.ctx, self._count_step()
        if loss is not None:
            ctx.loss, ctx.loss_dict = loss, (losses := {"loss": loss, **self.other_losses})
            if not self._is_dropping:
                self.records.add(losses, moved=not self.step_skipped)
        # Set `grad_norm` and `step_skipped` here too, because an event that sets them is not fired if it has no listeners.
        ctx.grad_norm, ctx.step_skipped = self.grad_norm, self.step_skipped
        # If the optimizer's step was skipped or had no listeners, the learning rate was not read yet.
        if not ctx.has("learning_rate"):
            self.set_learning_rate()

    def _complete_step_without_listeners(self) -> None:
        """Complete a step without listeners: count it, record its loss, delete its context fields. Faster than `_complete_step`."""
        ctx, loss = self.ctx, self._count_step()
        if self.driver.is_read:
            if loss is not None and not self._is_dropping:
                records = self.records
                if self.other_losses or self.step_skipped:
                    records.add({"loss": loss, **self.other_losses}, moved=not self.step_skipped)
                else:  # does the same as `records.add`, but saves two calls in every step
                    records.last_loss = loss
                    records.train_loss.add(loss)
            if self.step_skipped and not ctx.has("learning_rate"):
                self.set_learning_rate()
            # Assign all fields first, because `del` raises an AttributeError if a field has no value.
            ctx.loss, ctx.learning_rate = None, 0.0  # type: ignore[assignment]  # deleted below
            ctx.grad_norm, ctx.step_skipped = None, False
            del ctx.loss, ctx.learning_rate, ctx.grad_norm, ctx.step_skipped
        else:
            if not self.step_skipped:
                self.records.last_loss = loss
            ctx.grad_norm = None  # a host may have called `_set_grad_norm`, although the event has no listeners
            del ctx.grad_norm
        ctx.batch = None
        del ctx.batch

    def _count_step(self) -> Tensor | None:
        """Count the step, its samples and its tokens. Return the step's loss, or None if nothing reads it."""
        self._order.fired = ""  # as `reach` does, but without a function call, for speed
        if self._is_dropping:
            return self.losses()
        state, tally, now = self.state, self.records.tally, self.state.timestamp
        samples, tokens = self.counted
        state.previous_timestamp, state.timestamp = now, now.next_batch()
        tally.samples += samples
        tally.tokens += tokens
        return self.losses() if self.driver.is_loss_read else None


def _is_other_and_alive(thread: threading.Thread) -> bool:
    """Return whether a loop that began in `thread` may still be running: `thread` is alive and is not the current thread.

    A loop of the current thread counts as ended, because a framework does not report when an exception ends its loop.
    """
    return thread is not threading.current_thread() and thread.is_alive()


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in nn.Module.parameters(model)), torch.device("cpu"))
