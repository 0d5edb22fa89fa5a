"""AutoModel's callbacks as guests: told in AutoModel's order, with what AutoModel measures."""

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
from callsheet.context import Context
from callsheet.sheet import Handler

EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_train_start": ("on_train_start",),
    "on_train_step_end": ("on_train_batch_end",),  # the learning rate has moved
    "on_eval_all_end": ("on_validation_end",),  # the model is in evaluation mode still
    "on_checkpoint_published": ("on_save_checkpoint",),  # it is there, whole
    "on_exception": ("on_exception",),
    "on_train_end": ("on_train_end",),
}
"""Our event, and the hook of AutoModel that is called at it."""

IGNORED_LABEL = -100
GIBIBYTE = 1024**3


def guest(foreign: Any, *, name: str = "", phase: str = "measure", strict: bool = True) -> AutoModelGuest:
    """A callback of AutoModel as one of ours, for any loop that tells callsheet's events.

    It is given a facade of its recipe: `dist_env`, `step_scheduler`, `cfg`, `model_parts`, `model`, `optimizer`, `lr_scheduler`; all else
    raises `NotSupported`. Steps and epochs count from 0, as AutoModel's do. Setting `step_scheduler.max_steps` or `sigterm_flag` stops us.

    Args:
        foreign: a callback of AutoModel, of `callsheet.compat.automodel`, or anything that has some of the six hooks; or a
            `CallbackRunner` of several, which share what is measured.
        name, phase, strict: see `callsheet.bridges.guest_base.Guest`.

    Raises:
        RegistrationError: it has none of the hooks.
    """
    return AutoModelGuest(foreign, name=name, phase=phase, strict=strict)


