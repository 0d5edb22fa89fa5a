"""Runs transformers' `TrainerCallback`s in callsheet's loop (as guests)."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, trainer_utils
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from callsheet.bridges.guest_base import Guest, logger
from callsheet.bridges.huggingface.arguments import Arguments
from callsheet.bridges.huggingface.internals import GUEST, PACKAGE
from callsheet.core.callback import Phase
from callsheet.core.context import Context
from callsheet.core.control import SaveKind
from callsheet.core.time import Timestamp, TimeUnit
from callsheet.core.wrappers import Handler
from callsheet.errors import NotSupported

GUEST_EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_data_init_end": ("on_init_end",),
    "on_train_start": ("on_train_begin",),
    "on_epoch_start": ("on_epoch_begin",),
    "on_train_step_start": ("on_step_begin",),
    "on_microbatch_start": ("on_substep_end",),  # reports the end of the step's previous microbatch, if any
    "on_optimizer_step_start": ("on_pre_optimizer_step",),
    "on_optimizer_step_end": ("on_optimizer_step",),
    "on_train_step_end": ("on_step_end",),
    "on_log": ("on_log",),
    "on_eval_step_end": ("on_prediction_step",),
    "on_eval_all_end": ("on_log", "on_evaluate"),  # for each dataset, `on_log` is called first, then `on_evaluate`
    "on_checkpoint_published": ("on_save",),
    "on_epoch_end": ("on_epoch_end",),
    "on_train_end": ("on_log", "on_train_end"),
    "on_test_step_end": ("on_prediction_step",),
    "on_test_end": ("on_predict",),
    "on_predict_step_end": ("on_prediction_step",),
    "on_predict_end": ("on_predict",),
}
"""For each event of callsheet, the methods of the wrapped transformers callback that a guest calls at this event, in order."""

_HONORED_FLAGS: Mapping[str, frozenset[str]] = {
    "on_init_end": frozenset(),
    "on_train_begin": frozenset({"should_training_stop"}),
    "on_epoch_begin": frozenset({"should_training_stop"}),
    "on_log": frozenset({"should_training_stop", "should_epoch_stop", "should_save", "should_evaluate"}),
    "on_prediction_step": frozenset({"should_training_stop", "should_epoch_stop", "should_save"}),
    "on_evaluate": frozenset({"should_training_stop", "should_epoch_stop", "should_save"}),
    "on_save": frozenset({"should_training_stop", "should_epoch_stop"}),
    "on_train_end": frozenset(),
    "on_predict": frozenset(),
}
"""For each Trainer event: the flags of `TrainerControl` that the Hugging Face Trainer obeys if a callback sets them at this event.

