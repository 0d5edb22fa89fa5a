"""Runs callsheet's callbacks in torchtnt's loops, as one callback of torchtnt."""

from __future__ import annotations

import io
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torchtnt.framework.callback import Callback as TorchTNTCallback
from torchtnt.framework.evaluate import evaluate
from torchtnt.framework.state import EntryPoint, State
from torchtnt.utils.progress import estimated_steps_in_epoch

from callsheet.bridges.count_check import Counts
from callsheet.bridges.epoch_position import EpochPosition, warn_if_not_restored
from callsheet.bridges.eval_events import EVALUATED
from callsheet.bridges.forward_hooks import ForwardHooks
from callsheet.bridges.host_base import Callbacks, HostBase, in_a_run, observing
from callsheet.bridges.host_states import own_state, restore_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.loop_arguments import without_ddp
from callsheet.bridges.torchtnt.events import NOT_FIRED
from callsheet.bridges.torchtnt.internals import HOST, PACKAGE
from callsheet.bridges.torchtnt.unit import Fetches, MeanLosses, duration_of, one_of_unit
from callsheet.bridges.training_hooks import TrainingHooks
from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo
from callsheet.core.time import Time
from callsheet.errors import CheckpointError, FieldNotAvailable, NotSupported
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, LOG_INTERVAL
from callsheet.run.signals import PreemptSignals, signals_of
from callsheet.trainer.tasks import counts_of

logger = logging.getLogger("callsheet")


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    metrics: Iterable[str] = (),
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    resume: str | os.PathLike[str] | None = None,
    log_interval: str | int | Time = LOG_INTERVAL,
    preempt_signals: PreemptSignals = (),
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> TorchTNTHost:
    """Wrap the callbacks in one torchtnt callback, for `fit(unit, ..., callbacks=[host([...])])`, `train`, `evaluate` or `predict`.

    Each call of these four functions is one run. `ctx.batch` is what the unit's `get_next_train_batch` returns. The host observes
    the forward pass with hooks on the unit's module, the loss in `backward`, and the optimizer's step with hooks on the
    optimizer. If the unit steps its optimizer only every few batches, these batches form one step.

    If a callback requests a stop, torchtnt's loop ends. If it requests an evaluation during `fit`, the host calls torchtnt's
    `evaluate`. If it requests a checkpoint, the host writes one in callsheet's format, with everything that the unit tracks. To
    save the callbacks' states in torchtnt's own checkpoints too, assign the host to the unit: `unit.callsheet = host([...])`.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        strict: whether to raise an error if a callback listens to an event that is never fired. False: a warning is logged.
        metrics: names of attributes of the unit. Their values are added to the results of each evaluation, in addition to the
            loss that `eval_step` returns.
        run_name: the run's name.
        runs_folder: the folder that contains the run's folder, in which checkpoints are written.
        resume: `"auto"` resumes from the newest valid checkpoint of this run, if there is one; a path resumes from that checkpoint. None
            starts a new run, or resumes from what torchtnt has restored.
        log_interval: how often a metrics record is made; an integer means batches.
        preempt_signals: names of the signals that preempt the run: it saves a checkpoint and ends.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.

    Returns:
        A callback of torchtnt.

    Raises:
        NotSupported: a callback cannot work in torchtnt's loop, see `strict`; or the unit's `train_step` takes an iterator; or
            the unit tracks several modules or optimizers, of which none is named `module` or `optimizer`.
    """
    return TorchTNTHost(
        callbacks,
        strict=strict,
        metrics=tuple(metrics),
        resume=os.fspath(resume) if resume is not None else None,
        run_name=run_name,
        runs_folder=runs_folder,
        log_interval=log_interval,
        signals=signals_of(preempt_signals),
        lock_timeout_seconds=lock_timeout_seconds,
    )


