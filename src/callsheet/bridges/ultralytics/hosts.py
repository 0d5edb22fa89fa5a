"""Runs callsheet's callbacks in Ultralytics' training, as callbacks of a model or a trainer."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from ultralytics.utils.callbacks.base import default_callbacks

from callsheet.bridges.count_check import Counts
from callsheet.bridges.forward_hooks import ForwardHooks
from callsheet.bridges.host_base import Callbacks, HostBase, in_a_run, observing
from callsheet.bridges.host_states import STATE, read_states, resume_without_states, write_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.loop_arguments import without_ddp
from callsheet.bridges.training_hooks import TrainingHooks
from callsheet.bridges.ultralytics import ddp
from callsheet.bridges.ultralytics.events import HANDLED, NOT_FIRED
from callsheet.bridges.ultralytics.internals import HOST, PACKAGE
from callsheet.bridges.versions import check_events
from callsheet.bridges.wrapped_methods import WrappedMethods
from callsheet.core.callback import Callback
from callsheet.core.control import Request
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo
from callsheet.core.time import Time
from callsheet.errors import ConfigError
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, LOG_INTERVAL, TIMEOUT_SECONDS
from callsheet.run.run_names import check_folder
from callsheet.transport import TransportError, payload

logger = logging.getLogger("callsheet")

VALIDATION = "validation"
"""The name of the dataset that Ultralytics validates on after an epoch."""

BEST = "best"
"""The name of the validation dataset in the evaluation of `best.pt`, which Ultralytics runs after training."""


class _AfterEpoch:
    """Flags about the actions after the current epoch, which are carried out when Ultralytics has validated and saved."""

    def __init__(self) -> None:
        self.is_waiting = False
        """Whether the epoch has ended, but the actions after the epoch were not carried out yet."""
        self.is_whole = False
        """Whether the epoch had all its batches."""
        self.is_save_requested = False
        """Whether a callback has asked for a checkpoint."""
        self.is_saved = False
        """Whether Ultralytics has written a checkpoint. Only rank 0 sets this flag."""


# The stages of a batch: how far the training loop has come.
_BETWEEN_BATCHES = "between batches"
_BATCH_IS_DUE = "a batch is due"  # the next call of `preprocess_batch` gets a batch of the training loop
_IN_BATCH = "in a batch"

_RUN_ATTRIBUTES = (
    "_trainer",
    "_outer_error",
    "_training",
    "_eval_hooks",
    "_hooks",
    "_from_last_epoch",
)
"""The names of the host's attributes that belong to the training of the current run, and are deleted when the run ends."""


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    log_interval: str | int | Time = LOG_INTERVAL,
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    timeout_seconds: float = TIMEOUT_SECONDS,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
    allow_pickle: bool = False,
    strict: bool = True,
) -> UltralyticsHost:
    """Return a host that runs the callbacks in an Ultralytics model: `host([...]).attach(model)`, and then `model.train(...)`.

    A run is one call of `model.train`. A step is one step of the optimizer, which uses `nbs / batch` batches. Ultralytics'
    validation after an epoch is an evaluation of the dataset `validation`; its validation of `best.pt` after training is an
    evaluation of the dataset `best`. If a callback requests a stop, the epoch ends after the current step. If a callback requests
    a checkpoint, Ultralytics writes it after the epoch. The callbacks' states are written beside `last.pt`, and a training with
    `resume=True` restores them.

    If Ultralytics starts DDP workers, each worker rebuilds the callbacks from a signed file; see `callsheet.transport.pack`.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        log_interval: how often a metrics record is made. A bare number means batches.
        run_name, runs_folder: the run's name, and the folder that contains the run's folder.
        timeout_seconds: the run fails if a rank does not answer for this long.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.
        allow_pickle: whether to send objects without an import path, such as lambdas, to DDP workers as signed pickles.
        strict: whether to raise an error if a callback listens to an event that is not fired; else log a warning.

    Raises:
        NotSupported: a callback cannot work in this loop, see `strict`. Raised when training begins or after the first step.
    """
    check_folder("runs_folder", runs_folder)
    return UltralyticsHost(
        callbacks,
        strict=strict,
        allow_pickle=allow_pickle,
        log_interval=str(log_interval) if isinstance(log_interval, Time) else log_interval,
        run_name=run_name,
        runs_folder=os.fspath(runs_folder),
        timeout_seconds=timeout_seconds,
        lock_timeout_seconds=lock_timeout_seconds,
    )


