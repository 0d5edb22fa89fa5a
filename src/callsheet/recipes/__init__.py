"""Recipes: ready training jobs, one readable file for each kind, run with `callsheet train`."""

from callsheet.extras import needed_by

with needed_by(__name__):
    from callsheet.recipes.byte_files import ByteFiles
    from callsheet.recipes.classify import Classify, ClassifyConfig, classify
    from callsheet.recipes.distill import Distill, DistillConfig, distill
    from callsheet.recipes.finetune import Finetune, FinetuneConfig, finetune
    from callsheet.recipes.finetune_vlm import FinetuneVLM, FinetuneVLMConfig, finetune_vlm
    from callsheet.recipes.job import JobConfig
    from callsheet.recipes.language_model import LanguageModel
    from callsheet.recipes.lora import Lora
    from callsheet.recipes.pretrain import Pretrain, PretrainConfig, pretrain
    from callsheet.recipes.recipe import Recipe
    from callsheet.recipes.rows import Rows
    from callsheet.recipes.text_rows import TextRows
    from callsheet.recipes.vision_language_model import VisionLanguageModel

__all__ = [
    "ByteFiles",
    "Classify",
    "ClassifyConfig",
    "Distill",
    "DistillConfig",
    "Finetune",
    "FinetuneConfig",
    "FinetuneVLM",
    "FinetuneVLMConfig",
    "JobConfig",
    "LanguageModel",
    "Lora",
    "Pretrain",
    "PretrainConfig",
    "Recipe",
    "Rows",
    "TextRows",
    "VisionLanguageModel",
    "classify",
    "distill",
    "finetune",
    "finetune_vlm",
    "pretrain",
]
