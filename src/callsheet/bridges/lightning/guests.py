"""Lightning's callbacks as guests in callsheet's loop."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from callsheet.bridges.guest_base import Guest, no_guest
from callsheet.bridges.lightning.facades import LoggerFacade, TrainerFacade
from callsheet.bridges.lightning.module import ModuleFacade
from callsheet.context import Context
from callsheet.errors import NotSupported
from callsheet.sheet import Handler

logger = logging.getLogger("callsheet")

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_NONE: Any = object()  # no batch

REJECTED: Mapping[str, str] = {
    "StochasticWeightAveraging": "lengthens training by an epoch of Lightning's own loop, and puts other schedulers in",
    "BatchSizeFinder": "runs trial trainings in Lightning's Trainer",
    "LearningRateFinder": "runs trial trainings in Lightning's Trainer",
    "BaseFinetuning": "freezes the model before the optimizer is made",
    "ModelPruning": "prunes the modules of a LightningModule, and rewrites Lightning's checkpoints",
    "BasePredictionWriter": "writes what Lightning's own predict loop has collected",
}
"""Lightning's callbacks that cannot be guests, and what each of them does that nothing here can stand for."""


def guest(
    foreign: Any, *, name: str = "", phase: str = "measure", log_every_n_steps: int = 50, strict: bool = True
) -> LightningGuest:
    """A `lightning.pytorch.Callback` (or one of `pytorch_lightning`) as one of ours.

    It hears Lightning's hooks in Lightning's order: an epoch's end comes after the evaluation at that end, `on_train_batch_end` once a
    batch. Instead of Trainer and LightningModule it is given facades. It may stop training, set how many batches make a step, write
    Lightning's checkpoints, log, and change the model's weights.

    Args:
        foreign: the callback, an instance.
        name: under which its state is kept; else that of its class.
        phase: where in each event's order it stands; one that puts other weights in for an evaluation wants `change`.
        log_every_n_steps: how often a callback that logs by itself does so; Lightning's own default.
        strict: whether it is an error that it hears what is never told here, or is known not to work; else a warning.

    Raises:
        NotSupported: with `strict`; and where it asks a facade for what that does not have.
        RegistrationError: no instance of Lightning's Callback.
    """
    return LightningGuest(foreign, name=name, phase=phase, log_every_n_steps=log_every_n_steps, strict=strict)


