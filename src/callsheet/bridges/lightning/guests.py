"""Runs Lightning's callbacks in callsheet's loop (as guests)."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from callsheet.bridges.guest_base import Guest, no_guest
from callsheet.bridges.lightning.facades import LoggerFacade, TrainerFacade
from callsheet.bridges.lightning.internals import PACKAGE
from callsheet.bridges.lightning.module import ModuleFacade
from callsheet.core.callback import Phase
from callsheet.core.context import Context
from callsheet.core.wrappers import Handler
from callsheet.errors import NotSupported

logger = logging.getLogger("callsheet")

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_NO_BATCH: Any = object()  # means "no batch", because None can be a batch

REJECTED: Mapping[str, str] = {
    "StochasticWeightAveraging": "lengthens training by an epoch of Lightning's own loop, and puts other schedulers in",
    "BatchSizeFinder": "runs trial trainings in Lightning's Trainer",
    "LearningRateFinder": "runs trial trainings in Lightning's Trainer",
    "BaseFinetuning": "freezes the model before the optimizer is made",
    "ModelPruning": "prunes the modules of a LightningModule, and rewrites Lightning's checkpoints",
    "BasePredictionWriter": "writes what Lightning's own predict loop has collected",
}
"""Lightning's callbacks that cannot be guests, and what each of them does that callsheet does not support."""


def guest(
    foreign: Any, *, name: str = "", phase: Phase = "measure", log_every_n_steps: int = 50, strict: bool = True
) -> LightningGuest:
    """Return a callsheet callback that calls a Lightning callback, of `lightning.pytorch` or `pytorch_lightning`.

    The callback's hooks are called in Lightning's order: `on_train_epoch_end` after the evaluation at the epoch's end, and
    `on_train_batch_end` once per batch. The callback receives objects that replace the Trainer and the LightningModule. It may
    stop training, set gradient accumulation, write Lightning's checkpoints, log, and change the model's weights.

    Args:
        foreign: the callback, an instance.
        name: the key of the callback's state in checkpoints. Empty: the name of its class.
        phase: the callback's place in the order of each event. Use `change` for a callback that swaps the weights for an
            evaluation.
        log_every_n_steps: the Trainer's `log_every_n_steps` that the callback sees. The default is Lightning's.
        strict: whether to raise an error if the callback is known not to work, or overrides a hook that is never called; else log
            a warning.

    Raises:
        NotSupported: see `strict`; or, while training, the callback uses an attribute that these objects do not have.
        RegistrationError: `foreign` is not an instance of Lightning's Callback.
    """
    return LightningGuest(foreign, name=name, phase=phase, log_every_n_steps=log_every_n_steps, strict=strict)


