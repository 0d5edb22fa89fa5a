"""Runs callsheet's callbacks in Ignite's loop, as a handler of an Ignite engine."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, ModelCheckpoint
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from callsheet.bridges.count_check import Counts
from callsheet.bridges.forward_hooks import ForwardHooks
from callsheet.bridges.host_base import Callbacks, HostBase, in_a_run, observing
from callsheet.bridges.host_states import own_state, restore_states, resume_without_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.ignite.engine import numbers
from callsheet.bridges.ignite.events import CHECKPOINT_EVENTS, EVALUATION_EVENTS, FIRED_AT, FIRED_AT_EVALUATION, NOT_FIRED
from callsheet.bridges.ignite.internals import HOST, PACKAGE
from callsheet.bridges.ignite.saves import Saves
from callsheet.bridges.loop_arguments import check_accumulation, check_model, torch_optimizer, without_ddp
from callsheet.bridges.training_hooks import TrainingHooks
from callsheet.core.callback import Callback
from callsheet.core.control import Request
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo, Outcome
from callsheet.core.time import Time
from callsheet.errors import CheckpointError, ConfigError, NotSupported
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, LOG_INTERVAL, TIMEOUT_SECONDS
from callsheet.run.parts import Stateful
from callsheet.run.signals import PreemptSignals, signals_of
from callsheet.trainer.tasks import counts_of

logger = logging.getLogger("callsheet")


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Stateful | None = None,
    gradient_accumulation_steps: int = 1,
    scaler: GradScaler | None = None,
    evaluators: Mapping[str, Engine] | None = None,
    evaluate: Callable[[], Any] | None = None,
    log_interval: str | int | Time = LOG_INTERVAL,
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    config: Mapping[str, Any] | None = None,
    preempt_signals: PreemptSignals = (),
    timeout_seconds: float = TIMEOUT_SECONDS,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    strict: bool = True,
) -> IgniteHost:
    """Return one Ignite handler that wraps the callbacks: `host([...], model=model, optimizer=optimizer).attach(trainer)`.

    A run is one call of `trainer.run()`. The host observes steps and epochs by the engine's events, and forward pass, loss and
    optimizer step with PyTorch hooks. If a callback requests a stop, the host calls `trainer.terminate()`. If an evaluator runs
    during training, callsheet reports an evaluation with the evaluator's metrics as its results.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        model: the model that the trainer's process function calls. With DDP, callbacks see the module inside the wrapper.
        optimizer: the optimizer that the process function steps.
        scheduler: the scheduler, for callbacks to read.
        gradient_accumulation_steps: how many iterations the trainer uses for one optimizer step.
        scaler: the `torch.amp.GradScaler` that scales the loss.
        evaluators: evaluators by dataset name, such as `{"validation": evaluator}`. Evaluators that run one after the other form
            one evaluation, which ends with the last of them, or when the trainer continues.
        evaluate: a function without arguments that runs the evaluators, called when a callback requests an evaluation.
        log_interval: how often a metrics record is made. A bare number means batches.
        run_name, runs_folder: the run's name, and the folder that contains the run's folder.
        config: the program's settings, stored with the run.
        preempt_signals: the signals that make the run save a checkpoint and end as preempted. They need a checkpoint handler, see
            `IgniteHost.attach`.
        timeout_seconds: the run fails if a rank does not answer for this long.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.
        strict: whether to raise an error if a callback listens to an event that is not fired; else log a warning.

    Raises:
        ConfigError: an argument is invalid.
        NotSupported: a callback cannot work in this loop, see `strict`. Raised when training begins or after the first step.
    """
    check_accumulation(gradient_accumulation_steps)
    if evaluate is not None and not evaluators:
        raise ConfigError("evaluate= runs evaluators; give them with evaluators=, so that callbacks get their results")
    if "train" in (evaluators or {}):
        raise ConfigError("evaluators={'train': ...}: train/loss is the loss of the steps; give that dataset another name")
    check_model(model)
    return IgniteHost(
        callbacks,
        strict=strict,
        model=model,
        gradient_accumulation_steps=gradient_accumulation_steps,
        scaler=scaler,
        evaluators=dict(evaluators or {}),
        evaluate=evaluate,
        optimizer=torch_optimizer(optimizer),
        scheduler=scheduler,
        run_name=run_name,
        runs_folder=runs_folder,
        config=config,
        log_interval=log_interval,
        timeout_seconds=timeout_seconds,
        signals=signals_of(preempt_signals),
        lock_timeout_seconds=lock_timeout_seconds,
    )


@dataclass
class _Evaluations:
    """The host's data about the evaluations that Ignite's evaluators run during training."""

    dataset: str = ""
    """The dataset that is being evaluated, or empty."""
    begun: set[str] = field(default_factory=set)
    """The datasets whose evaluation has begun since the last step, or since the end of the epoch."""
    is_requested: bool = False
    """Whether a callback requested the evaluation that is running."""
    is_awaited: bool = False
    """Whether the actions after an epoch, such as a save, wait for the epoch's evaluation."""
    is_between_steps: bool = False
    """Whether an evaluation is open or an epoch waits for one. `_continue_training` must then be called before the next step."""


