"""Recipes: complete training jobs, which `callsheet train` runs. Each recipe is one readable file."""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.recipes.classify import Classify, ClassifyConfig, classify
    from callsheet.recipes.data.byte_files import ByteFiles
    from callsheet.recipes.data.rows import Rows
    from callsheet.recipes.data.text_rows import TextRows
    from callsheet.recipes.distill import Distill, DistillConfig, distill
    from callsheet.recipes.finetune import Finetune, FinetuneConfig, finetune
    from callsheet.recipes.finetune_vlm import FinetuneVLM, FinetuneVLMConfig, finetune_vlm
    from callsheet.recipes.job import JobConfig
    from callsheet.recipes.models.language_model import LanguageModel
    from callsheet.recipes.models.lora import Lora
    from callsheet.recipes.models.vision_language_model import VisionLanguageModel
    from callsheet.recipes.pretrain import Pretrain, PretrainConfig, pretrain
    from callsheet.recipes.recipe import Recipe
    from callsheet.recipes.tasks.distillation_task import DistillationTask

__all__ = [
    "ByteFiles",
    "Classify",
    "ClassifyConfig",
    "Distill",
    "DistillConfig",
    "DistillationTask",
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