class LightningGuest(Guest):
    """The callsheet callback that `guest` returns: it calls a Lightning callback.

    The arguments are those of `guest`.
    """

    FRAMEWORK = "Lightning"
    PACKAGE = PACKAGE
    EVENTS = {
        "on_train_start": ("on_fit_start", "on_train_start"),
        "on_epoch_start": ("on_train_epoch_start",),
        "on_backward_start": ("on_before_backward",),
        "on_backward_end": ("on_after_backward",),
        "on_clip_gradients_start": ("on_before_optimizer_step",),
        "on_eval_all_start": ("on_validation_start", "on_validation_epoch_start"),
        "on_eval_step_start": ("on_validation_batch_start",),
        "on_eval_step_end": ("on_validation_batch_end",),
        "on_eval_all_end": ("on_validation_epoch_end", "on_validation_end", "teardown", "on_train_epoch_end"),
        "on_epoch_end": ("on_train_epoch_end",),
        "on_checkpoint_due": ("on_train_epoch_end",),
        "on_round_end": ("on_train_epoch_end",),
        "on_train_end": ("on_train_end", "on_fit_end", "teardown"),
        "on_test_start": ("on_test_start", "on_test_epoch_start"),
        "on_test_step_start": ("on_test_batch_start",),
        "on_test_step_end": ("on_test_batch_end",),
        "on_test_end": ("on_test_epoch_end", "on_test_end", "teardown"),
        "on_predict_start": ("on_predict_start", "on_predict_epoch_start"),
        "on_predict_step_start": ("on_predict_batch_start",),
        "on_predict_step_end": ("on_predict_batch_end",),
        "on_predict_end": ("on_predict_epoch_end", "on_predict_end", "teardown"),
        "on_exception": ("on_exception",),
    }
    OWN_HANDLERS = {
        "on_train_start": "_start_fit",
        "on_epoch_start": "_start_epoch",
        "on_microbatch_start": "_start_microbatch",
        "on_microbatch_end": "_end_microbatch",
        "on_train_step_end": "_end_step",
        "on_log": "_note_record",
        "on_epoch_end": "_end_epoch",
        "on_train_end": "_end_fit",
        "on_eval_all_start": "_start_evaluation",
        "on_eval_start": "_start_dataset",
        "on_eval_step_start": "_count_eval_batch",
        "on_eval_all_end": "_end_evaluation",
        "on_test_start": "_start_test",
        "on_test_step_start": "_count_eval_batch",
        "on_predict_start": "_start_prediction",
        "on_predict_step_start": "_count_eval_batch",
    }
    NEVER_CALLED = ("on_before_zero_grad",)

    def __init__(
        self, foreign: Any, *, name: str = "", phase: Phase = "measure", log_every_n_steps: int = 50, strict: bool = True
    ) -> None:
        self.package = _package_of(foreign)
        object.__setattr__(self, "BASE", self.package.Callback)
        self.trainer, self.module, self.logger = TrainerFacade(self, log_every_n_steps), ModuleFacade(self), LoggerFacade(self)
        super().__init__(foreign, name=name, phase=phase, strict=strict)
        self._reject_known(strict)
        self._starts_batch = foreign.on_train_batch_start if self.listens_to("on_train_batch_start") else None
        self._ends_batch = foreign.on_train_batch_end if self.listens_to("on_train_batch_end") else None
        self._remove_unneeded_handlers()
        self.ctx: Any = None
        """The context of the latest event."""
        self.progress: dict[str, float] = {}
        """The values that the callback has logged with `prog_bar=True`."""
        self.epoch = 0
        """The index of the current epoch. After the last epoch, the number of epochs."""
        self.batch_idx = self.total_batch_idx = -1
        self.eval_batches = 0
        """The number of batches of the current dataset whose evaluation has begun."""
        self.steps_before = 0
        """The number of steps that had ended before the current batch began."""
        self.is_step_over = True
        self._batch, self._loss, self._batches = _NO_BATCH, None, 0
        self._dataset = -1
        self.has_evaluated = False
        """Whether an evaluation has ended."""
        self._is_evaluating = False  # whether the last evaluation within training has begun after the last training batch
        self._is_epoch_end_due = False  # whether an epoch has ended for which on_train_epoch_end was not called yet
        self._metrics: dict[str, Tensor] = {}
        self._loaded: Mapping[str, Any] | None = None

    def _reject_known(self, strict: bool) -> None:
        for kind in type(self.foreign).__mro__:
            if kind.__name__ in REJECTED and kind.__module__.startswith(_PACKAGES):
                message = f"{type(self.foreign).__name__} {REJECTED[kind.__name__]}, which callsheet does not support"
                if strict:
                    raise NotSupported(f"{message}; leave the callback out, or pass strict=False to try it anyway")
                logger.warning("%s", message)

    def _remove_unneeded_handlers(self) -> None:
        """If the wrapped callback overrides no batch hook, remove this guest's batch handlers, because they cost time."""
        if self._starts_batch is None and self._ends_batch is None:
            del self.on_microbatch_start, self.on_microbatch_end, self.on_train_step_end
        for theirs, event in (("validation", "on_eval"), ("test", "on_test"), ("predict", "on_predict")):
            if not (self.listens_to(f"on_{theirs}_batch_start") or self.listens_to(f"on_{theirs}_batch_end")):
                delattr(self, f"{event}_step_start")

    # --- Lightning's hooks ---

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """Return a handler that calls the hook `method` with the arguments that Lightning would pass."""
        if theirs.startswith(("on_validation_", "on_test_", "on_predict_")):
            method = torch.no_grad()(method)  # as in Lightning, where the hooks of an evaluation run without gradients
        if theirs == "on_train_epoch_end":
            return self._epoch_end_handler(method)
        if theirs == "teardown":
            return self._teardown_handler(method)
        if theirs.endswith("_batch_start"):
            return lambda ctx: method(self.trainer, self.module, ctx.batch, *self._batch_position(ctx))
        if theirs.endswith("_batch_end"):
            return lambda ctx: method(
                self.trainer, self.module, _field_or_none(ctx, "outputs"), ctx.batch, *self._batch_position(ctx)
            )
        if (field := _FIELD_OF_HOOK.get(theirs)) is not None:

            def with_field(ctx: Context) -> None:
                self.ctx = ctx
                method(self.trainer, self.module, getattr(ctx, field))

            return with_field

        def handle(ctx: Context) -> None:
            self.ctx = ctx
            method(self.trainer, self.module)

        return handle

    def _epoch_end_handler(self, method: Callable[..., Any]) -> Handler:
        """Return a handler that calls `on_train_epoch_end` after the evaluation at the epoch's end.

        Without such an evaluation, the handler calls the hook at the first event that shows that no evaluation follows.
        """

        def handle(ctx: Context) -> None:
            if not self._is_epoch_end_due:
                return
            if ctx.event == "on_epoch_end" and ctx.state.evaluators:
                return
            if ctx.event == "on_checkpoint_due" and ctx.boundary == "before_eval":
                return
            self._is_epoch_end_due = False
            self.ctx = ctx
            self.trainer._set_state("fit", "train")
            method(self.trainer, self.module)

        return handle

    def _teardown_handler(self, method: Callable[..., Any]) -> Handler:
        def handle(ctx: Context) -> None:
            # In Lightning, an evaluation ends with `teardown` only if it is standalone; one within `fit` does not.
            if not ctx.has("standalone") or ctx.standalone:
                method(self.trainer, self.module, stage=self.trainer.state.fn)

        return handle

    def _call(self, hook: str, *args: Any, **given: Any) -> None:
        if self.listens_to(hook):
            getattr(self.foreign, hook)(self.trainer, self.module, *args, **given)

    # --- training ---

    def _start_fit(self, ctx: Context) -> None:
        self.ctx = ctx
        self.epoch = ctx.state.timestamp.epoch
        self.trainer._set_state("fit", "train")
        self._call("setup", stage=self.trainer.state.fn)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            if self.listens_to("on_load_checkpoint"):
                given = self._counts()
                weights = dict.fromkeys(loaded["weights"], given["state_dict"])
                self._call("on_load_checkpoint", given | weights | dict(loaded["checkpoint"]))
            super().load_state_dict(loaded["own"])

    def _start_epoch(self, ctx: Context) -> None:
        self.ctx = ctx
        self.epoch, self.batch_idx = ctx.epoch - 1, -1
        self.trainer._set_state("fit", "train")

    def _start_microbatch(self, ctx: Context) -> None:
        batch = ctx.batch
        if batch is self._batch:
            return  # this batch has begun already, with an earlier microbatch
        self.ctx = ctx
        if self._is_evaluating:
            self._is_evaluating = False
            self.trainer._set_state("fit", "train")
        if self._batch is not _NO_BATCH:
            self.is_step_over = False
            self._end_batch(self._loss)
        self._batch = batch
        self._batches += 1
        self.batch_idx += 1
        self.total_batch_idx += 1
        self.steps_before = ctx.state.timestamp.batch
        if self._starts_batch is not None:
            self._starts_batch(self.trainer, self.module, batch, self.batch_idx)

    def _end_microbatch(self, ctx: Context) -> None:
        self._loss = _field_or_none(ctx, "loss")

    def _end_step(self, ctx: Context) -> None:
        self.ctx, self.is_step_over = ctx, True
        self._end_batch(_field_or_none(ctx, "loss") if self._batches == 1 else self._loss)
        self._batch, self._loss, self._batches = _NO_BATCH, None, 0

    def _end_batch(self, loss: Tensor | None) -> None:
        if self._ends_batch is not None:
            outputs = {"loss": loss.detach()} if loss is not None else {}
            self._ends_batch(self.trainer, self.module, outputs, self._batch, self.batch_idx)

    def _end_epoch(self, ctx: Context) -> None:
        self._is_epoch_end_due = True

    def _end_fit(self, ctx: Context) -> None:
        self.ctx, self.epoch = ctx, ctx.epoch

    # --- evaluation, test and prediction ---

    def _start_evaluation(self, ctx: Context) -> None:
        self.ctx, self._dataset = ctx, -1
        self.trainer._set_state("validate" if ctx.standalone else "fit", "validate")
        self._is_evaluating = not ctx.standalone
        if ctx.standalone:
            self._call("setup", stage=self.trainer.state.fn)

    def _start_dataset(self, ctx: Context) -> None:
        self._dataset += 1
        self.eval_batches = 0

    def _count_eval_batch(self, ctx: Context) -> None:
        self.ctx = ctx
        self.eval_batches += 1

    def _batch_position(self, ctx: Context) -> tuple[int, ...]:
        """Return the index of the evaluated batch; with several validation datasets, also the index of the dataset."""
        return (
            (self.eval_batches - 1, self._dataset)
            if len(ctx.state.evaluators) > 1 and self.trainer.validating
            else (self.eval_batches - 1,)
        )

    def _end_evaluation(self, ctx: Context) -> None:
        self.ctx, self.has_evaluated = ctx, True
        for name, found in ctx.eval_results.items():
            for metric, value in found.items():
                self._put(f"{name}/{metric}", value)

    def _start_test(self, ctx: Context) -> None:
        self._start_standalone(ctx, "test")

    def _start_prediction(self, ctx: Context) -> None:
        self._start_standalone(ctx, "predict")

    def _start_standalone(self, ctx: Context, what: str) -> None:
        self.ctx, self.eval_batches = ctx, 0
        self.trainer._set_state(what, what)
        self._call("setup", stage=self.trainer.state.fn)

    # --- metrics ---

    def _note_record(self, ctx: Context) -> None:
        for name, value in ctx.record.values.items():
            self._put(name, value)

    def _put(self, name: str, value: Any) -> None:
        tensor = torch.as_tensor(value).detach()
        self._metrics[name] = tensor
        family, _, metric = name.partition("/")
        if family in ("train", "test", *self.ctx.state.evaluators):
            self._metrics[f"{'val' if family == 'validation' else family}_{metric}"] = tensor

    def metrics(self) -> dict[str, Tensor]:
        """Return the latest value of each metric. At events where `ctx.loss` is available, `train/loss` is this loss."""
        if self.ctx.has("loss"):
            self._put("train/loss", self.ctx.loss)
        return self._metrics

    def log(self, name: str, value: Any, *, prog_bar: bool, logger: bool) -> None:
        """Store a number that the wrapped callback has logged.

        Args:
            name: the name of the metric.
            value: a number or scalar tensor.
            prog_bar: whether to store the value in `progress` too.
            logger: whether it is also logged for the next metrics record, as `lightning/<name>`.
        """
        self._metrics[name] = tensor = torch.as_tensor(value).detach()
        if prog_bar:
            self.progress[name] = tensor.item()
        if logger:
            self.ctx.log({f"lightning/{name}": tensor})

    # --- states and checkpoints ---

    @property
    def checkpoint_io(self) -> Any:
        """The object that writes and removes Lightning's checkpoint files."""
        return self.package.plugins.TorchCheckpointIO()

    def checkpoint(self, *, weights_only: bool = False) -> dict[str, Any]:
        """Return a checkpoint in Lightning's format, without states of Lightning's loops or of callbacks that are not wrapped.

        Args:
            weights_only: whether to leave out the states of the callback, the optimizers and the schedulers.
        """
        made = self._counts()
        if not weights_only:
            own = self.foreign.state_dict()
            made["callbacks"] = {self.foreign.state_key: own} if own else {}
            made["optimizer_states"] = [optimizer.state_dict() for optimizer in self.trainer.optimizers]
            made["lr_schedulers"] = [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs]
        self._call("on_save_checkpoint", made)
        return made

    def _counts(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "global_step": self.ctx.state.timestamp.batch,
            "pytorch-lightning_version": self.package.__version__,
            "state_dict": self.ctx.model.state_dict(),
        }

    def state_dict(self) -> Mapping[str, Any]:
        """Return the wrapped callback's state, and the data that the callback's `on_save_checkpoint` adds to a checkpoint.

        callsheet's checkpoint already contains the model's weights.
        """
        if self._loaded is not None:
            return self._loaded
        state = {"own": dict(super().state_dict()), "checkpoint": {}, "weights": []}
        if self.listens_to("on_save_checkpoint") and self.ctx is not None:
            given = self._counts()
            weights, made = given["state_dict"], dict(given)
            self._call("on_save_checkpoint", made)
            added = {name: value for name, value in made.items() if given.get(name) is not value}
            state["weights"] = [name for name, value in added.items() if value is weights]
            state["checkpoint"] = {name: value for name, value in added.items() if value is not weights}
        return state if any(state.values()) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store the state. The wrapped callback receives the state when training begins, after its `setup`, as in Lightning."""
        self._loaded = state or None


_FIELD_OF_HOOK = {"on_before_backward": "loss", "on_before_optimizer_step": "optimizer", "on_exception": "exception"}
"""For some hooks of Lightning, the field of the context whose value is passed to the hook."""


def _field_or_none(ctx: Context, field: str) -> Any:
    return getattr(ctx, field) if ctx.has(field) else None


def _package_of(foreign: Any) -> Any:
    """Return the package of the callback's base class: `lightning.pytorch` or `pytorch_lightning`.

    Lightning is published under two names, with separate classes.
    """
    for kind in type(foreign).__mro__:
        package, _, rest = kind.__module__.partition(".callbacks.")
        if kind.__name__ == "Callback" and package in _PACKAGES and rest == "callback":
            return importlib.import_module(package)
    raise no_guest(foreign, f"an instance of Callback of {' or '.join(_PACKAGES)}")