class IgniteHost(HostBase):
    """The handler that `host` returns: it fires callsheet's events in Ignite's loop.

    Make it with `host`, which has other arguments. If it is in the `to_save` of an Ignite `Checkpoint`, the callbacks' states are saved.
    """

    _PACKAGE, _INTERNALS = PACKAGE, HOST
    _STOPS_IF_PREEMPTED = True
    _run: HostedRun | None = None

    def __init__(
        self,
        callbacks: Callbacks,
        *,
        model: nn.Module,
        gradient_accumulation_steps: int,
        scaler: GradScaler | None,
        evaluators: Mapping[str, Engine],
        evaluate: Callable[[], Any] | None,
        **options: Any,
    ) -> None:
        super().__init__(callbacks, **options)
        self._model = model
        self._iterations_per_step = gradient_accumulation_steps
        self._scaler = scaler
        self._evaluators = evaluators
        self._runs_evaluators = evaluate
        self._trainer: Engine | None = None
        self._saves: Saves | None = None
        self._last: HostedRun | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self._microbatches = 0  # how many microbatches the current step has had
        self._steps_left = 0  # how many steps the engine has abandoned before the step's last microbatch
        self._in_epoch = False
        self._completed_iteration = -1  # the number of the latest iteration whose end Ignite has reported
        self._evaluations = _Evaluations()

    def attach(self, trainer: Engine, *, checkpoint: Checkpoint | None = None) -> Self:
        """Attach callsheet's callbacks to Ignite's trainer and evaluators.

        Args:
            trainer: the engine whose process function trains the model.
            checkpoint: the Ignite `Checkpoint` that writes the checkpoints that callbacks request. It may also be attached to an
                engine. All its checkpoints are reported.

        Returns:
            The host itself.

        Raises:
            ConfigError: `checkpoint` is a `ModelCheckpoint`, which does not know what to save; `checkpoint` is None, and `preempt_signals` were
                given; or the host is attached already.
        """
        if self._trainer is not None:
            raise ConfigError("this host is attached to an engine already: make another host for another engine")
        if isinstance(checkpoint, ModelCheckpoint):
            raise ConfigError("a ModelCheckpoint gets what it saves only when it is called: give a Checkpoint")
        if self._run_options["signals"] and checkpoint is None:
            raise ConfigError("preempt_signals= needs a handler that writes the checkpoint: attach(trainer, checkpoint=...)")
        self._trainer = trainer
        for event in FIRED_AT:
            trainer.add_event_handler(Events(event), getattr(self, f"_{event}"))
        # Move the host's handler to the front: if a handler raises the exception again, Ignite calls no further handler.
        handlers = trainer._event_handlers[Events.EXCEPTION_RAISED]
        handlers.insert(0, handlers.pop())
        for name, evaluator in self._evaluators.items():
            for event in FIRED_AT_EVALUATION:
                evaluator.add_event_handler(Events(event), getattr(self, f"_evaluation_{event}"), name)
        if checkpoint is not None:
            self._saves = Saves(checkpoint)
            self._saves.report((trainer, *self._evaluators.values()), self._report_checkpoint)
        return self

    # --- the run ---

    @observing
    def _started(self, trainer: Engine) -> None:
        self._forget_earlier_run()  # ends an interrupted run, which the engine has not continued
        self._reset()
        me = weakref.proxy(self)  # the run must not keep the engine and its handlers alive
        self._run = self._last = run = HostedRun(
            self.manager,
            model=without_ddp(self._model),
            host="this Ignite engine",
            max_duration=self._duration(trainer),
            evaluates=(lambda: me._evaluate()) if self._runs_evaluators is not None else None,
            able=("stop", "save") if self._saves is not None else ("stop",),
            saves=lambda requests: me._save(),
            **self._run_options,
        )
        self._training = TrainingHooks(run, self._model, self._run_options["optimizer"], self._scaler)
        self._eval_hooks = ForwardHooks(run.eval.driver, run.eval.ctx, self._model, "eval")
        run.control.hints = {"save": "give attach(trainer, checkpoint=...) the handler that writes checkpoints"}
        run.checkpoints.loads = lambda: me._load()
        never = (
            NOT_FIRED + (() if self._saves is not None else CHECKPOINT_EVENTS) + (() if self._evaluators else EVALUATION_EVENTS)
        )
        # Do not start the span `train` here: an evaluation may run before the first epoch, and it is not part of training.
        self._begin_run(run, [self._training, self._eval_hooks], never)
        run.counts.follow(lambda: me._read_counts())
        self._stop_if_asked(run)

    def _read_counts(self) -> Counts:
        """Return how many steps and epochs Ignite has counted. An epoch in which the engine was terminated is left out."""
        trainer = self._trainer
        assert trainer is not None
        steps = trainer.state.iteration // self._iterations_per_step + self._steps_left
        return Counts(steps, trainer.state.epoch - bool(trainer.should_terminate and self._in_epoch))

    def _duration(self, trainer: Engine) -> str | None:
        state, batches = trainer.state, self._iterations_per_step
        if state.epoch_length is not None and state.epoch_length % batches:
            raise NotSupported(
                f"an epoch of {state.epoch_length} iterations does not end with a whole step of gradient_accumulation_steps={batches}; give the engine"
                f" an epoch_length that is a multiple of {batches}"
            )
        if (max_iters := _max_iters(state)) is not None:
            return f"{max_iters // batches}ba"
        return f"{state.max_epochs}ep" if state.max_epochs is not None else None

    @in_a_run
    def _completed(self, run: HostedRun, trainer: Engine) -> None:
        self._continue_training(run)
        run.driver.start("round")  # if no epoch was run, the spans `train` and `round` were not started yet
        self._leave_step(run)
        self._finish()

    @in_a_run
    def _interrupt(self, run: HostedRun, trainer: Engine) -> None:
        """Record `interrupted` as the run's outcome. If the engine continues the run later, the outcome is replaced."""
        run.lifetime.outcome = Outcome.INTERRUPTED

    @in_a_run
    def _terminate(self, run: HostedRun, trainer: Engine) -> None:
        """Record that the run was stopped, unless the engine was terminated because it has reached `max_iters`."""
        max_iters = _max_iters(trainer.state)
        if max_iters is None or trainer.state.iteration < max_iters:
            run.control.agree(Request("stop", "the engine was terminated", "Engine.terminate"))
        if trainer.should_terminate == "skip_completed":
            self._completed(trainer)

    def _exception_raised(self, error: BaseException) -> None:
        """End the run of callsheet's callbacks as failed, because an exception was raised in Ignite's engine.

        The method has no engine as an argument, because Ignite may have deleted the engine together with an interrupted run.
        """
        run, trainer = self._run, self._trainer
        assert trainer is not None
        if run is not None:
            if isinstance(error, GeneratorExit):
                run.lifetime.end(Outcome.INTERRUPTED)
            else:
                run.fail(error)
            self._release()
        # Ignite raises the error only if no error handler is attached. If this host's handler is the only one, raise it here.
        if len(trainer._event_handlers[Events.EXCEPTION_RAISED]) == 1:
            raise error

    def _leave(self, error: BaseException) -> None:
        super()._leave(error)
        self._last = None  # the error has ended this run, so later checkpoints must not contain the run's state

    def _stop(self, loop: Any) -> None:
        assert self._trainer is not None
        self._trainer.terminate()

    # --- epochs and steps ---

    @in_a_run
    def _epoch_started(self, run: HostedRun, trainer: Engine) -> None:
        self._continue_training(run)
        if not trainer.should_terminate:
            self._in_epoch = True
            run.driver.start("epoch")

    def _get_batch_started(self, trainer: Engine) -> None:
        try:
            run = self._run
            if run is None or self._microbatches:  # there is no run, or an earlier microbatch has already begun the step
                return
            if self._evaluations.is_between_steps:
                self._continue_training(run)
            driver = run.driver
            if driver.listen():
                self._training.listen()
            if not driver.spans["fetch"].has_no_listeners:
                driver.start("fetch")
                run.ctx.batch = None
        except Exception as error:
            self._leave(error)

    def _get_batch_completed(self, trainer: Engine) -> None:
        try:
            run = self._run
            if run is None or self._microbatches or run.driver.spans["fetch"].has_no_listeners:
                return
            run.ctx.batch = batch = trainer.state.batch
            run.driver.end("fetch")
            if run.ctx.batch is not batch:
                trainer.state.batch = run.ctx.batch
        except Exception as error:
            self._leave(error)

    def _iteration_started(self, trainer: Engine) -> None:
        try:
            run = self._run
            if run is None:
                return
            driver, ctx, training = run.driver, run.ctx, self._training
            # Warn if Ignite has not reported the end of the last iteration or the start of the epoch.
            if training.backward.is_on or not self._in_epoch:
                run.counts.doubt()
            training.backward.is_on = True
            is_first = not self._microbatches
            # Ignite does not fire GET_BATCH_STARTED and GET_BATCH_COMPLETED if the process function makes its own data.
            if is_first and trainer.state.dataloader is None:
                self._get_batch_started(trainer)
                self._get_batch_completed(trainer)
            self._microbatches += 1
            ctx.batch = batch = trainer.state.batch
            if is_first:
                run.counted = counts_of(batch)
                training.backward.total, training.optimizer.has_stepped = None, False
                driver.start_step()
            else:
                samples, tokens = counts_of(batch)
                run.counted = (run.counted[0] + samples, run.counted[1] + tokens)
            if training.listens_to_microbatch:
                if driver.spans["microbatch"].is_open:  # end the previous microbatch, whose end the engine has not reported
                    driver.end("microbatch")
                ctx.microbatch = batch
                driver.start("microbatch")
                if driver.spans["microbatch"].is_open and ctx.microbatch is not batch:
                    trainer.state.batch = ctx.microbatch
        except Exception as error:
            self._leave(error)

    def _iteration_completed(self, trainer: Engine) -> None:
        try:
            run = self._run
            if run is None:
                return
            training, iteration = self._training, trainer.state.iteration
            earlier, self._completed_iteration = self._completed_iteration, iteration
            if not training.backward.is_on:
                if iteration != earlier:  # Ignite has not reported the start of this iteration
                    run.counts.doubt()
                return
            training.backward.is_on = False
            if iteration % self._iterations_per_step:
                run.driver.end("microbatch")
                return
            self._microbatches = 0
            run.step_skipped = not training.optimizer.has_stepped
            if (
                run.step_skipped and training.optimizer.has_strayed
            ):  # Ignite reported the step's start only after the optimizer's step
                run.counts.doubt()
            training.optimizer.has_strayed = False
            if run.end_step():
                self._after_step(run)
        except Exception as error:
            self._leave(error)

    def _check_first_step(self, run: HostedRun, **_: Any) -> None:
        count = self._iterations_per_step
        message = (
            f"the engine has not stepped the optimizer in its first {f'{count} iterations' if count > 1 else 'iteration'}; set"
            " gradient_accumulation_steps= to the number of iterations of a step, and give host the optimizer that the engine steps"
        )
        has_stepped = self._training.optimizer.has_stepped
        super()._check_first_step(run, may_skip_step=self._training.is_scaled, without_step="" if has_stepped else message)

    @in_a_run
    def _epoch_completed(self, run: HostedRun, trainer: Engine) -> None:
        if not self._in_epoch:
            return
        self._continue_training(run)
        self._in_epoch = False
        self._leave_step(run)
        if metrics := numbers(trainer.state.metrics):
            run.ctx.log({f"ignite/{name}": value for name, value in metrics.items()})
        run.close_epoch(is_whole=True)
        self._evaluations.is_awaited = self._evaluations.is_between_steps = True
        if not self._evaluators or run.control.stop_requested is not None:
            self._reach(run)

    def _leave_step(self, run: HostedRun) -> None:
        """Abandon the current step, because the engine skips the remaining iterations of the step.

        The lifecycle driver fires the step's end later.
        """
        if self._microbatches:
            self._microbatches, self._training.backward.is_on = 0, False
            assert self._trainer is not None
            self._steps_left += self._trainer.state.iteration % self._iterations_per_step != 0
            run.step_skipped = not self._training.optimizer.has_stepped

    def _reach(self, run: HostedRun) -> None:
        """Carry out the actions after an epoch, such as a save, if they were postponed until the epoch's evaluation ends."""
        if self._evaluations.is_awaited:
            self._evaluations.is_awaited = False
            run.boundaries.reach("epoch")
            self._stop_if_asked(run)

    @observing
    def _terminate_single_epoch(self, trainer: Engine, iter_counter: int) -> None:
        """End the epoch as a complete one, because Ignite counts a terminated epoch as complete."""
        self._epoch_completed(trainer)

    def _continue_training(self, run: HostedRun) -> None:
        """End an open evaluation, and carry out actions that were postponed until its end. Called when the trainer continues."""
        if run.eval.driver.is_open("eval_all"):
            self._end_evaluation(run)
        self._reach(run)
        self._evaluations.is_between_steps = False
        self._evaluations.begun.clear()

    def _handle_current_event(self) -> None:
        """Handle the engine's current event before Ignite calls the host's handler for this event.

        This is needed if another handler of the event, which Ignite calls before the host's, runs an evaluator or saves the
        host's state.
        """
        trainer, name = self._trainer, self._evaluations.dataset
        if self._run is None or trainer is None:
            return
        if name and self._evaluators[name].last_event_name == Events.COMPLETED:
            self._evaluation_completed(self._evaluators[name], name)
        elif trainer.last_event_name == Events.ITERATION_COMPLETED:
            self._iteration_completed(trainer)
        elif trainer.last_event_name == Events.EPOCH_COMPLETED:
            self._epoch_completed(trainer)

    # --- evaluations ---

    def _evaluate(self) -> dict[str, Any]:
        """Run the evaluators at a callback's request. Return an empty dict, because the evaluators' events report the results."""
        assert self._runs_evaluators is not None
        assert self._run is not None
        self._evaluations.is_requested = True
        try:
            self._runs_evaluators()
            if self._run.eval.driver.is_open("eval_all"):
                self._end_evaluation(self._run)
        finally:
            self._evaluations.is_requested = False
        return {}

    @observing
    def _evaluation_started(self, evaluator: Engine, name: str) -> None:
        self._handle_current_event()
        run, evaluations = self._run, self._evaluations
        begun = evaluations.begun
        if run is None or name in begun or (begun and not run.eval.driver.is_open("eval_all")):
            # In callsheet's order of events, at most one evaluation comes between two steps. Fire no events for a second one.
            return
        evaluations.dataset, evaluations.is_between_steps = name, True
        begun.add(name)
        self._eval_hooks.listen(run.eval.listens_to_outputs("eval"))
        run.eval.begin(name, standalone=not run.driver.is_open("train"))

    @observing
    def _evaluation_iteration_started(self, evaluator: Engine, name: str) -> None:
        if self._evaluations.dataset == name and self._run is not None:
            self._run.eval.ctx.batch = evaluator.state.batch
            self._run.eval.driver.start("eval_step")

    @observing
    def _evaluation_iteration_completed(self, evaluator: Engine, name: str) -> None:
        if self._evaluations.dataset == name and self._run is not None:
            self._run.eval.driver.end("eval_step")

    @observing
    def _evaluation_completed(self, evaluator: Engine, name: str) -> None:
        run = self._run
        if run is None or self._evaluations.dataset != name:
            return
        self._evaluations.dataset = ""
        self._eval_hooks.remove()
        self._support(run).after_first_step(run.eval.driver)
        run.eval.end_dataset(name, numbers(evaluator.state.metrics))
        if self._evaluations.begun == self._evaluators.keys():
            self._end_evaluation(run)

    def _end_evaluation(self, run: HostedRun) -> None:
        run.eval.end()
        if self._evaluations.is_requested:  # after a requested evaluation, the caller of `_evaluate` fires the next events
            return
        run.fire_record()
        if self._evaluations.is_awaited:
            run.control.done("evaluate")  # this evaluation also fulfills requests that were made after the epoch's end
            self._reach(run)
            return
        run.boundaries.fire_checkpoint_due("step")
        self._stop_if_asked(run)

    # --- checkpoints ---

    def _save(self) -> None:
        """Write a checkpoint that a callback has requested."""
        assert self._saves is not None
        assert self._trainer is not None
        self._saves.save(self._trainer)

    @observing
    def _report_checkpoint(self, engine: Engine) -> None:
        """Fire the events of a checkpoint, if the `Checkpoint` handler that was given to `attach` has written one."""
        assert self._saves is not None
        run, path = self._run, self._saves.new()
        if run is not None and path is not None and run.eval.order.allows_save():
            run.fire_checkpoint(path, lambda info: None)  # the handler has already written the callbacks' states

    def state_dict(self) -> dict[str, Any]:
        """Return the callbacks' states and the run's progress.

        Put the host into the `to_save` of a `Checkpoint`, with the model, the optimizer and the trainer.
        """
        self._handle_current_event()
        if self._run is not None:
            self._reach(self._run)
        run = self._last
        if self._loaded is not None or run is None:
            return dict(self._loaded or {})
        return own_state(run)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next run resume from this state. The user has to load the trainer's state from the same checkpoint."""
        self._loaded = state or None

    def _load(self) -> CheckpointInfo | None:
        run, trainer, loaded = self._run, self._trainer, self._loaded
        assert run is not None
        assert trainer is not None
        self._loaded = None
        step, epoch = trainer.state.iteration // self._iterations_per_step, trainer.state.epoch
        if loaded is None:
            if step:
                logger.warning("%s resumes from step %d, and no callbacks' states were loaded", run.host, step)
                resume_without_states(run, step, epoch)
            return None
        restore_states(run, loaded)
        if run.state.timestamp.batch != step:
            raise CheckpointError(
                f"the callbacks' states are of step {run.state.timestamp.batch}, and the engine resumes from step {step}: load both from one"
                ' checkpoint, Checkpoint.load_objects({"trainer": trainer, "callsheet": host, ...}, path)'
            )
        return CheckpointInfo("", step, epoch, "periodic")


def _max_iters(state: Any) -> int | None:
    """Return `max_iters`, the iteration at which the engine stops; None if it has no `max_iters`, as in Ignite before 0.5.5."""
    iterations: int | None = getattr(state, "max_iters", None)
    return iterations
