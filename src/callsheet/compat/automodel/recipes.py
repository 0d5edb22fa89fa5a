"""AutoModel's four recipe classes, with AutoModel's constructor and methods, implemented by callsheet's recipes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from callsheet.bridges.automodel.guests import AutoModelGuest
from callsheet.bridges.automodel.names import CallbackRunner
from callsheet.bridges.automodel.recipe import ConfigNode, DistEnv, RecipeFacade
from callsheet.bridges.automodel.recipe import StepScheduler as Scheduled
from callsheet.compat.automodel.configuration import Schedule, convert_configuration, load_yaml_config, setting_names
from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.control import SaveKind
from callsheet.errors import ConfigError
from callsheet.recipes.classify import Classify
from callsheet.recipes.distill import Distill
from callsheet.recipes.finetune import Finetune
from callsheet.recipes.finetune_vlm import FinetuneVLM
from callsheet.recipes.job import JobConfig
from callsheet.recipes.recipe import Recipe


class StepScheduler(Scheduled):
    """AutoModel's `step_scheduler`: the progress of training, and the steps at which training validates and saves checkpoints."""

    def __init__(self, ctx: Context, schedule: Schedule) -> None:
        super().__init__(ctx)
        self._schedule = schedule

    @property
    def ckpt_every_steps(self) -> int | None:
        """The number of steps between checkpoints; if None, they are saved only at the end of each epoch and of training.

        Even with a number, a checkpoint is also saved at the end of each epoch and of training.
        """
        return self._schedule.ckpt_every_steps

    @property
    def val_every_steps(self) -> int | None:
        """The number of steps between validations; if None, a validation runs only before each checkpoint.

        Even with a number, a validation also runs before each checkpoint.
        """
        return self._schedule.val_every_steps

    @property
    def grad_acc_steps(self) -> int:
        """The number of gradient accumulation steps."""
        return self._schedule.grad_acc_steps

    @property
    def num_epochs(self) -> int | None:
        """The maximum number of epochs."""
        return self._schedule.num_epochs or super().num_epochs

    @property
    def is_ckpt_step(self) -> bool:
        """Whether a checkpoint is saved after the current step."""
        return self._plans_ckpt or self.sigterm_flag

    @property
    def _plans_ckpt(self) -> bool:
        every = self.ckpt_every_steps
        return bool(every and (self.step + 1) % every == 0) or self.is_last_batch or self.is_last_step

    @property
    def is_val_step(self) -> bool:
        """Whether a validation runs after the current step. One also runs before each checkpoint, except a preemption checkpoint."""
        every = self.val_every_steps
        return bool(every and (self.step + 1) % every == 0) or self._plans_ckpt

    def _stop(self, how: str) -> None:
        super()._stop(how)
        # AutoModel validates after the last step, but not again if a callback sets `max_steps` after the step's validation.
        if how == "max_steps" and self._ctx.event == "on_train_step_end":
            self._ctx.control.evaluate("the step scheduler")


class _AsScheduled(Callback):
    """A callback that requests evaluations, checkpoints and the end of training at the steps that AutoModel's settings specify."""

    phase = "decide"

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.scheduler: StepScheduler
        self.best: float | None = None
        self.best_yet = ""  # the monitored loss's name if this step has the lowest value so far; otherwise empty

    def on_data_init_end(self, ctx: Context) -> None:
        self.scheduler = StepScheduler(ctx, self.schedule)

    def on_train_step_end(self, ctx: Context) -> None:
        scheduler, epochs = self.scheduler, self.schedule.num_epochs
        scheduler._is_in_training = True
        self.best_yet = ""
        if scheduler.is_val_step:
            ctx.control.evaluate("the step scheduler", replicated=True)
        if scheduler.is_last_batch and epochs is not None and ctx.epoch >= epochs and not scheduler.is_last_step:
            ctx.control.stop(f"num_epochs={epochs}", replicated=True)

    def on_eval_all_end(self, ctx: Context) -> None:
        key, results = self.schedule.best_metric_key, ctx.eval_results
        name = key if key in results else next(iter(results), None)
        if ctx.standalone or name is None or not self.scheduler.is_ckpt_step:
            return
        loss = results[name].get("loss", float("nan"))
        if math.isfinite(loss) and (self.best is None or loss < self.best):
            self.best, self.best_yet = loss, f"{name}/loss"

    def on_checkpoint_due(self, ctx: Context) -> None:
        if self.schedule.saves and ctx.boundary == "step" and self.scheduler.is_ckpt_step:
            kind: SaveKind = "best" if self.best_yet else "periodic"
            ctx.control.save("the step scheduler", kind=kind, metric=self.best_yet, replicated=True)

    def state_dict(self) -> Mapping[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]


class _Facade(RecipeFacade):
    """Has the attributes of an AutoModel recipe that callbacks read, such as a step scheduler with the configured intervals."""

    def __init__(self, ctx: Context, scheduler: StepScheduler) -> None:
        super().__init__(ctx)
        self._step_scheduler = scheduler


