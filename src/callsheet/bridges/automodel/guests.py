"""Runs AutoModel's callbacks in callsheet's loop (as guests), in AutoModel's order and with the metrics that AutoModel measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from callsheet.bridges.automodel.names import HOOKS, CallbackRunner, MetricsSample
from callsheet.bridges.automodel.names import Callback as AutoModelCallback
from callsheet.bridges.automodel.recipe import RecipeFacade
from callsheet.bridges.guest_base import Guest, is_another_s, no_guest
from callsheet.core.callback import Phase
from callsheet.core.context import Context
from callsheet.core.wrappers import Handler

EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_train_start": ("on_train_start",),
    "on_train_step_end": ("on_train_batch_end",),  # AutoModel calls `on_train_batch_end` after the scheduler's step
    "on_eval_all_end": ("on_validation_end",),  # AutoModel calls `on_validation_end` while the model is in eval mode
    "on_checkpoint_published": ("on_save_checkpoint",),  # AutoModel calls `on_save_checkpoint` after writing the checkpoint
    "on_exception": ("on_exception",),
    "on_train_end": ("on_train_end",),
}
"""For each event of callsheet, the hook of an AutoModel callback that is called when the event is fired."""

IGNORED_LABEL = -100
GIBIBYTE = 1024**3


def guest(foreign: Any, *, name: str = "", phase: Phase = "measure", strict: bool = True) -> AutoModelGuest:
    """Wrap a callback of AutoModel as a callsheet callback.

    The callback receives an object in place of AutoModel's recipe, with the attributes `dist_env`, `step_scheduler`, `cfg`,
    `model_parts`, `model`, `optimizer` and `lr_scheduler`. Reading any other attribute raises `NotSupported`. Steps and epochs
    count from 0, as in AutoModel. Setting `step_scheduler.max_steps` or `step_scheduler.sigterm_flag` stops callsheet's loop.

    Args:
        foreign: a callback of AutoModel or of `callsheet.compat.automodel`, or any object that has some of the six hooks; or a
            `CallbackRunner` with several callbacks, for which the metrics are measured only once.
        name, phase, strict: see `callsheet.bridges.guest_base.Guest`.

    Returns:
        A callback for `Trainer(callbacks=[...])`, `attach` or a host of another framework.

    Raises:
        RegistrationError: the callback has none of the hooks.
        NotSupported: while training, if the callback reads another attribute of the recipe.
    """
    return AutoModelGuest(foreign, name=name, phase=phase, strict=strict)


class AutoModelGuest(Guest):
    """The callsheet callback that `guest` returns: it calls a callback of NeMo AutoModel.

    Args:
        foreign, name, phase, strict: see `guest`.
        recipe: the recipe that the hooks receive. None: they receive a `RecipeFacade`, which takes its place.
        constants: metrics that are the same at every step, such as the temperature of a distillation.

    Raises:
        RegistrationError: the callback has none of the hooks.
    """

    FRAMEWORK = "NeMo AutoModel"
    EVENTS = EVENTS
    collective = True  # all ranks must call the handlers, because the handlers gather the metrics of all ranks

    def __init__(
        self, foreign: Any, *, name: str = "", phase: Phase = "measure", strict: bool = True, recipe: Any = None,
        constants: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.foreign = foreign
        if is_another_s(foreign) or not any(callable(getattr(foreign, hook, None)) for hook in HOOKS):
            raise no_guest(foreign, f"a callback with one of AutoModel's hooks: {', '.join(HOOKS)}")
        own: dict[str, str] = {"on_data_init_end": "_create_facade"}
        if self.listens_to("on_train_batch_end"):
            own |= {"on_train_start": "_begin", "on_loss_end": "_count"}
        if self.listens_to("on_validation_end"):
            own |= {"on_eval_all_start": "_begin_evaluation", "on_eval_step_end": "_count_evaluated"}
        if self.listens_to("on_save_checkpoint"):
            own |= {"on_checkpoint_save_end": "_note_epoch"}
        # Set `OWN_HANDLERS` on the instance, so that the guest handles only events that it needs.
        self.OWN_HANDLERS = own  # type: ignore[misc]
        self.recipe = recipe
        self.facade: RecipeFacade | None = None
        self.reported: BaseException | None = None
        """The exception for which `on_exception` was called last. It is stored so that the hook is not called twice for one error."""
        self._constants = dict(constants or {})
        self._counts = _Counts()
        self._evaluated: dict[str, Any] = {}
        self._epochs: dict[str, int] = {}
        self._moment = 0.0
        super().__init__(foreign, name=name, phase=phase, strict=strict)

    def listens_to(self, theirs: str) -> bool:
        """Return whether the wrapped callback, or one of the callbacks in a wrapped `CallbackRunner`, overrides the hook."""
        foreign = self.foreign
        several = foreign.callbacks if isinstance(foreign, CallbackRunner) else [foreign]
        return any(_has_listeners(each, theirs) for each in several)

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """Return a handler that calls `method`, a hook of the wrapped callback, with the recipe and keyword arguments."""
        given = self._ARGUMENTS_OF_HOOK.get(theirs)
        is_in_training = theirs not in ("on_train_start", "on_train_end")

        def call(ctx: Context) -> None:
            if theirs == "on_validation_end" and ctx.standalone:
                return  # skip an evaluation outside training, because AutoModel evaluates only during training
            facade = self.facade_for(ctx)
            facade.step_scheduler._is_in_training = is_in_training
            method(facade if self.recipe is None else self.recipe, **({} if given is None else given(self, ctx)))

        return call

    def facade_for(self, ctx: Context) -> RecipeFacade:
        """Return the object that the callback receives in place of AutoModel's recipe. The first call creates it from `ctx`."""
        if self.facade is None:
            self.facade = self.make_facade(ctx)
        return self.facade

    def make_facade(self, ctx: Context) -> RecipeFacade:
        """Create the object that the callback receives in place of AutoModel's recipe.

        Args:
            ctx: the context of the training loop.

        Returns:
            The facade, from which the callback reads the run's state.
        """
        return RecipeFacade(ctx)

    def fire_exception(self, error: BaseException) -> None:
        """Call `on_exception` of the wrapped callback, unless this hook was already called for the same error.

        The hook is called for errors of the set-up too.

        Args:
            error: the error with which training or its set-up failed.
        """
        if self.reported is not error and self.listens_to("on_exception"):
            self.reported = error
            self.foreign.on_exception(self.recipe if self.recipe is not None else self.facade, exception=error)

    # --- the state of AutoModel's callback ---

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of AutoModel's callback; for a `CallbackRunner`, the states of all its callbacks, by index and class."""
        if not isinstance(self.foreign, CallbackRunner):
            return super().state_dict()
        return {place: each.state_dict() for place, each in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(self.foreign, CallbackRunner):
            super().load_state_dict(state)
            return
        for place, each in self._stateful().items():
            if place in state:
                each.load_state_dict(state[place])

    def _stateful(self) -> dict[str, Any]:
        return {
            f"{i}.{type(each).__name__}": each for i, each in enumerate(self.foreign.callbacks) if hasattr(each, "state_dict")
        }

    # --- what AutoModel measures ---

    def _create_facade(self, ctx: Context) -> None:
        self.facade, self.reported = self.make_facade(ctx), None  # replace the recipe object and the exception of an earlier run

    def _begin(self, ctx: Context) -> None:
        self._moment = time.perf_counter()

    def _count(self, ctx: Context) -> None:
        self._counts.add(ctx.microbatch, ctx.outputs, ctx.is_filler)

    def _compute_metrics(self, ctx: Context) -> dict[str, Any]:
        """Return the metrics that AutoModel gives its callbacks at a step's end. This waits for the device to compute the metrics."""
        counts, self._counts = self._counts, _Counts()
        losses = {name: float(loss) for name, loss in ctx.loss_dict.items()}
        labels, tokens, right, samples = (float(count) for count in (counts.labels, counts.tokens, counts.right, counts.samples))
        if ctx.run.world_size > 1:
            ranks = ctx.gather((losses, labels, tokens, right, samples))
            weights = [rank[1] if counts.are_tokens else rank[4] for rank in ranks]
            # Give all ranks the same weight if no rank has counted labels or samples.
            weights = weights if sum(weights) else [1.0] * len(ranks)
            whole = sum(weights)
            losses = {
                name: sum(rank[0][name] * weight for rank, weight in zip(ranks, weights, strict=True)) / whole for name in losses
            }
            labels, tokens, right, samples = (sum(rank[i] for rank in ranks) for i in (1, 2, 3, 4))
        moment = time.perf_counter()
        speed = tokens / (moment - self._moment)
        self._moment = moment
        metrics: dict[str, Any] = losses
        if counts.are_classes:
            metrics["accuracy"] = right / samples if samples else 0.0
        metrics |= {
            "grad_norm": float("nan") if ctx.grad_norm is None else float(ctx.grad_norm),
            "lr": _rate(ctx),
            "mem": _memory(ctx),
            "tps": speed,
            "tps_per_gpu": speed / ctx.run.world_size,
        }
        if counts.are_tokens:
            metrics |= {"num_tokens_per_step": int(tokens), "num_label_tokens": int(labels)}
        return metrics | self._constants

    def _train_log_data(self, ctx: Context) -> dict[str, Any]:
        return {"train_log_data": self._sample(self._compute_metrics(ctx))}

    def _begin_evaluation(self, ctx: Context) -> None:
        self._evaluated = {}

    def _count_evaluated(self, ctx: Context) -> None:
        labels = None if ctx.is_filler else _labels(ctx.batch)
        if labels is not None and labels.dim() > 1:
            self._evaluated[ctx.eval_name] = self._evaluated.get(ctx.eval_name, 0) + (labels != IGNORED_LABEL).sum()

    def _val_results(self, ctx: Context) -> dict[str, Any]:
        counted = {name: int(labels) for name, labels in self._evaluated.items()}
        if ctx.run.world_size > 1:
            ranks = ctx.gather(counted)
            counted = {name: sum(rank.get(name, 0) for rank in ranks) for name in {name for rank in ranks for name in rank}}
        rest = {"lr": _rate(ctx), "mem": _memory(ctx)}
        results = {}
        for name, found in ctx.eval_results.items():
            shown = {key if key.endswith("_loss") else f"val_{key}": value for key, value in found.items()}
            labels = {"num_label_tokens": counted[name]} if name in counted else {}
            results[name] = self._sample({**shown, **rest, **labels})
        return {"val_results": results}

    def _note_epoch(self, ctx: Context) -> None:
        if ctx.checkpoint is not None:
            self._epochs[ctx.checkpoint.path] = max(0, ctx.epoch - 1)

    def _checkpoint_info(self, ctx: Context) -> dict[str, Any]:
        info = ctx.checkpoint
        assert info is not None  # `on_checkpoint_published` is fired only after a checkpoint was written
        best = (info.best_metric_key or "").partition("/")[0]
        return {
            "checkpoint_info": {
                "epoch": self._epochs.pop(info.path, max(0, ctx.epoch - 1)),
                "step": info.step - 1,
                "train_loss": info.train_loss,
                "val_losses": dict(info.val_losses),
                "checkpoint_path": info.path,
                "best_metric_key": best or next(iter(info.val_losses), "validation"),
            }
        }

    def _exception(self, ctx: Context) -> dict[str, Any]:
        self.reported = ctx.exception
        return {"exception": ctx.exception}

    def _sample(self, metrics: dict[str, Any]) -> MetricsSample:
        assert self.facade is not None
        scheduler = self.facade.step_scheduler
        return MetricsSample(scheduler.step, scheduler.epoch, metrics)

    _ARGUMENTS_OF_HOOK: ClassVar[Mapping[str, Callable[[AutoModelGuest, Context], dict[str, Any]]]] = {
        "on_train_batch_end": _train_log_data,
        "on_validation_end": _val_results,
        "on_save_checkpoint": _checkpoint_info,
        "on_exception": _exception,
    }


class _Counts:
    """Counts labels, tokens and samples in a step's microbatches. The sums stay on the device, so counting does not wait for it."""

    def __init__(self) -> None:
        self.labels: Any = 0
        self.tokens: Any = 0
        self.right: Any = 0
        self.samples = 0
        self.are_tokens = False
        self.are_classes = False

    def add(self, batch: Any, outputs: Any, is_filler: bool) -> None:
        """Count the samples, tokens and labels of a microbatch. `outputs` are the model's outputs for this microbatch.

        Of a filler, only note the kind of its labels, which must be the same on all ranks.
        """
        labels = _labels(batch)
        if labels is None or not labels.dim():
            return
        if is_filler:
            self.are_tokens |= labels.dim() > 1
            self.are_classes |= labels.dim() == 1 and not labels.is_floating_point() and hasattr(outputs, "logits")
            return
        self.samples += labels.size(0)
        mask, ids = batch.get("attention_mask"), batch.get("input_ids")
        if isinstance(mask, Tensor):
            self.tokens = self.tokens + mask.count_nonzero()
        elif isinstance(ids, Tensor):
            self.tokens += ids.numel()
        if labels.dim() > 1:
            self.are_tokens = True
            self.labels = self.labels + (labels != IGNORED_LABEL).sum()
        elif not labels.is_floating_point() and isinstance(logits := getattr(outputs, "logits", None), Tensor):
            self.are_classes = True
            self.right = self.right + (logits.argmax(-1) == labels).sum()


def _labels(batch: Any) -> Tensor | None:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) else None


def _rate(ctx: Context) -> float:
    return float(ctx.optimizer.param_groups[0]["lr"])


def _memory(ctx: Context) -> float:
    """Return the peak GPU memory in GiB; 0 without a GPU."""
    return torch.cuda.max_memory_allocated(ctx.run.device) / GIBIBYTE if ctx.run.device.startswith("cuda") else 0.0


def _has_listeners(callback: Any, hook: str) -> bool:
    """Return whether the callback overrides `hook` of its base class: AutoModel's `Callback` or callsheet's copy of that class."""
    method = getattr(callback, hook, None)
    function: Any = getattr(method, "__func__", method)
    if function is getattr(AutoModelCallback, hook):
        return False
    is_theirs = str(getattr(function, "__module__", "")).startswith("nemo_automodel.")
    return callable(method) and not (is_theirs and function.__qualname__ == f"Callback.{hook}")
