"""NeMo AutoModel's API (its callbacks and its four recipes), implemented by callsheet's recipes.

NeMo AutoModel need not be installed.
"""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.automodel.names import Callback, CallbackRunner, MetricsSample, rank_zero_only
    from callsheet.bridges.automodel.recipe import ConfigNode
    from callsheet.compat.automodel.configuration import load_yaml_config, parse_args_and_load_config
    from callsheet.compat.automodel.recipes import (
        BaseRecipe,
        FinetuneRecipeForVLM,
        KnowledgeDistillationRecipeForNextTokenPrediction,
        TrainFinetuneRecipeForNextTokenPrediction,
        TrainFinetuneRecipeForSequenceClassification,
    )

__all__ = [
    "BaseRecipe",
    "Callback",
    "CallbackRunner",
    "ConfigNode",
    "FinetuneRecipeForVLM",
    "KnowledgeDistillationRecipeForNextTokenPrediction",
    "MetricsSample",
    "TrainFinetuneRecipeForNextTokenPrediction",
    "TrainFinetuneRecipeForSequenceClassification",
    "load_yaml_config",
    "parse_args_and_load_config",
    "rank_zero_only",
]