At events that are not listed, the Trainer obeys all flags.
"""
_CONTROL_FLAGS = tuple(field.name for field in dataclasses.fields(TrainerControl))


def guest(
    foreign: TrainerCallback,
    *,
    args: TrainingArguments | Mapping[str, Any] | None = None,
    train_dataloader: Any = None,
    eval_dataloader: Any = None,
    processing_class: Any = None,
    replicated: bool | None = None,
    name: str = "",
    phase: Phase = "measure",
    strict: bool = True,
) -> HuggingFaceGuest:
    """Return a callsheet callback that calls a `transformers.TrainerCallback`.

    The callback's methods are called in the same order as in the Hugging Face Trainer. They receive a `TrainerState` of
    callsheet's run, and a `TrainerControl` with which the callback can make the run stop, save or evaluate. The values in `logs`
    and `metrics` have the names that the Hugging Face Trainer uses. callsheet's checkpoints contain the callback's `state()`, the
    best metric and the log history.

    Args:
        foreign: the callback, an instance.
        args: the `TrainingArguments` that the callback receives, or some of them by name, such as
            `{"metric_for_best_model": "loss"}`. Some values come from the run, such as `output_dir`, `run_name` and `world_size`.
            `eval_strategy` defaults to `epoch` if the run evaluates.
        train_dataloader, eval_dataloader, processing_class: passed on to the callback.
        replicated: whether the callback makes the same requests on every rank, so that they act at once. If not, they act when
            the ranks have agreed. None: true for transformers' own callbacks that control the Trainer.
        name, phase, strict: see `Guest`.

    Raises:
        NotSupported: the callback listens to an event that callsheet does not fire. While training: the callback reads an
            argument that was not given, or makes an unsupported request (to end an epoch early, or to log at a step without a
            metrics record). With `strict=False`, such a request only causes a warning.
        ConfigError: `args` contains an unknown argument.

    Examples:
        >>> from transformers import EarlyStoppingCallback
        >>> stopper = guest(EarlyStoppingCallback(early_stopping_patience=2), args={"metric_for_best_model": "loss"})
        >>> stopper.name
        'EarlyStoppingCallback'
    """
    given = {"train_dataloader": train_dataloader, "eval_dataloader": eval_dataloader, "processing_class": processing_class}
    return HuggingFaceGuest(foreign, args=args, given=given, replicated=replicated, name=name, phase=phase, strict=strict)


class HuggingFaceGuest(Guest):
    """The callsheet callback that `guest` returns: it calls a `transformers.TrainerCallback`."""

    FRAMEWORK = "the Hugging Face Trainer"
    PACKAGE, INTERNALS = PACKAGE, GUEST
    BASE = TrainerCallback
    OWN_HANDLERS = {
        "on_checkpoint_load_start": "_reset",
        "on_checkpoint_load_end": "_note_resume",
        "on_data_init_end": "_note_run",
        "on_train_start": "_begin_training",
        "on_train_step_end": "_note_norm",
        "on_log": "_log_record",
        "on_eval_all_end": "_log_evaluation",
        "on_checkpoint_due": "_ask_for_checkpoint",
        "on_checkpoint_published": "_note_checkpoint",
        "on_train_end": "_log_summary",
    }
    EVENTS = {event: theirs for event, theirs in GUEST_EVENTS.items() if event not in ("on_log", "on_eval_all_end")} | {
        "on_train_end": ("on_train_end",)  # `on_log` is not listed, because `_log_summary` calls it
    }
    NEVER_CALLED = ("on_push_begin",)

    control: TrainerControl
    _microbatches: int
    """How many microbatches of the current step have begun."""

    def __init__(
        self,
        foreign: TrainerCallback,
        *,
        args: TrainingArguments | Mapping[str, Any] | None,
        given: Mapping[str, Any],
        replicated: bool | None,
        name: str,
        phase: Phase,
        strict: bool,
    ) -> None:
        self.args = Arguments(args)
        self._given = dict(given)
        self._strict = strict
        self._replicated = type(foreign).__module__ == "transformers.trainer_callback" if replicated is None else replicated
        self._reset()
        super().__init__(foreign, name=name, phase=phase, strict=strict)
        self._handlers: dict[str, Callable[..., None]] = {
            theirs: self.handler(theirs, getattr(foreign, theirs))
            for theirs in ("on_log", "on_evaluate")
            if self.listens_to(theirs)
        }

    def listens_to(self, theirs: str) -> bool:
        """Return whether the wrapped callback overrides the method `theirs`.

        callsheet never calls `on_push_begin`. This matters only if `args` ask for pushes to a hub; otherwise, return False for it.
        """
        return super().listens_to(theirs) and (theirs != "on_push_begin" or bool(self.args.push_to_hub))

    def handler(self, theirs: str, method: Any) -> Handler:
        """Return a handler that calls `method` with args, state and control by position, and with all other arguments by keyword."""
        honored = _HONORED_FLAGS.get(theirs, frozenset(_CONTROL_FLAGS))
        is_substep, is_predict = theirs == "on_substep_end", theirs == "on_predict"

        def handle(ctx: Context, **more: Any) -> None:
            self._update(ctx)
            if is_substep:
                self._microbatches += 1
                if self._microbatches == 1:
                    return
            elif is_predict:
                losses = ctx.eval_losses if ctx.has("eval_losses") else {}
                more = {"metrics": {f"test_{name}": float(loss) for name, loss in losses.items()}}
            answer = method(self.args, self.state, self.control, **self._given, **more)
            if answer is not None:
                self.control = answer
            control = self.control
            if (
                control.should_training_stop
                or control.should_epoch_stop
                or control.should_save
                or control.should_evaluate
                or control.should_log
            ):
                self._pass_on_requests(ctx, honored)

        return handle

    # --- the state ---

    def _reset(self, ctx: Context | None = None) -> None:
        """Create a new `TrainerState` at the start of a run, because the old `TrainerState` may have values of an earlier run."""
        self.state, self.control = TrainerState(), TrainerControl()
        self._is_training = False
        self._resumed: str | None = None
        self._step, self._microbatches = -1, 0
        self._now: Timestamp | None = None
        self._passed_on: set[str] = set()
        self._save_kind: SaveKind | Literal[""] = ""
        self._norm: Any = None
        self._logged_at, self._log_asked_at, self._loss_sum = 0, 0, 0.0
        self._datasets: set[str] = set()

    def _note_resume(self, ctx: Context) -> None:
        self._resumed = None if ctx.checkpoint is None else ctx.checkpoint.path

    def _note_run(self, ctx: Context) -> None:
        self.args._take(ctx, self._resumed)
        self._given |= {"model": ctx.model, "optimizer": ctx.optimizer, "lr_scheduler": ctx.scheduler}
        state = self.state
        state.is_world_process_zero, state.is_local_process_zero = ctx.run.is_world_process_zero, ctx.run.is_local_process_zero
        state.train_batch_size = getattr(self.args, "per_device_train_batch_size", None)
        self._set_lengths(ctx)

    def _set_lengths(self, ctx: Context) -> None:
        """Set the numbers of training steps and epochs in the `TrainerState`. A number that is not known becomes `sys.maxsize`."""
        state, each, longest = self.state, ctx.state.epoch_batches, ctx.state.max_duration
        self._last_step, epochs = sys.maxsize, None
        if longest is not None and longest.unit is TimeUnit.BATCH:
            self._last_step = int(longest.value)
        elif longest is not None and longest.unit is TimeUnit.EPOCH:
            epochs = math.ceil(longest.value)
            self._last_step = epochs * each if each else sys.maxsize
        state.max_steps = self.args.max_steps if self.args.max_steps > 0 else self._last_step
        if epochs is None:
            epochs = math.ceil(state.max_steps / each) if each and state.max_steps < sys.maxsize else sys.maxsize
        state.num_train_epochs = epochs
        state.compute_steps(self.args, state.max_steps)
        self._steps_in_epoch = each or state.max_steps

    def _begin_training(self, ctx: Context) -> None:
        self._set_lengths(ctx)
        self._update(ctx)
        self.control._new_training()
        self._passed_on.clear()
        self._is_training = True
        self._began, self._began_at, self._loss_sum = time.time(), self.state.global_step, 0.0
        self._logged_at = self.state.global_step

    def _update(self, ctx: Context) -> None:
        """Update the callback's `TrainerState` to the run's progress, and reset its `TrainerControl` at each new step."""
        if ctx.step != self._step:
            self._check_logged()
            self._step, self._microbatches = ctx.step, 0
            self.control._new_step()
            # Discard a request to end the epoch early. callsheet cannot carry it out, and has logged a warning about it.
            self.control._new_epoch()
            self._save_kind = ""
            if self._passed_on:
                self._passed_on &= {"should_training_stop"}
        now = ctx.state.timestamp
        if now is not self._now:
            self._now, state = now, self.state
            state.global_step = now.batch
            state.epoch = now.epoch + now.batch_in_epoch / self._steps_in_epoch
            state.num_input_tokens_seen = now.token

    # --- requests ---

    def _pass_on_requests(self, ctx: Context, honored: frozenset[str]) -> None:
        """Pass on to the run what the wrapped callback requests through its `TrainerControl`. Each request is passed on once.

        `honored` contains the flags that the Hugging Face Trainer obeys at this event.
        """
        for flag in _CONTROL_FLAGS:
            if not getattr(self.control, flag) or flag in self._passed_on or flag not in honored or not self._is_training:
                continue
            self._passed_on.add(flag)
            if flag == "should_log":
                self._log_asked_at = self.state.global_step
            elif flag == "should_epoch_stop":
                self._reject_or_warn("set control.should_epoch_stop, and an epoch cannot be ended early here")
            elif flag == "should_save":
                self._save_kind = "requested"
            elif flag == "should_evaluate":
                ctx.control.evaluate(f"{self.name} set control.{flag}", replicated=self._replicated)
            elif self.state.global_step < self._last_step:  # request a stop, except at the last step, where training ends anyway
                ctx.control.stop(f"{self.name} set control.{flag}", replicated=self._replicated)

    def _ask_for_checkpoint(self, ctx: Context) -> None:
        """Request the checkpoint for which the callback has asked. If an evaluation is due, request it after the evaluation."""
        if self._save_kind and ctx.boundary != "before_eval":
            kind, self._save_kind = self._save_kind, ""
            ctx.control.save(f"{self.name} set control.should_save", kind=kind, by=self.name, replicated=self._replicated)

    def _check_logged(self) -> None:
        """Raise an error, or log a warning, if the callback set `control.should_log` at a step that has no metrics record."""
        if self._log_asked_at > self._logged_at:
            asked, self._log_asked_at = self._log_asked_at, 0
            self._reject_or_warn(
                f"set control.should_log after step {asked}, where no record is made; set the run's log_interval accordingly"
            )

    def _reject_or_warn(self, what: str) -> None:
        if self._strict:
            raise NotSupported(f"{self.name} {what}; or pass strict=False to train without it")
        logger.warning("%s %s", self.name, what)

    # --- logs, evaluations, checkpoints ---

    def _note_norm(self, ctx: Context) -> None:
        self._norm = ctx.grad_norm

    def _log(self, ctx: Context, logs: dict[str, Any]) -> None:
        """Add the values to the `log_history` of the `TrainerState`, and call `on_log` of the wrapped callback."""
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control.should_log = False
        self._passed_on.discard("should_log")
        if handle := self._handlers.get("on_log"):
            handle(ctx, logs=logs)

    def _log_record(self, ctx: Context) -> None:
        """Log a record's values, except evaluation results, to the callback, under the names that the Hugging Face Trainer uses."""
        self._update(ctx)
        logs: dict[str, Any] = {}
        values = dict(ctx.record.values)
        norm, rate = values.pop("train/grad_norm", None), values.pop("train/learning_rate", None)
        if (loss := values.pop("train/loss", None)) is not None:
            self._loss_sum += loss * (self.state.global_step - self._logged_at)
            self._logged_at = self.state.global_step
            logs["loss"] = loss
            if (last := self._norm if self._norm is not None else norm) is not None:
                logs["grad_norm"] = float(last)
            logs["learning_rate"] = rate
        for name, value in values.items():
            family = name.partition("/")[0]
            if family != "time" and family not in self._datasets:
                logs[name.removeprefix("train/")] = value
        if logs:
            self._log(ctx, logs)

    def _log_evaluation(self, ctx: Context) -> None:
        """Call the wrapped callback's `on_log` and `on_evaluate` for each evaluated dataset, then update the best metric."""
        self._update(ctx)
        results = ctx.eval_results
        self._datasets |= results.keys()
        is_alone = {*ctx.state.evaluators, *results} == {"validation"}
        found: dict[str, float] = {}
        for dataset, values in results.items():
            metrics = {f"eval_{name}" if is_alone else f"eval_{dataset}_{name}": value for name, value in values.items()}
            found |= metrics
            self._log(ctx, metrics)
            self.control.should_evaluate = False
            if handle := self._handlers.get("on_evaluate"):
                handle(ctx, metrics=metrics)
        if not ctx.standalone:
            self._update_best(found)

    def _update_best(self, found: Mapping[str, float]) -> None:
        """Update the best metric. As in transformers, this is done after `on_evaluate`, which still gets the earlier best metric."""
        args, state = self.args, self.state
        if args.metric_for_best_model is None:
            return
        value = found.get(f"eval_{args.metric_for_best_model.removeprefix('eval_')}")
        if value is None:
            return  # this evaluation did not include the dataset of the metric
        if state.best_metric is None:
            state.best_metric = -math.inf if args.greater_is_better else math.inf
        is_best = value > state.best_metric if args.greater_is_better else value < state.best_metric
        if is_best:
            state.best_metric = value
            if args.save_strategy != SaveStrategy.NO:
                state.best_global_step = state.global_step
        if args.save_strategy == SaveStrategy.BEST:
            self._save_kind = "best" if is_best else ""

    def _note_checkpoint(self, ctx: Context) -> None:
        self._update(ctx)
        self.control.should_save = False
        if ctx.checkpoint is not None and ctx.checkpoint.step == self.state.best_global_step:
            self.state.best_model_checkpoint = ctx.checkpoint.path

    def _log_summary(self, ctx: Context) -> None:
        """Log the duration and the mean loss of training, as the Hugging Face Trainer does at the end of training."""
        self._update(ctx)
        self._check_logged()
        steps = self.state.global_step - self._began_at
        samples = ctx.state.timestamp.sample - ctx.state.baseline.sample
        logs = trainer_utils.speed_metrics("train", self._began, num_samples=samples, num_steps=steps)
        self._log(ctx, {**logs, "train_loss": self._loss_sum / max(steps, 0.001)})
        self._is_training = False

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped callback's `state()`, and the parts of `TrainerState` that the Hugging Face Trainer would save."""
        kept = ("log_history", "best_metric", "best_global_step", "best_model_checkpoint")
        state = {name: getattr(self.state, name) for name in kept}
        return {**state, "own": self.foreign.state()["attributes"] if isinstance(self.foreign, ExportableState) else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the wrapped callback's state, but not the arguments of the callback's constructor."""
        for name, value in state.items():
            if name != "own":
                setattr(self.state, name, list(value) if name == "log_history" else value)
        for name, value in state["own"].items():
            setattr(self.foreign, name, value)