class BaseRecipe:
    """The base of the four classes with the names of AutoModel's recipes. Each of them runs a recipe of callsheet.

    Callbacks may be AutoModel's or callsheet's. AutoModel's six hooks are called with this recipe. The exception hook is called
    for every exception: in `setup`, in the loop, and for Ctrl-C. Checkpoints are in `checkpoint.checkpoint_dir/checkpoints`; an
    existing run is resumed.

    Args:
        cfg: AutoModel's configuration, as a mapping, a `ConfigNode` or the path of its YAML file; the page "NeMo AutoModel" lists
            the supported keys. It may also be the configuration of callsheet's recipe.
        callbacks: the callbacks, called in this order.

    Attributes:
        recipe: callsheet's recipe, after `setup`.

    Raises:
        ConfigError: something that `cfg` asks for is not supported or cannot work.
    """

    RECIPE_CLASS: ClassVar[type[Recipe[Any]]]

    def __init__(self, cfg: Any, callbacks: Sequence[Any] | None = None) -> None:
        kind = self.RECIPE_CLASS.Config
        self.recipe: Any
        self._config: Any
        self.cfg = load_yaml_config(cfg) if isinstance(cfg, (str, Path)) else cfg
        if isinstance(cfg, JobConfig):
            self._config, schedule = cfg, None
        else:
            values = self.cfg.to_dict() if hasattr(self.cfg, "to_dict") else self.cfg
            if not isinstance(values, Mapping):
                raise ConfigError(f"cfg is {type(cfg).__name__}: give a mapping, the path of a YAML file, or a {kind.__name__}")
            self.cfg = self.cfg if hasattr(self.cfg, "get") and hasattr(self.cfg, "to_dict") else ConfigNode(values)
            self._config, schedule = convert_configuration(values, kind)
        given = list(callbacks or ())
        theirs = [callback for callback in given if not isinstance(callback, Callback)]
        self.callback_runner = CallbackRunner(theirs)
        self._as_scheduled = _AsScheduled(schedule) if schedule is not None else None
        self._guest = _RecipeGuest(self, schedule.constants if schedule is not None else {})
        self._callbacks: list[Callback] = [each for each in (self._as_scheduled,) if each is not None]
        self._callbacks += [self._guest] if theirs else []
        self._callbacks += [callback for callback in given if isinstance(callback, Callback)]

    def setup(self) -> None:
        """Set up the recipe, and resume from a checkpoint if there is one."""
        try:
            self.recipe = self.RECIPE_CLASS(self._config, self._callbacks)
            if self._as_scheduled is not None:  # the configuration is AutoModel's
                self.recipe.new_run_hint = "another checkpoint.checkpoint_dir starts a new run"
                self.recipe.setting_names = setting_names(self.RECIPE_CLASS.Config)
            self.recipe.setup()
        except BaseException as error:
            self._guest.fire_exception(error)
            raise
        self._guest.facade_for(self.recipe.trainer.ctx)

    def run_train_validation_loop(self) -> None:
        """Train, validate and save checkpoints. Export the weights at the end if `checkpoint.save_consolidated` is set."""
        recipe = self.recipe
        with recipe.trainer as trainer:
            recipe.begin()
            trainer.fit()
            if recipe.config.export and not trainer.preempted:
                recipe.export(recipe.folder / "export")

    # --- attributes that AutoModel's callbacks read ---

    @property
    def _facade(self) -> RecipeFacade:
        if self._guest.facade is None:
            raise AttributeError("the recipe has not been set up; call setup()")
        return self._guest.facade

    @property
    def dist_env(self) -> DistEnv:
        """The rank, world size and device of this process, as AutoModel's recipes provide them."""
        return self._facade.dist_env

    @property
    def step_scheduler(self) -> Scheduled:
        """The progress of training, as an object with the attributes of AutoModel's step scheduler."""
        return self._facade.step_scheduler

    @property
    def model_parts(self) -> list[Any]:
        """The parts of the model, as in AutoModel: here a list whose only item is the whole model."""
        return self._facade.model_parts

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self._facade.model

    @property
    def optimizer(self) -> list[Any]:
        """The optimizers, as in AutoModel: here a list whose only item is the optimizer."""
        return self._facade.optimizer

    @property
    def lr_scheduler(self) -> list[Any] | None:
        """The learning-rate schedulers, as in AutoModel: here a list whose only item is the scheduler; None if there is none."""
        return self._facade.lr_scheduler


class _RecipeGuest(AutoModelGuest):
    """A guest (an adapter for foreign callbacks) that passes the AutoModel recipe itself to AutoModel's callbacks as `recipe`."""

    def __init__(self, recipe: BaseRecipe, constants: Mapping[str, float]) -> None:
        self._scheduled = recipe._as_scheduled
        super().__init__(recipe.callback_runner, name="automodel", recipe=recipe, constants=constants)

    def make_facade(self, ctx: Context) -> RecipeFacade:
        """Return an object with the run's state and, if configured, AutoModel's intervals, for AutoModel's callbacks to read."""
        return RecipeFacade(ctx) if self._scheduled is None else _Facade(ctx, StepScheduler(ctx, self._scheduled.schedule))


class TrainFinetuneRecipeForNextTokenPrediction(BaseRecipe):
    """AutoModel's recipe for fine-tuning a causal language model, implemented by `callsheet.recipes.finetune`."""

    RECIPE_CLASS = Finetune


class TrainFinetuneRecipeForSequenceClassification(BaseRecipe):
    """AutoModel's recipe for sequence classification, implemented by `callsheet.recipes.classify`."""

    RECIPE_CLASS = Classify


class KnowledgeDistillationRecipeForNextTokenPrediction(BaseRecipe):
    """AutoModel's recipe for distilling a causal language model, implemented by `callsheet.recipes.distill`."""

    RECIPE_CLASS = Distill


class FinetuneRecipeForVLM(BaseRecipe):
    """AutoModel's recipe for fine-tuning a vision-language model, implemented by `callsheet.recipes.finetune_vlm`."""

    RECIPE_CLASS = FinetuneVLM