class AutoModelGuest(Guest):
    """See `guest`.

    Args:
        recipe: what its hooks are given instead of a facade.
        constants: metrics that are the same at every step, such as the temperature of a distillation.
    """

    FRAMEWORK = "NeMo AutoModel"
    EVENTS = EVENTS
    collective = True  # with several ranks: what is measured is the same on all of them

    def __init__(
        self, foreign: Any, *, name: str = "", phase: str = "measure", strict: bool = True, recipe: Any = None,
        constants: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.foreign = foreign
        if is_another_s(foreign) or not any(callable(getattr(foreign, hook, None)) for hook in HOOKS):
            raise no_guest(foreign, f"a callback with one of AutoModel's hooks: {', '.join(HOOKS)}")
        own: dict[str, str] = {"on_data_init_end": "_meet"}
        if self.listens_to("on_train_batch_end"):
            own |= {"on_train_start": "_begin", "on_loss_end": "_count"}
        if self.listens_to("on_validation_end"):
            own |= {"on_eval_all_start": "_begin_evaluation", "on_eval_step_end": "_count_evaluated"}
        if self.listens_to("on_save_checkpoint"):
            own |= {"on_checkpoint_save_end": "_note_epoch"}
        self.OWN = own  # type: ignore[misc]  # of this one: what it does not hear costs nothing
        self.recipe = recipe
        self.facade: RecipeFacade | None = None
        self.told: BaseException | None = None
        """The exception that has been told."""
        self._constants = dict(constants or {})
        self._counts = _Counts()
        self._evaluated: dict[str, Any] = {}
        self._epochs: dict[str, int] = {}
        self._moment = 0.0
        super().__init__(foreign, name=name, phase=phase, strict=strict)

    def listens_to(self, theirs: str) -> bool:
        """Whether it, or one of a runner's, does something there."""
        foreign = self.foreign
        several = foreign.callbacks if isinstance(foreign, CallbackRunner) else [foreign]
        return any(_has_listeners(each, theirs) for each in several)

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """`method(recipe, **what AutoModel gives there)`."""
        given = self._GIVEN.get(theirs)
        is_in_training = theirs not in ("on_train_start", "on_train_end")

        def tell(ctx: Context) -> None:
            if theirs == "on_validation_end" and ctx.standalone:
                return  # AutoModel evaluates in training alone
            facade = self.meet(ctx)
            facade.step_scheduler._is_in_training = is_in_training
            method(facade if self.recipe is None else self.recipe, **({} if given is None else given(self, ctx)))

        return tell

    def meet(self, ctx: Context) -> RecipeFacade:
        """The facade of this run's recipe, by the context of its training."""
        if self.facade is None:
            self.facade = self.made(ctx)
        return self.facade

    def made(self, ctx: Context) -> RecipeFacade:
        """A facade of a run's recipe."""
        return RecipeFacade(ctx)

    def fire_exception(self, error: BaseException) -> None:
        """Tell what ended the run, if that has not been told: before there was one, nobody could."""
        if self.told is not error and self.listens_to("on_exception"):
            self.told = error
            self.foreign.on_exception(self.recipe if self.recipe is not None else self.facade, exception=error)

    # --- its state ---

    def state_dict(self) -> Mapping[str, Any]:
        """The foreign callback's own; of a runner's, each one's that has one, by place and class."""
        if not isinstance(self.foreign, CallbackRunner):
            return super().state_dict()
        return {place: each.state_dict() for place, each in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give it back."""
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

    def _meet(self, ctx: Context) -> None:
        self.facade, self.told = self.made(ctx), None  # of this run, if it has heard another

    def _begin(self, ctx: Context) -> None:
        self._moment = time.perf_counter()

    def _count(self, ctx: Context) -> None:
        self._counts.add(ctx.microbatch, ctx.outputs)

    def _measured(self, ctx: Context) -> dict[str, Any]:
        """Of a step: floats, as AutoModel has them, so this waits for the device."""
        counts, self._counts = self._counts, _Counts()
        losses = {name: float(loss) for name, loss in ctx.loss_dict.items()}
        labels, tokens, right, samples = (float(count) for count in (counts.labels, counts.tokens, counts.right, counts.samples))
        if ctx.run.world_size > 1:
            ranks = ctx.gather((losses, labels, tokens, right, samples))
            weights = [rank[1] if counts.are_tokens else rank[4] for rank in ranks]
            weights = weights if sum(weights) else [1.0] * len(ranks)  # batches that do not show what they hold
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
        return {"train_log_data": self._sample(self._measured(ctx))}

    def _begin_evaluation(self, ctx: Context) -> None:
        self._evaluated = {}

    def _count_evaluated(self, ctx: Context) -> None:
        labels = _labels(ctx.batch)
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
        assert info is not None  # one has been written
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
        self.told = ctx.exception
        return {"exception": ctx.exception}

    def _sample(self, metrics: dict[str, Any]) -> MetricsSample:
        assert self.facade is not None
        scheduler = self.facade.step_scheduler
        return MetricsSample(scheduler.step, scheduler.epoch, metrics)

    _GIVEN: ClassVar[Mapping[str, Callable[[AutoModelGuest, Context], dict[str, Any]]]] = {
        "on_train_batch_end": _train_log_data,
        "on_validation_end": _val_results,
        "on_save_checkpoint": _checkpoint_info,
        "on_exception": _exception,
    }


class _Counts:
    """What the microbatches of a step hold; sums stay on their device."""

    def __init__(self) -> None:
        self.labels: Any = 0
        self.tokens: Any = 0
        self.right: Any = 0
        self.samples = 0
        self.are_tokens = False
        self.are_classes = False

    def add(self, batch: Any, outputs: Any) -> None:
        """One more, with what the model made of it."""
        labels = _labels(batch)
        if labels is None or not labels.dim():
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
    """The device's peak, in GiB; 0 on a CPU."""
    return torch.cuda.max_memory_allocated(ctx.run.device) / GIBIBYTE if ctx.run.device.startswith("cuda") else 0.0


def _has_listeners(callback: Any, hook: str) -> bool:
    """Whether it is more than the hook that does nothing, ours or AutoModel's own."""
    method = getattr(callback, hook, None)
    function: Any = getattr(method, "__func__", method)
    if function is getattr(AutoModelCallback, hook):
        return False
    is_theirs = str(getattr(function, "__module__", "")).startswith("nemo_automodel.")
    return callable(method) and not (is_theirs and function.__qualname__ == f"Callback.{hook}")