class UltralyticsHost(HostBase):
    """The object that `host` returns: its methods are callbacks of Ultralytics, which fire callsheet's events.

    Make it with `host`, which has other arguments.
    """

    _PACKAGE, _INTERNALS = PACKAGE, HOST
    _run: HostedRun | None = None

    def __init__(self, callbacks: Callbacks, *, allow_pickle: bool, **options: Any) -> None:
        super().__init__(callbacks, **options)
        check_events(PACKAGE, HANDLED, default_callbacks)
        self.allow_pickle = allow_pickle
        """Whether callbacks may be sent to DDP workers as pickles."""
        self._is_attached = False

    def attach(self, model: Any) -> Self:
        """Add the host's methods to the callbacks of a model or trainer.

        Args:
            model: a model of Ultralytics such as `YOLO("yolo11n.yaml")`, or a trainer.

        Returns:
            The host itself.

        Raises:
            ConfigError: the host is attached already.
            TransportError: `attach` was called while a DDP worker imports the user's script.
        """
        if payload.is_opening:
            raise TransportError(
                "attach() was called while a DDP worker imports the script: put it and the training under `if __name__ == '__main__'`"
            )
        if self._is_attached:
            raise ConfigError("this host is attached to a model already: make another host for another model")
        self._is_attached = True
        for event in HANDLED:
            model.add_callback(event, getattr(self, event))
        ddp.install()
        return self

    # --- the run ---

    @observing
    def on_train_start(self, trainer: Any) -> None:
        """Begin a run when Ultralytics begins to train."""
        self._forget_earlier_run()
        self._trainer = trainer  # not a weak reference, because the scheduler keeps the trainer alive anyway
        self._outer_error = sys.exc_info()[1]
        model = trainer.model
        self._run = run = HostedRun(
            self.manager,
            model=without_ddp(model),
            optimizer=trainer.optimizer,
            scheduler=trainer.scheduler,
            host="Ultralytics",
            config={name: value for name, value in vars(trainer.args).items() if isinstance(value, (str, int, float, bool))},
            max_duration=None if trainer.args.time else f"{trainer.epochs}ep",
            device=trainer.device,
            able=("stop", "save"),
            saves=self._request_save,
            **self._run_options,
        )
        run.control.hints = {"evaluate": "Ultralytics validates after each epoch", "save": "Ultralytics saves after each epoch"}
        run.checkpoints.loads = self._load
        run.state.evaluators = (VALIDATION,) if trainer.args.val else ()
        self._training = TrainingHooks(run, model, trainer.optimizer, trainer.scaler)
        self._eval_hooks: ForwardHooks | None = None  # set only while Ultralytics validates
        hooks: list[Any] = [self._training]
        around: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (trainer, "preprocess_batch", self._preprocess),
            (trainer, "validate", self._validate),
            (trainer, "final_eval", self._final_eval),
            (trainer.scaler, "unscale_", self._unscale),
            (trainer.validator, "preprocess", self._preprocess_to_validate),
        )
        for owner, name, method in around:
            hooks.append(wrapped := WrappedMethods(owner))
            wrapped.wrap(name, method)
        self._begin_epoch_counts(0)
        self._stage = _BETWEEN_BATCHES
        # How often Ultralytics had repeated the epoch when `on_train_epoch_start` was last called; see `_repeats_of`.
        self._repeats: tuple[int, int] | None = 0, 0
        self._has_unscaled = False  # whether the loop has unscaled the gradients, as it does just before the optimizer's step
        # Loss and samples of the batches after the previous epoch's last optimizer step. They count for this epoch's first step.
        self._from_last_epoch: tuple[Tensor | None, tuple[int, int]] = None, (0, 0)
        self._after_epoch = _AfterEpoch()
        self._epochs: int | None = None  # Ultralytics' count of completed epochs; None before the first epoch
        self._begin_run(run, hooks, NOT_FIRED)
        run.counts.follow(self._counts_of(trainer))
        run.driver.start("round")
        self._stop_if_asked(run, trainer)

    def _counts_of(self, trainer: Any) -> Callable[[], Counts]:
        """Return a function that returns Ultralytics' counts of steps and epochs.

        The number of updates of its weight average (EMA) is the number of steps.
        """
        me, ema = weakref.proxy(self), trainer.ema if trainer.ema and trainer.ema.enabled else None
        return lambda: Counts(ema.updates if ema is not None else None, me._epochs)

    @observing
    def teardown(self, trainer: Any) -> None:
        """End the run after Ultralytics' training has ended or failed."""
        run, error = self._run, sys.exc_info()[1]  # Ultralytics calls this in a `finally` block, perhaps after an error
        if run is None:
            return
        if error is not None and error is not self._outer_error:
            self._fail(error)
            return
        if run.control.stop_requested is None and not trainer.args.time and trainer.epoch + 1 < trainer.epochs:
            why = f"it stopped after epoch {trainer.epoch + 1} of {trainer.epochs}"
            run.control.agree(Request("stop", why, "Ultralytics"))
        if self._epochs is not None:
            self._epochs = trainer.epoch + 1
        self._finish()

    def _stop(self, loop: Any) -> None:
        loop.stop = True

    def _release(self) -> None:
        """Remove the hooks, end the run, and drop all references to the trainer, so that its memory can be freed."""
        super()._release()
        for name in _RUN_ATTRIBUTES:
            vars(self).pop(name, None)

    # --- epochs ---

    @in_a_run
    def on_train_epoch_start(self, run: HostedRun, trainer: Any) -> None:
        """Start an epoch. Ultralytics may repeat an epoch, for example after it has run out of memory."""
        is_open = run.driver.is_open("epoch")
        is_repeated = self._epochs == trainer.epoch + (not is_open)
        earlier, self._repeats = self._repeats, _repeats_of(trainer)
        # If Ultralytics' count of repetitions is unchanged, Ultralytics does not repeat the epoch, but has fired this event twice.
        if is_repeated and self._repeats == earlier is not None:
            run.counts.doubt()
            return
        if is_open and not is_repeated:  # the previous epoch is still open, because Ultralytics has not reported its end
            self._close_epoch(run, trainer)
        elif is_open:  # having run out of memory, Ultralytics begins the same epoch again with smaller batches
            self._training.backward.is_on = False
            run.drop_step()
            self._from_last_epoch = None, (0, 0)
            run.close_epoch(is_whole=False)
        # If Ultralytics reloads last.pt, it skips `on_fit_epoch_end`, so carry out what is still due after the previous epoch.
        self._reach(run, trainer)
        self._begin_epoch_counts(len(trainer.train_loader))
        self._stage = _BETWEEN_BATCHES
        self._epochs = trainer.epoch
        if is_repeated:
            # callsheet counts the steps of a repeated epoch twice. Ultralytics may count them only once: accept this difference.
            run.counts.follow(self._counts_of(trainer))
        run.counts.check()
        run.driver.start("epoch")
        self._begin_fetch(run)

    def _begin_epoch_counts(self, length: int) -> None:
        self._batches, self._epoch_length = 0, length

    @in_a_run
    def on_train_epoch_end(self, run: HostedRun, trainer: Any) -> None:
        """End the epoch. Actions after the epoch, such as a save, are carried out when Ultralytics' validation has ended."""
        is_time_over = trainer.args.time and trainer.stop  # at its time limit, Ultralytics leaves the epoch within a batch
        if self._stage != _BETWEEN_BATCHES and not is_time_over:
            run.counts.doubt()
        self._epochs = trainer.epoch + 1
        self._close_epoch(run, trainer)

    def _close_epoch(self, run: HostedRun, trainer: Any) -> None:
        self._training.backward.is_on, self._stage = False, _BETWEEN_BATCHES
        # If the last step is still open after the optimizer's step, Ultralytics' time limit has ended the epoch.
        if self._training.optimizer.has_stepped and run.driver.is_open("train_step"):
            self._batches += 1
            self._end_step(run, trainer)
        elif run.driver.is_open("train_step"):
            # The optimizer has not used the last batches' gradients. These batches count for the next epoch's first step.
            self._from_last_epoch = self._training.backward.total, run.counted
            run.drop_step()
        after = self._after_epoch
        after.is_waiting, after.is_whole = True, self._batches >= self._epoch_length or not trainer.stop
        run.close_epoch(is_whole=after.is_whole)

    def _reach(self, run: HostedRun, trainer: Any) -> None:
        """Carry out the actions after the latest epoch, such as a requested save or stop, if they are still due."""
        after = self._after_epoch
        if not after.is_waiting:
            return
        after.is_waiting = False
        if after.is_whole:
            run.boundaries.reach("epoch")
        else:
            run.boundaries.fire_checkpoint_due("epoch")
        is_saved = run.groups.of_rank_zero(after.is_saved)
        if after.is_save_requested and not is_saved:
            if run.groups.rank == 0:
                trainer.save_model()
            is_saved = True
        self._after_epoch = _AfterEpoch()
        if is_saved:
            run.fire_checkpoint(str(trainer.last), lambda info: self._write_states(run, trainer, info), has_trained_weights=True)
        self._stop_if_asked(run, trainer)

    @in_a_run
    def on_fit_epoch_end(self, run: HostedRun, trainer: Any) -> None:
        """Carry out the actions that are due after the epoch. Called when Ultralytics has validated and saved."""
        self._reach(run, trainer)

    # --- steps ---

    def _begin_fetch(self, run: HostedRun) -> None:
        driver = run.driver
        if driver.spans["train_step"].is_open:
            return
        if driver.listen():
            self._training.listen()
        if not driver.spans["fetch"].has_no_listeners:
            driver.start("fetch")
            run.ctx.batch = None

    @in_a_run
    def on_train_batch_start(self, run: HostedRun, trainer: Any) -> None:
        """Record that the next call of `preprocess_batch` gets a batch of the training loop."""
        if self._stage != _BETWEEN_BATCHES:
            # Ultralytics has not reported the end of the last batch, or has reported the start of this batch twice.
            run.counts.doubt()
        self._stage = _BATCH_IS_DUE

    def _preprocess(self, preprocess: Callable[[Any], Any], batch: Any) -> Any:
        run = self._run
        if run is None or self._stage != _BATCH_IS_DUE:
            return preprocess(batch)
        self._stage = _IN_BATCH
        try:
            batch = self._begin_batch(run, batch)
        except BaseException as error:
            self._leave(error)
        batch = preprocess(batch)
        try:
            if self._run is run and self._training.listens_to_microbatch:
                run.driver.end("microbatch")
                run.ctx.microbatch = batch
                run.driver.start("microbatch")
                if run.driver.spans["microbatch"].is_open:
                    batch = run.ctx.microbatch
        except BaseException as error:
            self._leave(error)
        return batch

    def _begin_batch(self, run: HostedRun, batch: Any) -> Any:
        """If no step is open, start one. Count the batch's samples, and return the batch, which a callback may have replaced."""
        driver, ctx, training = run.driver, run.ctx, self._training
        ctx.batch = batch
        if not driver.spans["train_step"].is_open:
            driver.end("fetch")
            batch = ctx.batch
            driver.start_step()
            training.backward.total, run.counted = self._from_last_epoch
            self._from_last_epoch = None, (0, 0)
            training.optimizer.has_stepped = self._has_unscaled = False
        run.counted = run.counted[0] + len(batch["img"]), 0
        training.backward.is_on = True
        return batch

    def _unscale(self, unscale: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Unscale the gradients, and then fire the start of gradient clipping, because the loop clips the gradients next."""
        unscale(*args, **kwargs)
        run = self._run
        if run is None or not run.driver.spans["train_step"].is_open:
            return
        try:
            self._has_unscaled = True
            run.driver.start("clip_gradients")
        except BaseException as error:
            self._leave(error)

    def on_train_batch_end(self, trainer: Any) -> None:
        """End the microbatch. If the optimizer has stepped, or the loss scaler has skipped the optimizer's step, also end the step."""
        run = self._run
        if run is None:
            return
        try:
            if self._stage != _IN_BATCH:
                # Ultralytics has not reported the start of this batch, or has reported its end twice.
                run.counts.doubt()
            self._training.backward.is_on, self._stage = False, _BETWEEN_BATCHES
            self._batches += 1
            if not (self._training.optimizer.has_stepped or self._has_unscaled):
                run.driver.end("microbatch")
                return
            self._end_step(run, trainer)
            if self._batches < self._epoch_length and not trainer.stop:
                self._begin_fetch(run)
        except BaseException as error:
            self._leave(error)

    def _end_step(self, run: HostedRun, trainer: Any) -> None:
        run.step_skipped = not self._training.optimizer.has_stepped
        losses = trainer.loss_items
        if isinstance(losses, Tensor) and losses.ndim:  # in older releases, `losses` has no names; they are in `loss_names`
            losses = dict(zip(trainer.loss_names, losses, strict=True)) if len(losses) == len(trainer.loss_names) else {}
        run.other_losses = {name: each for name, each in losses.items() if name != "loss"} if isinstance(losses, Mapping) else {}
        if run.end_step():
            self._after_step(run, trainer, may_skip_step=trainer.scaler.is_enabled())

    # --- validation ---

    def _validate(self, validate: Callable[[], Any]) -> Any:
        """Call Ultralytics' `validate`, which evaluates the averaged weights (EMA), and fire the evaluation's events."""
        self._begin_evaluation(VALIDATION)
        metrics, fitness = found = validate()
        self._end_evaluation(VALIDATION, metrics, fitness)
        return found

    def _final_eval(self, evaluate: Callable[[], None]) -> None:
        """Call Ultralytics' `final_eval`, which evaluates `best.pt` after training, and fire the events of an evaluation."""
        if self._run is None:
            evaluate()
            return
        trainer = self._trainer
        self._begin_final_evaluation(trainer.best)
        evaluate()
        self._end_evaluation(BEST, trainer.metrics, None)

    @in_a_run
    def _begin_final_evaluation(self, run: HostedRun, best: Path) -> None:
        if run.groups.of_rank_zero(best.exists()):  # the file may be on the machine of rank 0 only
            self._begin_evaluation(BEST)

    @in_a_run
    def _begin_evaluation(self, run: HostedRun, name: str) -> None:
        trainer = self._trainer
        if name == BEST:
            run.driver.end("round")  # all epochs are over, and this evaluation follows them
        elif run.eval.listens_to_outputs("eval"):
            evaluated = trainer.ema.ema if trainer.ema else trainer.model
            self._eval_hooks = ForwardHooks(run.eval.driver, run.eval.ctx, evaluated, "eval")
            self._eval_hooks.listen(True)
            self._hooks.append(self._eval_hooks)
        run.eval.begin(name)

    def _preprocess_to_validate(self, preprocess: Callable[[Any], Any], batch: Any) -> Any:
        batch = preprocess(batch)
        self._begin_validation_step(batch)
        return batch

    @in_a_run
    def _begin_validation_step(self, run: HostedRun, batch: Any) -> None:
        if run.eval.driver.is_open("eval"):
            run.eval.ctx.batch = batch
            run.eval.driver.start("eval_step")

    @in_a_run
    def on_val_batch_end(self, run: HostedRun, validator: Any) -> None:
        """End a step of the evaluation."""
        run.eval.driver.end("eval_step")

    @in_a_run
    def _end_evaluation(self, run: HostedRun, name: str, metrics: Mapping[str, Any] | None, fitness: Any) -> None:
        if self._eval_hooks is not None:
            self._eval_hooks.remove()
            self._hooks.remove(self._eval_hooks)
            self._eval_hooks = None
        if not run.eval.driver.is_open("eval"):
            return
        found = results(metrics or {}, fitness)  # only rank 0 has the results
        run.eval.end_dataset(name, run.groups.of_rank_zero(found))
        run.eval.end()
        run.fire_record()
        if name == BEST:
            # Ultralytics loads `best.pt` as a new model. Its forward pass cannot be observed, so do not warn of missing events.
            run.eval.driver.synthesized.clear()
        else:
            self._support(run).after_first_step(run.eval.driver)

    # --- checkpoints ---

    @in_a_run
    def on_model_save(self, run: HostedRun, trainer: Any) -> None:
        """Record that Ultralytics has written a checkpoint after this epoch. Ultralytics calls this only on rank 0."""
        self._after_epoch.is_saved = True

    def _request_save(self, requests: tuple[Request, ...]) -> None:
        self._after_epoch.is_save_requested = True

    def _write_states(self, run: HostedRun, trainer: Any, info: CheckpointInfo) -> None:
        if not self.only_observes:
            write_states(run, trainer.wdir, info)

    def _load(self) -> CheckpointInfo | None:
        """Restore the callbacks' states, if Ultralytics resumes its training."""
        run, trainer = self._run, self._trainer
        assert run is not None
        if not trainer.start_epoch:
            return None
        # Ultralytics updates its weight average (EMA) once per step, so the number of updates is the number of steps.
        step = run.groups.of_rank_zero(trainer.ema.updates if trainer.ema else 0)
        if self.only_observes or not (trainer.wdir / STATE).is_dir():
            if not self.only_observes:
                logger.warning("%s resumes from %s, beside which no callbacks' states were found", run.host, trainer.last)
            resume_without_states(run, step, trainer.start_epoch)
            return None
        return read_states(run, trainer.wdir, step)


def _repeats_of(trainer: Any) -> tuple[int, int] | None:
    """Return how often Ultralytics has repeated this epoch because memory ran out, and how often because the loss was not finite.

    Return None in releases that do not count this.
    """
    if hasattr(trainer, "_oom_retries") and hasattr(trainer, "nan_recovery_attempts"):
        return trainer._oom_retries, trainer.nan_recovery_attempts
    return None


def results(metrics: Mapping[str, Any], fitness: Any = None) -> dict[str, float]:
    """Return Ultralytics' metrics under callsheet's names: `box_loss` for `val/box_loss`, and the sum of the losses as `loss`."""
    losses = {name.removeprefix("val/"): float(value) for name, value in metrics.items() if name.startswith("val/")}
    others = {name.removeprefix("metrics/"): float(value) for name, value in metrics.items() if not name.startswith("val/")}
    total = {"loss": sum(losses.values())} if losses else {}
    return {**total, **losses, **others, **({"fitness": float(fitness)} if fitness is not None else {})}
