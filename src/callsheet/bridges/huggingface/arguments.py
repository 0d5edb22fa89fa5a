"""The object that a transformers callback in callsheet's loop receives as its `TrainingArguments`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from transformers.training_args import ParallelMode

from callsheet.bridges.guest_base import Facade
from callsheet.core.callback import one_of
from callsheet.core.context import Context

_ARGUMENTS_WITH_DEFAULTS = (
    *("eval_strategy", "eval_steps", "eval_delay", "logging_strategy", "logging_steps", "logging_first_step", "save_strategy"),
    *("save_steps", "metric_for_best_model", "greater_is_better", "load_best_model_at_end", "max_steps", "disable_tqdm"),
    *("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "hub_private_repo", "push_to_hub"),
    *(
        "resume_from_checkpoint",
        "report_to",
        "save_total_limit",
        "hub_model_id",
        "hub_strategy",
        "do_train",
        "do_eval",
        "do_predict",
    ),
)
"""The names of the training arguments that have transformers' default values unless the user sets them.

Other arguments exist only if the user sets them.
"""
_ARGUMENT_FIELDS = {field.name: field for field in dataclasses.fields(TrainingArguments)}
_STRATEGY_TYPES = {"eval_strategy": IntervalStrategy, "logging_strategy": IntervalStrategy, "save_strategy": SaveStrategy}


class Arguments(Facade):
    """Takes the place of `TrainingArguments` in callsheet's loop, for a transformers callback. Its values come from the user and the run."""

    REPLACED_OBJECT = "transformers' TrainingArguments"

    def __init__(self, given: TrainingArguments | Mapping[str, Any] | None) -> None:
        if isinstance(given, TrainingArguments):
            given = {name: getattr(given, name) for name in _ARGUMENT_FIELDS}
        for name in given or ():
            one_of("training argument", name, tuple(_ARGUMENT_FIELDS))
        self._given = dict(given or {})
        values = {name: _default(name) for name in _ARGUMENTS_WITH_DEFAULTS} | self._given
        for name, kind in _STRATEGY_TYPES.items():
            values[name] = kind(one_of(name, getattr(values[name], "value", values[name]), tuple(each.value for each in kind)))
        if values["eval_strategy"] == IntervalStrategy.STEPS and not values["eval_steps"]:
            values["eval_steps"] = values["logging_steps"]
        if values["load_best_model_at_end"] and values["metric_for_best_model"] is None:
            values["metric_for_best_model"] = "loss"
        if values["greater_is_better"] is None and values["metric_for_best_model"] is not None:
            values["greater_is_better"] = not values["metric_for_best_model"].endswith("loss")
        vars(self).update(values)

    def _take(self, ctx: Context, resumed: str | None) -> None:
        """Set the attributes that come from the run, such as `world_size` and `output_dir`, unless the user has set them."""
        run = ctx.run
        vars(self).update(
            {
                **_of_optimizer(ctx),
                "resume_from_checkpoint": resumed,
                "do_train": True,
                "do_eval": bool(ctx.state.evaluators),
                "n_gpu": int(torch.device(run.device).type == "cuda"),
                "parallel_mode": ParallelMode.DISTRIBUTED if run.world_size > 1 else ParallelMode.NOT_PARALLEL,
                "local_rank": run.ranks.local_rank,
                "output_dir": str(run.folder or ""),
                "run_name": run.name,
                "world_size": run.world_size,
                "process_index": run.rank,
                "local_process_index": run.ranks.local_rank,
                "should_save": run.is_world_process_zero,
                "should_log": run.is_world_process_zero,
                "device": run.device,
            }
            | ({"eval_strategy": IntervalStrategy.EPOCH} if ctx.state.evaluators else {})
            | {name: vars(self)[name] for name in self._given}
        )
        self._config = dict(run.config)
        if self.output_dir and self.should_save:  # the Hugging Face Trainer creates this folder, so callbacks expect it
            os.makedirs(self.output_dir, exist_ok=True)

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments and the run's configuration as plain data."""
        own = {name: getattr(value, "value", value) for name, value in vars(self).items() if not name.startswith("_")}
        return {**self._config, **own}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return all arguments and the run's configuration. Values that are not numbers or strings are converted to strings."""
        return {name: value if type(value) in (bool, int, float, str) else str(value) for name, value in self.to_dict().items()}

    def to_json_string(self) -> str:
        """Return all arguments and the run's configuration as JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=str)


def _default(name: str) -> Any:
    field = _ARGUMENT_FIELDS[name]
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _of_optimizer(ctx: Context) -> dict[str, Any]:
    """Return the initial learning rate and the weight decay of the optimizer's first parameter group, if the group has them."""
    group = ctx.optimizer.param_groups[0] if ctx.has("optimizer") and ctx.optimizer is not None else {}
    found = {"learning_rate": group.get("initial_lr", group.get("lr")), "weight_decay": group.get("weight_decay")}
    return {name: float(value) for name, value in found.items() if value is not None}
