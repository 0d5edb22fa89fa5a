"""Runs callsheet's callbacks in a transformers Trainer, or in a trainer that is built on that Trainer, such as those of TRL."""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.nn import Module
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from callsheet.bridges.count_check import Counts
from callsheet.bridges.epoch_position import length_of
from callsheet.bridges.host_base import Callbacks, HostBase, in_a_run, observing
from callsheet.bridges.host_states import STATE, read_states, resume_without_states, write_states
from callsheet.bridges.hosted_run import HostedRun
from callsheet.bridges.huggingface.engine import check_engine, engine_of, watch_step
from callsheet.bridges.huggingface.events import NOT_FIRED
from callsheet.bridges.huggingface.hooks import TIMING_METRICS, HuggingFaceForwardHooks, StepWatch, find_trainer, plain_results
from callsheet.bridges.huggingface.internals import HOST, PACKAGE
from callsheet.bridges.wrapped_methods import WrappedMethods
from callsheet.core.callback import Callback
from callsheet.core.control import Request
from callsheet.core.manager import CallbackManager
from callsheet.core.run_state import CheckpointInfo
from callsheet.errors import NotSupported
from callsheet.run.copies import replace
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS

logger = logging.getLogger("callsheet")


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    eval_names: Iterable[str] = (),
    strict: bool = True,
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] | None = None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> HuggingFaceHost:
    """Return one `transformers.TrainerCallback` that wraps the callbacks, for `Trainer(callbacks=[host([...])])`.

    A run is one call of `trainer.train()`. The host observes steps by the Trainer's own events, microbatches in its
    `training_step`, the loss in `backward`, and evaluations in `evaluate` and `prediction_step`. `ctx.batch`, `ctx.microbatch`
    and `ctx.outputs` are those of the model's first call in a `training_step` or `prediction_step`. Samples and tokens are counted
    at this call too. Further calls, as in contrastive losses, belong to the loss. Calls of the model elsewhere, such as those of a
    callback that samples from it, are not reported.

    A metrics record is made every `logging_steps` steps. It contains the other values that the Trainer logs, as
    `huggingface/<name>`. If a callback requests a stop, a save or an evaluation, the Trainer carries it out. The host adds the
    callbacks' states to the Trainer's checkpoints, and loads them when training resumes from one.

    Not supported: gradient norms except in metrics records, the scheduler's step before `on_train_step_end`, the fetch of
    microbatches after the first, predictions, and evaluations outside training or within a step. If `train` raises an exception,
    the host fires `on_exception` and ends the run as failed. But if the host was added with `add_callback`, such a run ends later
    and without `on_exception`: when `train` is called again, the host is deleted, or the program ends.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        eval_names: the names of the evaluation datasets, if the Trainer's `eval_dataset` does not have them.
        strict: whether to raise an error if a callback listens to an event that is not fired; else log a warning.
        run_name, runs_folder: the run's name, and the folder that contains the run's folder. None: taken from `output_dir`.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.

    Raises:
        NotSupported: a callback cannot work in this loop, see `strict`. Raised when training begins or after the first step.
    """
    return HuggingFaceHost(
        callbacks,
        eval_names=eval_names,
        strict=strict,
        run_name=run_name,
        runs_folder=runs_folder,
        lock_timeout_seconds=lock_timeout_seconds,
    )


_BETWEEN_STEPS, _IN_STEP, _IN_OPTIMIZER_STEP, _OPTIMIZER_HAS_STEPPED = range(4)
"""The stages of a training step. `HuggingFaceHost._stage` is the stage that the Trainer's events have reached."""

_LOGGED_ELSEWHERE = frozenset({"loss", "learning_rate", "epoch", "total_flos", "train_loss"})
"""Values that the Trainer logs and that are not copied, because metrics records have them under other names or from other sources."""


class _HostRequests:
    """Passes callbacks' requests for checkpoints and evaluations on to the Trainer.

    It is a separate object from the host, so that the run has no reference to the host.
    """

    def __init__(self) -> None:
        self.control = TrainerControl()
        """The `TrainerControl` that the Trainer passed to its latest event."""
        self.is_written = False
        """Whether the Trainer has written a checkpoint since the last step. If so, the host does not request another checkpoint."""

    def save(self, requests: tuple[Request, ...] = ()) -> None:
        if not self.is_written:
            self.control.should_save = True

    def evaluate(self) -> None:
        self.control.should_evaluate = True


