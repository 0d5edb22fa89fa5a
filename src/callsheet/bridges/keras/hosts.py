"""Runs callsheet's callbacks in Keras's loops (torch backend), as one callback of Keras."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn  # imported before Keras, which otherwise may import the package of another backend

from callsheet.errors import ConfigError, NotSupported
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, LOG_INTERVAL
from callsheet.run.signals import PreemptSignals, signals_of

try:
    import keras
except ModuleNotFoundError as error:
    if error.name == "keras" or os.environ.get("KERAS_BACKEND") == "torch":
        raise
    raise ConfigError(
        f"Keras cannot be imported: {error}. callsheet.bridges.keras needs Keras on torch: set KERAS_BACKEND=torch before keras is imported"
    ) from None

from callsheet.bridges.count_check import Counts
from callsheet.bridges.epoch_position import EpochPosition
from callsheet.bridges.eval_events import EVALUATED
from callsheet.bridges.forward_hooks import ForwardHooks
from callsheet.bridges.host_base import Callbacks, HostBase, in_a_run, observing
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.keras.events import NOT_FIRED
from callsheet.bridges.keras.guests import check_backend
from callsheet.bridges.keras.internals import HOST, PACKAGE
from callsheet.bridges.keras.optimizer import Scale, Steps, wrap_optimizer
from callsheet.bridges.training_hooks import TrainingHooks
from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.core.time import Time
from callsheet.run.copies import replace
from callsheet.trainer.tasks import counts_of

logger = logging.getLogger("callsheet")


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    model: nn.Module | None = None,
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    resume: str | os.PathLike[str] | None = None,
    log_interval: str | int | Time = LOG_INTERVAL,
    preempt_signals: PreemptSignals = (),
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> KerasHost:
    """Wrap the callbacks in one Keras callback, for `model.fit(..., callbacks=[host([...])])`, `evaluate` or `predict`; torch backend only.

    Each call of `fit`, `evaluate` or `predict` is one run. `ctx.batch` is the batch that Keras passes to the model's
    `train_function`. The host observes the forward pass with hooks on the model, the loss in `backward`, and the optimizer's step
    in its `apply`. If a callback requests a stop, the host sets `model.stop_training`. If a callback requests a checkpoint, the
    host writes it in callsheet's format. `resume` continues a run from such a checkpoint.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        strict: whether to raise an error if a callback listens to an event that is never fired. False: a warning is logged.
        model: the torch module that the Keras model wraps, if callbacks are to see this module and its parameter names as
            `ctx.model`. It must contain all weights of the Keras model. None: the Keras model, whose weights have Keras's names.
        run_name: the run's name.
        runs_folder: the folder that contains the run's folder, in which checkpoints are written.
        resume: `"auto"` resumes from the newest valid checkpoint of this run, if there is one; a path resumes from that checkpoint; None
            starts a new run.
        log_interval: how often a metrics record is made; an integer means batches.
        preempt_signals: names of the signals that preempt the run: it saves a checkpoint and ends.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.

    Returns:
        A Keras callback.

    Raises:
        ConfigError: Keras does not run on the torch backend; or, when training begins, the Keras model has weights that are not
            in `model`.
        NotSupported: a callback cannot work in Keras's loop, see `strict`; or the model is compiled with `jit_compile`, or its
            optimizer accumulates gradients itself, so that the parts of a step cannot be observed.
    """
    check_backend()
    return KerasHost(
        callbacks,
        strict=strict,
        model=model,
        resume=os.fspath(resume) if resume is not None else None,
        run_name=run_name,
        runs_folder=runs_folder,
        log_interval=log_interval,
        signals=signals_of(preempt_signals),
        lock_timeout_seconds=lock_timeout_seconds,
    )


class KerasHost(HostBase, keras.callbacks.Callback):  # type: ignore[misc]  # mypy does not read Keras's types
    """The Keras callback that `host` returns: it fires callsheet's events in Keras's loops.

    Make it with `host`, which has other arguments.
    """

    _PACKAGE, _INTERNALS = PACKAGE, HOST
    _STOPS_IF_PREEMPTED = True
    _run: HostedRun | None = None
    _batch: int | None = None
    """Keras's index of the latest batch within its epoch; None before the first batch of a call of `fit`."""
    _earlier_steps = 0
    """The number of steps, as Keras counts them, before the epoch of the latest batch began."""

    def __init__(self, callbacks: Callbacks, *, model: nn.Module | None, resume: str | None, **options: Any) -> None:
        super().__init__(callbacks, **options)
        self._module = model
        self._resume_path = resume
        self._is_in_fit = False

    # --- the run ---

    def _begin(self, *, is_training: bool, is_prediction: bool = False) -> HostedRun:
        self._forget_earlier_run()
        model, optimizer = self.model, self.model.optimizer if is_training else None
        if is_training and model.jit_compile:
            raise NotSupported(
                "the Keras model is compiled with jit_compile, so the host cannot observe its steps; compile it with jit_compile=False"
            )
        if getattr(optimizer, "gradient_accumulation_steps", None):
            raise NotSupported(
                "the Keras optimizer has gradient_accumulation_steps, so the host cannot know which batch ends a step; train with larger "
                "batches instead"
            )
        module = self._module if self._module is not None else model
        if missing := {weight.data_ptr() for weight in model.parameters()} - {
            weight.data_ptr() for weight in module.parameters()
        }:
            raise ConfigError(f"the Keras model has {len(missing)} weights that are not in host(model=...); omit that argument")
        shown = wrap_optimizer(optimizer, model) if optimizer is not None else None
        epochs = self.params.get("epochs") if is_training else None
        self._run = run = HostedRun(
            self.manager,
            model=module,
            optimizer=shown,
            host="Keras",
            config={"model": model.name, "optimizer": optimizer.name} if optimizer is not None else {"model": model.name},
            max_duration=f"{epochs}ep" if epochs else None,
            able=("stop", "save") if is_training else (),
            **self._run_options,
        )
        run.state.epoch_batches = self.params.get("steps") if is_training else None
        self._position = EpochPosition()
        run.parts = {"place": self._position}
        scale = Scale(optimizer) if Scale.is_in(optimizer) else None
        self._training = TrainingHooks(run, module, None, scale)
        if is_prediction:
            self._eval_hooks = ForwardHooks(run.driver, run.ctx, module, "predict")
        else:
            self._eval_hooks = ForwardHooks(run.eval.driver, run.eval.ctx, module, "eval")
        hooks: list[Any] = [self._training, self._eval_hooks]
        if optimizer is not None:
            self._steps = Steps(run, optimizer)
            hooks.append(self._steps)
        self._is_epoch_open = self._is_whole = self._has_evaluated = False
        self._evaluation: _PatchedFunction | None = None  # the patched `test_function`, only during an evaluation
        self._epochs: int | None = None  # Keras's count of epochs; None before the first epoch
        self._begin_run(run, hooks, NOT_FIRED, resume=self._resume_path if is_training else None)
        return run

    def _patch(self, name: str, before: Callable[..., list[Any] | None], after: Callable[..., None]) -> _PatchedFunction:
        """Patch a function that Keras calls with a batch, such as `train_function`, because Keras passes no batch to callbacks."""
        patched = _PatchedFunction(self.model, name, before, after)
        self._hooks.append(patched)
        return patched

    # --- training ---

    @observing
    def on_train_begin(self, logs: Any = None) -> None:
        """Begin a run of callsheet's callbacks when `fit` begins."""
        self._is_in_fit = True
        run = self._begin(is_training=True)
        self._patch("train_function", self._begin_step, self._end_step)
        run.driver.start("round")
        if run.state.timestamp.epoch:
            self.model._initial_epoch = run.state.timestamp.epoch  # makes `fit` continue at this epoch
        self._batch, self._earlier_steps = None, run.state.timestamp.batch - run.state.timestamp.batch_in_epoch
        me = weakref.proxy(self)
        run.counts.follow(lambda: me._read_counts())
        self._stop_if_asked(run)

    def _read_counts(self) -> Counts:
        """Return Keras's counts of steps and epochs. Keras counts the batches of an epoch, and each batch is a step."""
        return Counts(None if self._batch is None else self._earlier_steps + self._batch + 1, self._epochs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Store Keras's index of the batch, so that callsheet's count of steps can be compared with Keras's count.

        Training would be slower without this method: if no callback overrides it, Keras calls its own callbacks in a thread, and
        training waits for the interpreter lock.
        """
        if self._batch is not None and batch <= self._batch:  # the first batch of an epoch
            self._earlier_steps += self._batch + 1
        self._batch = batch

    @in_a_run
    def on_epoch_begin(self, run: HostedRun, epoch: int, logs: Any = None) -> None:
        now, self._epochs = run.state.timestamp, epoch
        # If the first epoch's number is not the expected one, the user has called `fit(initial_epoch=...)`.
        if epoch != now.epoch and now.batch == run.state.baseline.batch:
            run.state.timestamp = run.state.baseline = now._replace(epoch=epoch, epoch_in_round=epoch)
        run.counts.check()
        self._position.begin()
        self._is_epoch_open, self._has_evaluated = True, False
        run.driver.start("epoch")

    def _begin_step(self, run: HostedRun, data: Any) -> list[Any] | None:
        """Start the step of a batch. Return the data on which Keras is to train, or None if Keras is to skip the batch."""
        driver, ctx, position, training = run.driver, run.ctx, self._position, self._training
        if position.to_skip:
            position.to_skip -= 1
            if not position.to_skip:
                position.end_skipping()
            return None
        if driver.listen():
            training.listen()
        if has_listeners := driver.listens_to("fetch"):
            driver.start("fetch")
        (ctx.batch,) = data
        if has_listeners:
            driver.end("fetch")
        driver.start_step()
        run.counted = counts_of(ctx.batch)
        training.backward.total, training.backward.is_on = None, True
        self._steps.has_stepped = False
        if training.listens_to_microbatch:
            ctx.microbatch = ctx.batch
            driver.start("microbatch")
        return [ctx.batch]

    def _end_step(self, run: HostedRun) -> None:
        """End the step of a batch after Keras has trained on the batch."""
        self._training.backward.is_on = False
        self._position.taken += 1
        run.step_skipped = not self._steps.has_stepped
        if run.end_step():
            self._after_step(run)

    def _close_epoch(self, run: HostedRun) -> None:
        if self._is_epoch_open:
            self._is_epoch_open = False
            self._epochs = None if self._epochs is None else self._epochs + 1
            self._is_whole = not self.model.stop_training or self._position.taken == self.params.get("steps")
            self._position.end()
            run.close_epoch(is_whole=self._is_whole)

    @in_a_run
    def on_epoch_end(self, run: HostedRun, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """End the epoch after the epoch's evaluation, and add the metrics in Keras's `logs` to the next metrics record."""
        self._close_epoch(run)
        self._epochs = epoch + 1
        found = {
            f"keras/{name}": float(value)
            for name, value in (logs or {}).items()
            if name != "loss" and not name.startswith("val_")
        }
        if found:
            run.ctx.log(found, across="same")
        if found or self._has_evaluated:
            run.fire_record()
        if self._is_whole:
            run.boundaries.reach("epoch")
        self._stop_if_asked(run)

    def _stop(self, loop: Any) -> None:
        self.model.stop_training = True

    @observing
    def on_train_end(self, logs: Any = None) -> None:
        self._is_in_fit = False
        self.model._initial_epoch = None
        if self._run is not None and self._epochs is not None and not self.model.stop_training:
            self._epochs = self.params["epochs"]  # if nothing has stopped Keras, it has trained all epochs
        self._finish()

    # --- evaluation and prediction ---

    @observing
    def on_test_begin(self, logs: Any = None) -> None:
        """Start an evaluation. Outside training, first begin a run for the evaluation."""
        # If the run of this `fit` has ended early, the later evaluations of this `fit` must not begin a new run.
        if self._has_given_up and self._is_in_fit:
            return
        run = self._run
        if run is None or not run.driver.is_open("train"):
            run = self._begin(is_training=False)
        else:
            self._close_epoch(run)
        run.eval.begin(EVALUATED, standalone=not run.driver.is_open("train"))
        self._eval_hooks.listen(True)
        if self._evaluation is None:
            self._evaluation = self._patch("test_function", self._begin_eval_step, self._end_eval_step)

    def _begin_eval_step(self, run: HostedRun, data: Any) -> Any:
        (run.eval.ctx.batch,) = data
        run.eval.driver.start("eval_step")
        return data

    def _end_eval_step(self, run: HostedRun) -> None:
        run.eval.driver.end("eval_step")

    @in_a_run
    def on_test_end(self, run: HostedRun, logs: Mapping[str, Any] | None = None) -> None:
        """End the evaluation. `logs` contains the evaluation's losses and metrics."""
        self._eval_hooks.listen(False)
        if self._evaluation is not None:
            self._hooks.remove(self._evaluation)
            self._evaluation.remove()
            self._evaluation = None
        run.eval.end_dataset(EVALUATED, logs or {})
        run.eval.end()
        self._has_evaluated = True
        self._support(run).after_first_step(run.eval.driver)
        if not run.driver.is_open("train"):
            run.fire_record()
            self._finish()

    @observing
    def on_predict_begin(self, logs: Any = None) -> None:
        """Begin a run for a prediction. A prediction during training is not observed."""
        if (self._has_given_up and self._is_in_fit) or (self._run is not None and self._run.driver.is_open("train")):
            return
        self._begin(is_training=False, is_prediction=True).driver.start("predict")
        self._eval_hooks.listen(True)
        self._patch("predict_function", self._begin_predict_step, self._end_predict_step)

    def _begin_predict_step(self, run: HostedRun, data: Any) -> Any:
        (run.ctx.batch,) = data
        run.driver.start("predict_step")
        return data

    def _end_predict_step(self, run: HostedRun) -> None:
        run.driver.end("predict_step")

    @in_a_run
    def on_predict_end(self, run: HostedRun, logs: Any = None) -> None:
        if run.driver.is_open("predict"):
            run.driver.end("predict")
            self._finish()


class _PatchedFunction:
    """Replaces one of the model's functions, such as `train_function`, by a function that also calls `before` and `after`.

    Args:
        before: a method of the host. It takes the run and the data, and returns the data to use, or None to skip the batch.
        after: a method of the host. It takes the run.
    """

    def __init__(self, model: Any, name: str, before: Any, after: Any) -> None:
        function = getattr(model, name)
        owner, begin, end = weakref.ref(before.__self__), before.__func__, after.__func__

        def called(data: Any) -> Any:
            host: KerasHost | None = owner()
            if host is None or host._run is None:
                return function(data)
            run, given = host._run, data
            try:
                given = begin(host, run, data)
            except BaseException as error:
                host._leave(error)
            if given is None:
                return {}
            try:
                logs = function(given)
            except BaseException as error:  # Keras has no callback event for errors, so end the run here
                if host._run is run:
                    host._fail(error)
                raise
            if host._run is run:
                try:
                    end(host, run)
                except BaseException as error:
                    host._leave(error)
            return logs

        self.remove = replace(model, name, called)