class TorchTNTHost(HostBase, TorchTNTCallback):  # type: ignore[misc]  # mypy does not read torchtnt's types
    """The torchtnt callback that `host` returns: it fires callsheet's events in torchtnt's loops.

    Make it with `host`, which has other arguments.
    """

    _STOPS_IF_PREEMPTED = True
    _PACKAGE, _INTERNALS = PACKAGE, HOST
    _run: HostedRun | None = None

    def __init__(self, callbacks: Callbacks, *, metrics: tuple[str, ...], resume: str | None, **options: Any) -> None:
        super().__init__(callbacks, **options)
        self._metrics = metrics
        self._resume_path = resume
        self._restored: dict[str, Any] | None = None
        self._steps_fired = 0  # torchtnt's count of steps at the last step's end; saved with the callbacks' states

    # --- the run ---

    def _begin(self, state: State, unit: Any) -> HostedRun:
        self._forget_earlier_run()
        module = one_of_unit(unit.tracked_modules(), "module")
        if module is None:
            raise NotSupported(
                "the torchtnt unit tracks no module, so callbacks would have no model; assign the module to unit.module"
            )
        is_training = state.train_state is not None
        optimizer = one_of_unit(unit.tracked_optimizers(), "optimizer") if is_training else None
        scheduler = one_of_unit(unit.tracked_lr_schedulers(), "lr_scheduler") if is_training else None
        self._accumulate = getattr(unit, "gradient_accumulation_steps", 1)
        self._accumulates = self._accumulate > 1  # whether a step has several batches
        me = weakref.proxy(self)
        self._run = run = HostedRun(
            self.manager,
            model=without_ddp(module),
            optimizer=optimizer,
            scheduler=scheduler,
            host="torchtnt",
            config={"entry_point": state.entry_point.name, "unit": type(unit).__qualname__},
            max_duration=duration_of(state, self._accumulate),
            evaluates=(lambda: me._evaluate(state, unit)) if state.entry_point is EntryPoint.FIT else None,
            able=("stop", "save") if is_training else (),
            **self._run_options,
        )
        if state.eval_state is not None:
            run.state.evaluators = (EVALUATED,)
        self._position = EpochPosition()
        known = {id(self), id(module), id(optimizer), id(scheduler)}
        run.parts = {f"unit_{name}": part for name, part in unit.app_state().items() if id(part) not in known} | {
            "place": self._position
        }
        self._training = training = TrainingHooks(run, module, optimizer, getattr(unit, "grad_scaler", None))
        self._has_optimizer = optimizer is not None
        if state.entry_point is EntryPoint.PREDICT:
            self._eval_hooks = ForwardHooks(run.driver, run.ctx, module, "predict")
        else:
            self._eval_hooks = ForwardHooks(run.eval.driver, run.eval.ctx, module, "eval")
        hooks = [training, self._eval_hooks, Fetches(unit, self._fetchers())]
        self._waiting = ""  # "step" or "epoch" if the actions after its end wait for torchtnt's evaluation, otherwise empty
        self._is_exhausted = self._fires_eval = False
        self._losses = MeanLosses()
        self._batch: Any = None
        self._progress: Any = getattr(unit, "train_progress", None)  # stored, because reading an attribute of a unit is slow
        self._evaluates_every = state.eval_state.evaluate_every_n_steps if state.eval_state is not None else None
        if self._restored is not None:
            run.checkpoints.loads = lambda: self._load_restored(run, unit)
        self._begin_run(run, hooks, NOT_FIRED, resume=self._resume_path)
        if is_training and self._progress is not None:
            run.counts.follow(lambda: me._read_counts())
        return run

    def _read_counts(self) -> Counts:
        """Return torchtnt's counts of steps and epochs.

        torchtnt counts batches, so with gradient accumulation the number of steps is None.
        """
        progress = self._progress
        return Counts(None if self._accumulates else progress.num_steps_completed, progress.num_epochs_completed)

    def on_exception(self, state: State, unit: Any, exc: BaseException) -> None:
        """End the run of callsheet's callbacks as failed after an exception has left torchtnt's loop."""
        self._fail(exc)

    # --- training ---

    @observing
    def on_train_start(self, state: State, unit: Any) -> None:
        """Begin a run of callsheet's callbacks when torchtnt begins to train."""
        run = self._begin(state, unit)
        if run.ctx.step:
            warn_if_not_restored(state.train_state.dataloader, run.host)
        run.driver.start("round")
        run.finish_undone("epoch", self._position)
        if self._position.to_skip:  # if the run resumes within an epoch, torchtnt does not report the epoch's start
            self._position.begin()
            run.driver.start("epoch")
            run.finish_undone("step", self._position)
        self._stop_if_asked(run, state)

    @in_a_run
    def on_train_epoch_start(self, run: HostedRun, state: State, unit: Any) -> None:
        self._position.begin()
        self._is_exhausted = False
        run.driver.start("epoch")

    def _fetch_batch(self, fetch: Callable[[State, Iterator[Any]], Any], state: State, batches: Iterator[Any]) -> Any:
        """Call the unit's `get_next_train_batch`. Return its batch or, if a callback has replaced this batch, the new one."""
        run, position = self._run, self._position
        if run is None:
            return fetch(state, batches)
        while position.to_skip:
            fetch(state, batches)
            position.to_skip -= 1
            if not position.to_skip:
                position.end_skipping()
        is_started = self._begin_fetch(run)
        try:
            batch = fetch(state, batches)
        except StopIteration:
            self._is_exhausted = True
            self._end_fetch(run, None, is_started=is_started)
            raise
        if batch is batches:
            raise NotSupported("train_step takes an iterator, so the host cannot see its batches; let train_step take a batch")
        position.taken += 1
        return self._end_fetch(run, batch, is_started=is_started)

    @observing
    def _begin_fetch(self, run: HostedRun) -> bool | None:
        """Fire `on_fetch_start` for the first batch of a step, if this event has listeners. Return whether the event was fired."""
        driver = run.driver
        is_started = not driver.spans["train_step"].is_open
        if is_started:
            if driver.listen():
                self._training.listen()
            is_started = not driver.spans["fetch"].has_no_listeners
            if is_started:
                driver.start("fetch")
        run.ctx.batch = None
        self._training.optimizer.has_strayed = False
        return is_started

    def _end_fetch(self, run: HostedRun, batch: Any, *, is_started: bool | None) -> Any:
        """Fire `on_fetch_end` if `is_started` is true. Return the batch, or the batch with which a callback has replaced it."""
        try:
            run.ctx.batch = batch
            if is_started:
                run.driver.end("fetch")
            return run.ctx.batch
        except BaseException as error:
            self._leave(error)
            return batch

    def _fetch_eval_batch(self, fetch: Callable[[State, Iterator[Any]], Any], state: State, batches: Iterator[Any]) -> Any:
        """Call the unit's `get_next_eval_batch` or `get_next_predict_batch`, and store the batch until its step starts."""
        self._batch = batch = fetch(state, batches)
        return batch

    def _fetchers(self) -> dict[str, Callable[..., Any]]:
        evaluated = dict.fromkeys(("get_next_eval_batch", "get_next_predict_batch"), self._fetch_eval_batch)
        return {"get_next_train_batch": self._fetch_batch, **evaluated}

    def on_train_step_start(self, state: State, unit: Any) -> None:
        """Start a microbatch. If it is the first one of a step, start the step first."""
        run = self._run
        if run is None:
            return
        try:
            driver, ctx, training = run.driver, run.ctx, self._training
            if training.backward.is_on:
                if self._progress.num_steps_completed == self._steps_fired:
                    return  # torchtnt has reported the start of the same batch twice
                run.counts.doubt()  # torchtnt has not reported the end of the last batch
            try:
                counted = counts_of(ctx.batch)
            except FieldNotAvailable:
                # The end of a step deletes `ctx.batch`. So torchtnt reports the start of an ended step again: fire nothing.
                return
            if driver.spans["train_step"].is_open:
                run.counted = run.counted[0] + counted[0], run.counted[1] + counted[1]
            else:
                driver.start_step()
                run.counted = counted
                training.backward.total = None
                training.optimizer.has_stepped = not self._has_optimizer
            training.backward.is_on = True
            if training.listens_to_microbatch:
                ctx.microbatch = ctx.batch
                driver.start("microbatch")
        except Exception as error:
            self._leave(error)

    def on_train_step_end(self, state: State, unit: Any) -> None:
        """End the microbatch. If the optimizer has stepped, or the loss scaler has skipped the optimizer's step, also end the step."""
        run = self._run
        if run is None:
            return
        try:
            progress, training, earlier = self._progress, self._training, self._steps_fired
            self._steps_fired = steps = progress.num_steps_completed
            if not training.backward.is_on:
                if steps == earlier:
                    return  # torchtnt has reported the end of the same batch twice
                run.counts.doubt()  # torchtnt has not reported the start of this batch
                if not run.driver.is_open("train_step"):
                    return
            training.backward.is_on = False
            if not training.optimizer.has_stepped:
                would = training.is_scaled and progress.num_steps_completed_in_epoch % self._accumulate == 0
                if training.optimizer.has_strayed:  # torchtnt reported the batch's start after the optimizer's step
                    run.counts.doubt()
                elif not would:
                    self._accumulates = True
                    run.driver.end("microbatch")
                    return
            run.step_skipped = not training.optimizer.has_stepped
            every = self._evaluates_every
            if every and steps % every == 0:
                run.driver.end_step()
                self._waiting = "step"
            else:
                self._end_step(run, state)
        except Exception as error:
            self._leave(error)

    def _end_step(self, run: HostedRun, state: State) -> None:
        if run.end_step():
            self._after_step(run, state, may_skip_step=self._training.is_scaled)

    @in_a_run
    def on_train_epoch_end(self, run: HostedRun, state: State, unit: Any) -> None:
        """End the epoch, also if torchtnt has left the epoch before the last batch."""
        position, train = self._position, state.train_state
        length = estimated_steps_in_epoch(
            train.dataloader, num_steps_completed=0, max_steps=None, max_steps_per_epoch=train.max_steps_per_epoch
        )
        progress = unit.train_progress
        is_stopped = state.should_stop or (train.max_steps is not None and progress.num_steps_completed >= train.max_steps)
        is_whole = self._is_exhausted or position.taken >= length or not is_stopped
        position.end()
        run.close_epoch(is_whole=is_whole)
        every = state.eval_state.evaluate_every_n_epochs if state.eval_state is not None else None
        self._waiting = "epoch" if is_whole else ""
        if not every or unit.train_progress.num_epochs_completed % every or state.should_stop:
            self._reach(run, state)

    def _reach(self, run: HostedRun, state: State) -> None:
        """Carry out the actions after a step or epoch, such as a save, if they were postponed until torchtnt's evaluation ends."""
        waiting, self._waiting = self._waiting, ""
        if waiting == "step":
            self._end_step(run, state)
        elif waiting == "epoch":
            run.boundaries.reach("epoch")
            self._stop_if_asked(run, state)

    def _stop(self, loop: State) -> None:
        if not loop.should_stop:
            loop.stop()

    @observing
    def on_train_end(self, state: State, unit: Any) -> None:
        """End the run of callsheet's callbacks when torchtnt has finished training."""
        self._finish()

    # --- evaluation ---

    def _evaluate(self, state: State, unit: Any) -> dict[str, dict[str, float]]:
        """Run the evaluation that a callback requested. Return an empty dict, because torchtnt's evaluation events report the results."""
        loop = state.eval_state
        evaluate(unit, loop.dataloader, max_steps_per_epoch=loop.max_steps_per_epoch, callbacks=[self], timer=state.timer)
        return {}

    @observing
    def on_eval_start(self, state: State, unit: Any) -> None:
        """Start an evaluation. Outside training, first begin a run for the evaluation."""
        run = self._run
        if run is None and self._has_given_up and state.train_state is not None:
            return
        if run is None or (state.train_state is None and not run.driver.is_open("train")):
            run = self._begin(state, unit)
        self._losses = MeanLosses()
        self._fires_eval = not (state.should_stop or run.driver.is_open("train_step"))
        if self._fires_eval:
            run.eval.begin(EVALUATED, standalone=not run.driver.is_open("train"))
            self._eval_hooks.listen(True)

    @observing
    def on_eval_step_start(self, state: State, unit: Any) -> None:
        """Start a step of the evaluation with the batch that `_fetch_eval_batch` has stored."""
        run = self._run
        if run is not None and self._fires_eval:
            run.eval.ctx.batch = self._batch
            run.eval.driver.start("eval_step")

    @observing
    def on_eval_step_end(self, state: State, unit: Any) -> None:
        """Add the batch's losses to the means, and end the step of the evaluation."""
        run = self._run
        if run is None:
            return
        self._losses.add(state.eval_state.step_output, counts_of(self._batch)[0] or 1)
        run.eval.driver.end("eval_step")

    @in_a_run
    def on_eval_end(self, run: HostedRun, state: State, unit: Any) -> None:
        """End the evaluation. Then carry out the actions, such as a save, that were postponed until the evaluation ends."""
        self._eval_hooks.listen(False)
        self._batch, samples = None, self._losses.samples
        found = self._losses.means()
        found |= {name: float(getattr(unit, name)) for name in self._metrics} if samples else {}
        if self._fires_eval:
            run.eval.end_dataset(EVALUATED, found)
            run.eval.end()
            run.fire_record()
            self._support(run).after_first_step(run.eval.driver)
        elif samples:  # the evaluation took place within a step, so its events are fired when the step ends
            run.made[EVALUATED] = found
        self._reach(run, state)
        if not run.driver.is_open("train"):
            self._finish()

    # --- prediction ---

    @observing
    def on_predict_start(self, state: State, unit: Any) -> None:
        """Begin a run for a prediction. During training, do nothing: callsheet fires no events for a prediction then."""
        if self._run is not None and self._run.driver.is_open("train"):
            return
        self._begin(state, unit).driver.start("predict")
        self._eval_hooks.listen(True)

    @observing
    def on_predict_step_start(self, state: State, unit: Any) -> None:
        """Start a step of the prediction with the batch that `_fetch_eval_batch` has stored."""
        run = self._run
        if run is not None and run.driver.is_open("predict"):
            run.ctx.batch = self._batch
            run.driver.start("predict_step")

    @observing
    def on_predict_step_end(self, state: State, unit: Any) -> None:
        if self._run is not None:
            self._run.driver.end("predict_step")

    @in_a_run
    def on_predict_end(self, run: HostedRun, state: State, unit: Any) -> None:
        """End the prediction, and with it the run."""
        if run.driver.is_open("predict"):
            run.driver.end("predict")
            self._finish()

    # --- the callbacks' states in torchtnt's checkpoints ---

    def state_dict(self) -> dict[str, bytes]:
        """Return the callbacks' states and torchtnt's number of steps, for torchtnt's checkpoints.

        They are one `bytes` value because torchtnt's checkpointers need a structure that does not change.
        """
        run = self._run
        if run is None:
            return {"states": b""}
        states = {"steps": self._steps_fired, **own_state(run)}
        file = io.BytesIO()
        torch.save(states, file)
        return {"states": file.getvalue()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Store the callbacks' states. The next run restores them."""
        self._restored = torch.load(io.BytesIO(state["states"]), weights_only=True) if state["states"] else None

    def _load_restored(self, run: HostedRun, unit: Any) -> CheckpointInfo:
        """Restore the callbacks' states from the checkpoint that torchtnt has loaded. Return the checkpoint's `CheckpointInfo`."""
        restored, self._restored = self._restored, None
        assert restored is not None
        if (progress := getattr(unit, "train_progress", None)) is not None and progress.num_steps_completed != restored["steps"]:
            raise CheckpointError(
                f"the callbacks' states are of step {restored['steps']}, but torchtnt resumes from step "
                f"{progress.num_steps_completed}; put the host before the checkpointer in callbacks=[...]"
            )
        restore_states(run, restored)
        self._steps_fired = restored["steps"]
        return CheckpointInfo("", run.state.timestamp.batch, run.state.timestamp.epoch, "periodic")