class LightningGuest(Guest):
    """See `guest`."""

    FRAMEWORK = "Lightning"
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
    OWN = {
        "on_train_start": "_fit_starts",
        "on_epoch_start": "_epoch_starts",
        "on_microbatch_start": "_batch_comes",
        "on_microbatch_end": "_batch_goes",
        "on_train_step_end": "_step_ends",
        "on_log": "_learns",
        "on_epoch_end": "_epoch_ends",
        "on_train_end": "_fit_ends",
        "on_eval_all_start": "_judging_starts",
        "on_eval_start": "_dataset_starts",
        "on_eval_step_start": "_judges",
        "on_eval_all_end": "_has_judged",
        "on_test_start": "_test_starts",
        "on_test_step_start": "_judges",
        "on_predict_start": "_prediction_starts",
        "on_predict_step_start": "_judges",
    }
    NEVER = ("on_before_zero_grad",)

    def __init__(
        self, foreign: Any, *, name: str = "", phase: str = "measure", log_every_n_steps: int = 50, strict: bool = True
    ) -> None:
        self.package = _package_of(foreign)
        object.__setattr__(self, "BASE", self.package.Callback)
        self.trainer, self.module, self.logger = TrainerFacade(self, log_every_n_steps), ModuleFacade(self), LoggerFacade(self)
        super().__init__(foreign, name=name, phase=phase, strict=strict)
        self._reject_known(strict)
        self._starts_batch = foreign.on_train_batch_start if self.listens_to("on_train_batch_start") else None
        self._ends_batch = foreign.on_train_batch_end if self.listens_to("on_train_batch_end") else None
        self._leave_out()
        self.ctx: Any = None
        """The context of the event in hand, or of the last."""
        self.progress: dict[str, float] = {}
        """What it has logged for the progress bar."""
        self.epoch = 0
        """The epoch in hand, from 0; behind the last one how many there were."""
        self.batch_idx = self.total_batch_idx = -1
        self.judged = 0
        """How many batches of the dataset in hand have begun to be evaluated."""
        self.steps_before = 0
        """How many steps were over before the batch in hand."""
        self.is_step_over = True
        self._batch, self._loss, self._batches = _NONE, None, 0
        self._dataset = -1
        self._is_epoch_over = False  # and not yet told
        self._metrics: dict[str, Tensor] = {}
        self._loaded: Mapping[str, Any] | None = None

    def _reject_known(self, strict: bool) -> None:
        for kind in type(self.foreign).__mro__:
            if kind.__name__ in REJECTED and kind.__module__.startswith(_PACKAGES):
                message = f"{type(self.foreign).__name__} {REJECTED[kind.__name__]}, which nothing in callsheet stands for"
                if strict:
                    raise NotSupported(f"{message}; leave the callback out, or pass strict=False to see how far it comes")
                logger.warning("%s", message)

    def _leave_out(self) -> None:
        """Who hears no batch need not be told of any."""
        if self._starts_batch is None and self._ends_batch is None:
            del self.on_microbatch_start, self.on_microbatch_end, self.on_train_step_end
        for theirs, event in (("validation", "on_eval"), ("test", "on_test"), ("predict", "on_predict")):
            if not (self.listens_to(f"on_{theirs}_batch_start") or self.listens_to(f"on_{theirs}_batch_end")):
                delattr(self, f"{event}_step_start")

    # --- Lightning's hooks ---

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """What calls it with what Lightning gives to each."""
        if theirs == "on_train_epoch_end":
            return self._fired_epoch_end(method)
        if theirs == "teardown":
            return self._fired_teardown(method)
        if theirs.endswith("_batch_start"):
            return lambda ctx: method(self.trainer, self.module, ctx.batch, *self._place(ctx))
        if theirs.endswith("_batch_end"):
            return lambda ctx: method(self.trainer, self.module, _of(ctx, "outputs"), ctx.batch, *self._place(ctx))
        if (field := _GIVEN.get(theirs)) is not None:

            def with_field(ctx: Context) -> None:
                self.ctx = ctx
                method(self.trainer, self.module, getattr(ctx, field))

            return with_field

        def told(ctx: Context) -> None:
            self.ctx = ctx
            method(self.trainer, self.module)

        return told

    def _fired_epoch_end(self, method: Callable[..., Any]) -> Handler:
        """Behind the evaluation at the epoch's end, as soon as it is known that there is none to wait for."""

        def told(ctx: Context) -> None:
            if not self._is_epoch_over:
                return
            if ctx.event == "on_epoch_end" and ctx.state.evaluators:
                return
            if ctx.event == "on_checkpoint_due" and ctx.boundary == "before_eval":
                return
            self._is_epoch_over = False
            self.ctx = ctx
            self.trainer._does("fit", "train")
            method(self.trainer, self.module)

        return told

    def _fired_teardown(self, method: Callable[..., Any]) -> Handler:
        def told(ctx: Context) -> None:
            if not ctx.has("standalone") or ctx.standalone:  # an evaluation in training is no end
                method(self.trainer, self.module, stage=self.trainer.state.fn)

        return told

    def _call(self, hook: str, *args: Any, **given: Any) -> None:
        if self.listens_to(hook):
            getattr(self.foreign, hook)(self.trainer, self.module, *args, **given)

    # --- training ---

    def _fit_starts(self, ctx: Context) -> None:
        self.ctx = ctx
        self.epoch = ctx.state.timestamp.epoch
        self.trainer._does("fit", "train")
        self._call("setup", stage=self.trainer.state.fn)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            if self.listens_to("on_load_checkpoint"):
                given = self._counts()
                weights = dict.fromkeys(loaded["weights"], given["state_dict"])
                self._call("on_load_checkpoint", given | weights | dict(loaded["checkpoint"]))
            super().load_state_dict(loaded["own"])

    def _epoch_starts(self, ctx: Context) -> None:
        self.ctx = ctx
        self.epoch, self.batch_idx = ctx.epoch - 1, -1
        self.trainer._does("fit", "train")

    def _batch_comes(self, ctx: Context) -> None:
        batch = ctx.batch
        if batch is self._batch:
            return  # another part of it
        self.ctx = ctx
        if self._batch is not _NONE:
            self.is_step_over = False
            self._end_batch(self._loss)
        self._batch = batch
        self._batches += 1
        self.batch_idx += 1
        self.total_batch_idx += 1
        self.steps_before = ctx.state.timestamp.batch
        if self._starts_batch is not None:
            self._starts_batch(self.trainer, self.module, batch, self.batch_idx)

    def _batch_goes(self, ctx: Context) -> None:
        self._loss = _of(ctx, "loss")

    def _step_ends(self, ctx: Context) -> None:
        self.ctx, self.is_step_over = ctx, True
        self._end_batch(_of(ctx, "loss") if self._batches == 1 else self._loss)
        self._batch, self._loss, self._batches = _NONE, None, 0

    def _end_batch(self, loss: Tensor | None) -> None:
        if self._ends_batch is not None:
            outputs = {"loss": loss.detach()} if loss is not None else {}
            self._ends_batch(self.trainer, self.module, outputs, self._batch, self.batch_idx)

    def _epoch_ends(self, ctx: Context) -> None:
        self._is_epoch_over = True

    def _fit_ends(self, ctx: Context) -> None:
        self.ctx, self.epoch = ctx, ctx.epoch

    # --- evaluation, test and prediction ---

    def _judging_starts(self, ctx: Context) -> None:
        self.ctx, self._dataset = ctx, -1
        self.trainer._does("validate" if ctx.standalone else "fit", "validate")
        if ctx.standalone:
            self._call("setup", stage=self.trainer.state.fn)

    def _dataset_starts(self, ctx: Context) -> None:
        self._dataset += 1
        self.judged = 0

    def _judges(self, ctx: Context) -> None:
        self.ctx = ctx
        self.judged += 1

    def _place(self, ctx: Context) -> tuple[int, ...]:
        """The batch's number, and where there are several datasets that of the dataset."""
        return (
            (self.judged - 1, self._dataset) if len(ctx.state.evaluators) > 1 and self.trainer.validating else (self.judged - 1,)
        )

    def _has_judged(self, ctx: Context) -> None:
        self.ctx = ctx
        for name, found in ctx.eval_results.items():
            for metric, value in found.items():
                self._put(f"{name}/{metric}", value)

    def _test_starts(self, ctx: Context) -> None:
        self._apart(ctx, "test")

    def _prediction_starts(self, ctx: Context) -> None:
        self._apart(ctx, "predict")

    def _apart(self, ctx: Context, what: str) -> None:
        self.ctx, self.judged = ctx, 0
        self.trainer._does(what, what)
        self._call("setup", stage=self.trainer.state.fn)

    # --- numbers ---

    def _learns(self, ctx: Context) -> None:
        for name, value in ctx.record.values.items():
            self._put(name, value)

    def _put(self, name: str, value: Any) -> None:
        tensor = torch.as_tensor(value).detach()
        self._metrics[name] = tensor
        family, _, metric = name.partition("/")
        if family in ("train", "test", *self.ctx.state.evaluators):
            self._metrics[f"{'val' if family == 'validation' else family}_{metric}"] = tensor

    def metrics(self) -> dict[str, Tensor]:
        """The latest of every number; the loss is the one in hand, where there is one."""
        if self.ctx.has("loss"):
            self._put("train/loss", self.ctx.loss)
        return self._metrics

    def log(self, name: str, value: Any, *, prog_bar: bool, logger: bool) -> None:
        """What the callback logs."""
        self._metrics[name] = tensor = torch.as_tensor(value).detach()
        if prog_bar:
            self.progress[name] = tensor.item()
        if logger:
            self.ctx.log({f"lightning/{name}": tensor})

    # --- states and checkpoints ---

    @property
    def checkpoint_io(self) -> Any:
        """Writes and removes Lightning's files."""
        return self.package.plugins.TorchCheckpointIO()

    def checkpoint(self, *, weights_only: bool = False) -> dict[str, Any]:
        """A checkpoint as Lightning's Trainer would make it, of what there is here: no loops, and of callbacks the guest alone."""
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
        """The callback's own, and what it adds to a checkpoint; the model's weights among that are left to our checkpoint."""
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
        """Given to the callback when training begins, behind its `setup`."""
        self._loaded = state or None


_GIVEN = {"on_before_backward": "loss", "on_before_optimizer_step": "optimizer", "on_exception": "exception"}
"""The field of the context that Lightning gives to a hook."""


def _of(ctx: Context, field: str) -> Any:
    return getattr(ctx, field) if ctx.has(field) else None


def _package_of(foreign: Any) -> Any:
    """The package whose Callback it is: Lightning is published under two names, which know nothing of each other."""
    for kind in type(foreign).__mro__:
        package, _, rest = kind.__module__.partition(".callbacks.")
        if kind.__name__ == "Callback" and package in _PACKAGES and rest == "callback":
            return importlib.import_module(package)
    raise no_guest(foreign, f"an instance of Callback of {' or '.join(_PACKAGES)}")