class HuggingFaceHost(HostBase, TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers' types
    """The `transformers.TrainerCallback` that `host` returns: it fires callsheet's events in a Hugging Face Trainer.

    The arguments are those of `host`.
    """

    _PACKAGE, _INTERNALS = PACKAGE, HOST
    _run: HostedRun | None = None

    def __init__(
        self,
        callbacks: Callbacks,
        *,
        eval_names: Iterable[str],
        run_name: str | None,
        runs_folder: str | os.PathLike[str] | None,
        **options: Any,
    ) -> None:
        super().__init__(callbacks, **options)
        self._run_name, self._runs_folder = run_name, runs_folder
        self._requests = _HostRequests()
        self._eval_names = tuple(eval_names)
        self._listens_to_optimizer = True
        self._prefix: str | None = None  # the metrics prefix of the innermost running call of `evaluate`, or None
        self._warned: set[str] = set()
        self._skips: Any = None
        self._has_engine = False  # whether DeepSpeed's engine steps the optimizer
        self._stage = _BETWEEN_STEPS

    # --- the run ---

    @observing
    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Wrap the Trainer's training loop, so that callsheet's run ends as failed when an error leaves the loop."""
        trainer, reference = find_trainer(state, sys._getframe()), weakref.ref(self)
        # Without the method `_inner_training_loop`, nothing can be wrapped, so callsheet may notice an error in training late.
        if not hasattr(trainer, "_inner_training_loop"):
            if any((kind.__module__, kind.__name__) == ("transformers.trainer", "Trainer") for kind in type(trainer).__mro__):
                self._warn(
                    "it has no _inner_training_loop, so an error that ends training may be recorded late and without its reason"
                )
            return

        def train(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            earlier = _run_of(reference)  # an error in this call must not end a run that had begun before this call
            try:
                return method(*args, **kwargs)
            except BaseException as error:
                host = reference()
                if host is not None and host._run is not earlier:
                    host._fail(error)
                raise

        # Do not wrap `train`: the wrapper refers to the trainer weakly, so `Trainer(...).train()` could lose the trainer.
        WrappedMethods(trainer).wrap("_inner_training_loop", train, put=replace)

    @observing
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any, optimizer: Any = None,
        lr_scheduler: Any = None, train_dataloader: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        self._forget_earlier_run()
        trainer = find_trainer(state, sys._getframe())
        if not isinstance(model, Module):  # SetFit passes an object that contains the trained module
            model = getattr(trainer, "model", model)
        if not isinstance(model, Module):
            raise NotSupported(
                f"the Trainer trains a {type(model).__name__}, and the host needs a torch.nn.Module; train one, or leave the host out"
            )
        engine = engine_of(trainer)
        if engine is not None:
            check_engine(engine, strict=self._strict)
        output = Path(args.output_dir or "runs/huggingface").absolute()
        self._run = run = HostedRun(
            self.manager,
            model=model,
            optimizer=getattr(optimizer, "optimizer", optimizer),
            scheduler=getattr(lr_scheduler, "scheduler", lr_scheduler),
            host="the Hugging Face Trainer",
            run_name=self._run_name or output.name,
            runs_folder=self._runs_folder or output.parent,
            config=_plain(args.to_sanitized_dict()),
            max_duration=f"{state.max_steps}ba" if state.max_steps > 0 else None,
            log_interval=f"{int(state.logging_steps)}ba" if str(args.logging_strategy.value) == "steps" else "1ep",
            device=args.device,
            able=("stop", "save", "evaluate"),
            saves=self._requests.save,
            **self._run_options,
        )
        run.evaluation.request = self._requests.evaluate
        datasets = getattr(trainer, "eval_dataset", None)
        run.state.evaluators = tuple(datasets) if isinstance(datasets, Mapping) else self._eval_names
        if (length := length_of(train_dataloader)) is not None:
            run.state.epoch_batches = -(-length // args.gradient_accumulation_steps)
        self._skips = optimizer if hasattr(optimizer, "step_was_skipped") else None
        self._watch = watch = StepWatch(run.driver, run.ctx, getattr(optimizer, "scaler", None))
        run.losses = watch.reader
        self._forward = watch.hooks = hooks = HuggingFaceForwardHooks(run, model)
        wrapped = [] if trainer is None else [self._wrap_methods(trainer)]
        self._has_engine = engine is not None
        if self._has_engine:
            wrapped.append(watch_step(engine, functools.partial(_begin_engine_step, weakref.ref(self))))
        if state.global_step:
            run.checkpoints.loads = lambda: _load_states(run, args, state)
        self._begin_run(run, [hooks, watch, *wrapped], NOT_FIRED)
        # If the data's length is not known, the Trainer's `epoch` is not the number of epochs, so do not compare it.
        run.counts.follow(lambda: Counts(state.global_step, int(state.epoch or 0) if length is not None else None))
        self._requests.control = control
        if trainer is None:
            self._warn("the Trainer was not found in the call stack: neither batches nor the steps of evaluations are reported")
        self._requests.is_written, self._prefix, self._stage = False, None, _BETWEEN_STEPS
        if not args.eval_on_start:  # with `eval_on_start`, callsheet's span `round` starts only after the first evaluation
            run.driver.start("round")

    def _wrap_methods(self, trainer: Any) -> WrappedMethods:
        methods, hooks, host = WrappedMethods(trainer), self._forward, weakref.proxy(self)

        def evaluate(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return host._evaluate(trainer_now, method, args, kwargs)

        trainer_now = weakref.proxy(trainer)
        hooks.name_of_dataset = lambda: _dataset(host._prefix)
        ours = {
            "training_step": hooks.training_step,
            "compute_loss": hooks.compute_loss,
            "prediction_step": hooks.prediction_step,
            "evaluate": evaluate,
        }
        for name, around in ours.items():
            if hasattr(trainer, name):
                methods.wrap(name, around)
        return methods

    def _warn(self, what: str) -> None:
        """Log a warning that the Trainer does something unexpected, unless the same warning was logged before."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("callsheet in the Hugging Face Trainer: %s. Training continues", what)

    def _handle(
        self, method: Callable[..., None], args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Call `method`, which handles a Trainer event, with the run, `args`, `state`, and a dict of the other arguments."""
        if self._run is not None:
            self._requests.control = control
            method(self, self._run, args, state, given)

    @in_a_run
    def on_train_end(self, run: HostedRun, *_: Any) -> None:
        self._finish()

    # --- epochs and steps ---

    @in_a_run
    def on_epoch_begin(self, run: HostedRun, *_: Any) -> None:
        self._stage = _BETWEEN_STEPS  # the Trainer may have left the previous epoch in the middle of a step
        run.driver.start("epoch")

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Prepare a step. The step's start is fired later, when the Trainer calls the model with the first batch."""
        run = self._run
        if run is None:
            return
        try:
            watch, driver = self._watch, run.driver
            if driver.listen():
                self._forward.listen(driver.listens_to("forward"))
                watch.listen(driver.is_loss_read)
                self._listens_to_optimizer = driver.listens_to("clip_gradients") or driver.listens_to("optimizer_step")
            watch.total, watch.is_on = None, True
            if self._stage != _BETWEEN_STEPS:
                run.counts.doubt()
            self._stage = _IN_STEP
        except BaseException as error:
            self._leave(error)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End a microbatch that is not the last microbatch of its step."""
        try:
            if self._run is not None:
                self._run.driver.end("microbatch")
        except BaseException as error:
            self._leave(error)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Fire the start of the optimizer's step. Called when the gradients are computed and clipped."""
        run = self._run
        if run is None:
            return
        try:
            if self._stage != _IN_STEP:
                run.counts.doubt()
                return
            self._stage = _IN_OPTIMIZER_STEP
            if self._listens_to_optimizer and not self._has_engine:
                self._begin_optimizer_step(run)
        except BaseException as error:
            self._leave(error)

    def _begin_optimizer_step(self, run: HostedRun) -> None:
        driver = run.driver
        if not driver.spans["train_step"].is_open:
            self._begin_step(run)
        if not driver.spans["clip_gradients"].has_no_listeners:
            driver.start_and_end("clip_gradients")
        driver.start("optimizer_step")

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the step. Called after the optimizer has changed the parameters.

        The gradients still exist, and the learning rate is still that of the step.
        """
        run = self._run
        if run is None:
            return
        try:
            driver = run.driver
            if self._stage not in (_IN_STEP, _IN_OPTIMIZER_STEP):
                run.counts.doubt()
            self._stage = _OPTIMIZER_HAS_STEPPED
            run.step_skipped = self._skips is not None and self._skips.step_was_skipped
            self._watch.is_on = False
            if not self._listens_to_optimizer:
                if not driver.spans["train_step"].is_open:
                    self._begin_step(run)
                if driver.is_read and not self._has_engine:
                    driver.start("optimizer_step")
            if driver.has_listeners:
                # End the optimizer's step and the training step here. In a step without listeners, `on_step_end` ends both.
                driver.end_step()
        except BaseException as error:
            self._leave(error)

    def _begin_step(self, run: HostedRun) -> None:
        """Fire the start of a step in which the model was not called. Normally, the model's first call fires the start."""
        run.counted, run.ctx.batch = (0, 0), None
        if not run.driver.spans["fetch"].has_no_listeners:
            run.driver.start_and_end("fetch")
            run.driver.synthesized.add("fetch")
        run.driver.start_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Carry out the actions that are due after a step, such as a metrics record or a requested stop or save."""
        run = self._run
        if run is None:
            return
        requests = self._requests
        requests.control, requests.is_written = control, False
        try:
            if self._stage != _OPTIMIZER_HAS_STEPPED:
                run.counts.doubt()
            self._stage = _BETWEEN_STEPS
            if run.end_step():
                self._after_step(run)
            if run.checkpoints.requests:
                self._repeat_save_request(run)
        except BaseException as error:
            self._leave(error)

    @in_a_run
    def on_epoch_end(self, run: HostedRun, args: TrainingArguments, state: TrainerState, given: Mapping[str, Any]) -> None:
        """End the epoch, also if the Trainer has left the epoch before the last batch."""
        run.end_epoch(is_whole=state.epoch is not None and float(state.epoch).is_integer())
        self._repeat_save_request(run)
        self._stop_if_asked(run)

    def _repeat_save_request(self, run: HostedRun) -> None:
        """Repeat a callback's request to save if the Trainer has not carried it out yet.

        The Trainer resets the request when a step begins, and when it saves the best model after an evaluation.
        """
        if run.checkpoints.requests:
            if self._requests.is_written:
                self._fire_checkpoint(run)
            else:
                self._requests.save()

    def _stop(self, loop: Any) -> None:
        self._requests.control.should_training_stop = True

    # --- records, evaluations, checkpoints ---

    @in_a_run
    def on_log(self, run: HostedRun, args: TrainingArguments, state: TrainerState, given: Mapping[str, Any]) -> None:
        """Add what the Trainer logs to the next metrics record, except the loss, the learning rate and evaluation results."""
        values = {name: value for name, value in (given.get("logs") or {}).items() if isinstance(value, (int, float))}
        if "grad_norm" in values:
            run.ctx.log({"train/grad_norm": values.pop("grad_norm")}, across="same")
        rest = {
            f"huggingface/{name}": value
            for name, value in values.items()
            if name not in _LOGGED_ELSEWHERE and (not name.startswith("eval_") or name.endswith(TIMING_METRICS))
        }
        if rest:
            run.ctx.log(rest, across="same")

    def on_prediction_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        try:
            if self._run is not None:
                self._run.eval.driver.end("eval_step")
        except BaseException as error:
            self._leave(error)

    def _evaluate(self, trainer: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `trainer.evaluate` and fire the evaluation's events.

        The evaluation's end is fired also if the evaluation fails, so that a callback that has swapped the weights, such as `EMA`,
        restores the trained weights.

        If there are several datasets, `trainer.evaluate` calls itself for each dataset.
        """
        run, outer = self._run, self._prefix
        if run is None:
            return method(*args, **kwargs)
        self._prefix = str(kwargs.get("metric_key_prefix", args[2] if len(args) > 2 else "eval"))
        is_own = kwargs.get("eval_dataset", args[0] if args else None) is None
        try:
            if outer is None:
                self._call_or_leave(run, self._begin_evaluation, is_own)
            found = method(*args, **kwargs)
        except BaseException:
            self._prefix = outer
            if outer is None and self._run is run:
                self._call_or_leave(run, self._close_evaluation, {})
            raise
        prefix, self._prefix = self._prefix, outer
        if outer is None and self._run is run:
            self._call_or_leave(run, self._end_trainer_evaluation, trainer, found, prefix)
        return found

    def _call_or_leave(self, run: HostedRun, function: Callable[..., Any], *given: Any) -> None:
        """Call `function(run, *given)`. If the function raises an error, end callsheet's run; see `_leave`."""
        try:
            function(run, *given)
        except BaseException as error:
            self._leave(error)

    def _end_trainer_evaluation(self, run: HostedRun, trainer: Any, found: Any, prefix: str) -> None:
        self._requests.control = trainer.control
        self._end_evaluation(run, plain_results(found, prefix) if isinstance(found, Mapping) else {})

    def _begin_evaluation(self, run: HostedRun, is_own: bool) -> None:
        if run.eval.order.allows("E"):
            run.eval.begin_all(standalone=not is_own)
        else:
            self._warn(
                "an evaluation within a step, before the first one of an epoch or after another evaluation is not reported"
            )

    def _close_evaluation(self, run: HostedRun, found: Mapping[str, float]) -> bool:
        """End the current evaluation and return True; return False if there is none."""
        if not run.eval.driver.is_open("eval_all"):
            return False
        # If the Trainer did not call `on_evaluate`, the evaluation of the dataset is still open, so end it here.
        if run.eval.driver.is_open("eval"):
            run.eval.end_dataset(run.eval.ctx.eval_name, found)
        elif not run.eval.found:
            run.eval.begin("validation")
            run.eval.end_dataset("validation", found)
        run.eval.end()
        return True

    def _end_evaluation(self, run: HostedRun, found: Mapping[str, float]) -> None:
        if not self._close_evaluation(run, found):
            return
        run.fire_record()
        self._stop_if_asked(run)
        if run.driver.is_open("train"):  # an evaluation before training is not followed by a checkpoint
            self._fire_due(run)

    @in_a_run
    def on_evaluate(self, run: HostedRun, args: TrainingArguments, state: TrainerState, given: Mapping[str, Any]) -> None:
        """End the evaluation of a dataset."""
        is_open, prefix = run.eval.driver.is_open("eval_all"), self._prefix or "eval"
        if not is_open and self._prefix is None:  # `Trainer.evaluate` is not running
            self._warn(
                "an evaluation that did not go through `Trainer.evaluate` is reported only at its end, and used the trained weights"
            )
            self._begin_evaluation(run, is_own=True)
        if run.eval.driver.is_open("eval_all"):
            found = plain_results(given.get("metrics") or {}, prefix)
            if not run.eval.driver.is_open("eval"):  # the model was not called, so `on_eval_start` was not fired
                run.eval.begin(_dataset(prefix))
            run.eval.end_dataset(_dataset(prefix), found)
            if not is_open:
                self._end_evaluation(run, {})

    def _fire_due(self, run: HostedRun) -> None:
        """Fire `on_checkpoint_due`, at which callbacks request checkpoints.

        If the Trainer has already written a checkpoint of this step, that checkpoint satisfies the requests.
        """
        run.boundaries.fire_checkpoint_due("step" if run.driver.is_open("epoch") else "epoch")
        if self._requests.is_written and run.checkpoints.requests:
            self._fire_checkpoint(run)

    @in_a_run
    def on_save(self, run: HostedRun, args: TrainingArguments, state: TrainerState, given: Mapping[str, Any]) -> None:
        """Add the callbacks' states to a checkpoint that the Trainer has written, and fire the events of that save."""
        self._requests.is_written, self._path, self._step = True, _checkpoint(args, state), state.global_step
        order = run.eval.order
        if order.allows("DS"):
            # If callbacks request a checkpoint now, the checkpoint that the Trainer has just written satisfies their request.
            self._fire_due(run)
            self._fire_checkpoint(run)
        elif order.allows("S"):
            self._fire_checkpoint(run)
        else:
            self._warn("a second checkpoint of one step, or one within a step, is not reported, and holds no callbacks' states")

    def _fire_checkpoint(self, run: HostedRun) -> None:
        path = self._path
        if run.eval.order.allows("S"):
            run.fire_checkpoint(
                str(path),
                lambda info: None if self.only_observes else write_states(run, path, info),
                has_trained_weights=True,
            )


def _load_states(run: HostedRun, args: TrainingArguments, state: TrainerState) -> CheckpointInfo:
    """Load the callbacks' states from the checkpoint from which the Trainer resumes. Return the checkpoint's `CheckpointInfo`."""
    given = args.resume_from_checkpoint
    paths = [Path(given)] if isinstance(given, str) else []
    paths.append(_checkpoint(args, state))
    found = next((path for path in paths if (path / STATE).is_dir()), None)
    if found is not None:
        return read_states(run, found, state.global_step)
    logger.warning("%s resumes from step %d, and no callbacks' states were found in %s", run.host, state.global_step, paths[-1])
    resume_without_states(run, state.global_step, int(state.epoch or 0))
    return CheckpointInfo(str(paths[0]), state.global_step, int(state.epoch or 0), "periodic")


def _run_of(reference: weakref.ref[HuggingFaceHost]) -> HostedRun | None:
    host = reference()
    return None if host is None else host._run


def _begin_engine_step(reference: weakref.ref[HuggingFaceHost]) -> None:
    """Fire the start of the optimizer's step. Called just before DeepSpeed's engine steps the optimizer."""
    host, run = reference(), _run_of(reference)
    if host is not None and run is not None and (host._listens_to_optimizer or run.driver.is_read):
        host._call_or_leave(run, host._begin_optimizer_step)


def _dataset(prefix: str | None) -> str:
    """Return the name of the dataset whose metrics have this prefix: `<name>` for `eval_<name>`, and `validation` for `eval`."""
    return prefix.removeprefix("eval_") if prefix and prefix != "eval" else "validation"


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or "") / f"checkpoint-{state.global_step}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str)) or value is None}
