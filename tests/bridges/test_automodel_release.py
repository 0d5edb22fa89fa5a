"""The recipes of the installed release of NeMo AutoModel have the parts that the host uses.

The recipes can be imported without a GPU, but not without torchao and megatron-fsdp. No release has callbacks yet. `make versions`
runs these tests.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from callsheet.bridges.automodel.names import MetricsSample
from callsheet.bridges.versions import has

pytest.importorskip("nemo_automodel", reason="NeMo AutoModel is not installed")

RECIPES = (
    "llm.train_ft.TrainFinetuneRecipeForNextTokenPrediction",
    "llm.kd.KnowledgeDistillationRecipeForNextTokenPrediction",
    "llm.train_seq_cls.TrainFinetuneRecipeForSequenceClassification",
    "vlm.finetune.FinetuneRecipeForVLM",
)
PARTS = ("cfg", "checkpointer", "dist_env", "lr_scheduler", "model_parts", "optimizer", "step_scheduler", "_run_train_optim_step")
COMPONENTS = (
    *(f"checkpoint.checkpointing.CheckpointingConfig.{name}" for name in ("checkpoint_dir", "enabled", "is_async")),
    *("checkpoint.checkpointing.Checkpointer.config", "config.loader.ConfigNode.get", "config.loader.ConfigNode.to_dict"),
)

recipes = pytest.mark.parametrize("recipe", RECIPES)


@recipes
@pytest.mark.parametrize("part", PARTS)
def test_a_recipe_has_the_parts_that_the_host_uses(recipe: str, part: str) -> None:
    assert has(f"nemo_automodel.recipes.{recipe}.{part}")


@recipes
def test_a_recipe_has_validation_sets(recipe: str) -> None:
    """The host accepts one set or several."""
    assert any(has(f"nemo_automodel.recipes.{recipe}.{name}") for name in ("val_dataloaders", "val_dataloader"))


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if "SequenceClassification" not in recipe])
def test_the_host_observes_validations_by_a_method(recipe: str) -> None:
    assert has(f"nemo_automodel.recipes.{recipe}._run_validation_epoch")


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_components_have_the_parts_that_the_host_uses(component: str) -> None:
    assert has(f"nemo_automodel.components.{component}")


def test_the_metrics_of_a_step_have_the_same_fields() -> None:
    theirs = importlib.import_module("nemo_automodel.components.loggers.metric_logger").MetricsSample
    shared = set(vars(theirs(3, 1, {"loss": 0.5}))) & set(vars(MetricsSample(3, 1)))
    assert shared == {"step", "epoch", "metrics", "timestamp"}
    ours = MetricsSample(3, 1, {"loss": 0.5}).to_dict()
    assert theirs(3, 1, {"loss": 0.5}).to_dict() | {"timestamp": ""} == ours | {"timestamp": ""}


@recipes
def test_a_recipe_takes_callbacks(recipe: str) -> None:
    module, _, name = f"nemo_automodel.recipes.{recipe}".rpartition(".")
    assert "callbacks" in inspect.signature(getattr(importlib.import_module(module), name)).parameters
