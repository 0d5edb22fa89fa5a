"""The smallest job of each recipe: four steps of an epoch of six, two evaluations of two batches, and a test of two batches.

`tiny_<recipe>(folder)` gives its configuration; its inputs and its run are created in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from callsheet.recipes.classify import ClassifyConfig
from callsheet.recipes.data.byte_files import ByteFiles
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.distill import DistillConfig
from callsheet.recipes.finetune import FinetuneConfig
from callsheet.recipes.finetune_vlm import FinetuneVLMConfig
from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.models.vision_language_model import VisionLanguageModel
from callsheet.recipes.pretrain import PretrainConfig

SIZES = {"train": 24, "validation": 6, "test": 6}


def job(folder: Path) -> dict[str, Any]:
    """Return the settings that all recipes share."""
    return {
        "run_name": "tiny",
        "runs_folder": str(folder),
        "max_duration": "4ba",
        "eval_interval": "2ba",
        "log_interval": 2,
        "batch_size": 4,
        "threads": 1,
        "device": "cpu",
    }


def model(**values: Any) -> LanguageModel:
    """Return a Llama with a hidden size of 16."""
    return LanguageModel(**{"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 32, **values})


def rows(folder: Path, each: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the rows to JSON Lines files, and return the arguments `train`, `validation` and `test`."""
    folder.mkdir(parents=True, exist_ok=True)
    remaining = iter(each)
    for name, size in SIZES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(next(remaining)) + "\n" for _ in range(size)))
    train, validation, test = (Rows(str(folder / f"{name}.jsonl")) for name in SIZES)
    return {"train": train, "validation": {"validation": validation}, "test": test}


def sums(folder: Path) -> dict[str, Any]:
    """Write sums as prompts and completions."""
    return rows(folder / "rows", [{"prompt": f"{i} + {i} =", "completion": str(2 * i)} for i in range(sum(SIZES.values()))])


def tiny_pretrain(folder: Path) -> PretrainConfig:
    """Pretrain on forty files of a few sentences."""
    text = folder / "text"
    text.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        (text / f"{number}.txt").write_text("The quick brown fox jumps over the lazy dog. " * 3)
    data = ByteFiles(str(text), "*.txt", sequence_length=16, validation_percent=25, test_percent=25, validation_windows=6)
    return PretrainConfig(**job(folder), model=model(), data=data, prompts=[], generated_tokens=1)


def tiny_finetune(folder: Path) -> FinetuneConfig:
    """Fine-tune on sums."""
    return FinetuneConfig(**job(folder), **sums(folder), model=model(), sequence_length=32, evaluate_first=False, samples=0)


def tiny_classify(folder: Path) -> ClassifyConfig:
    """Classify texts of one of two words."""
    words = [{"text": "apple" if i % 2 else "zinc", "label": "fruit" if i % 2 else "metal"} for i in range(sum(SIZES.values()))]
    return ClassifyConfig(**job(folder), **rows(folder / "rows", words), model=model(), sequence_length=32)


def tiny_distill(folder: Path) -> DistillConfig:
    """Distill sums from a teacher with random weights."""
    from transformers import AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    torch.manual_seed(1)
    teacher: Any = model().build(AutoModelForCausalLM, vocabulary=len(tokenizer), longest=128)
    teacher.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    teacher_model = LanguageModel(path=str(folder / "teacher"))
    return DistillConfig(
        **job(folder), **sums(folder), model=model(), teacher=teacher_model, sequence_length=32, evaluate_first=False, samples=0
    )


def tiny_finetune_vlm(folder: Path) -> FinetuneVLMConfig:
    """Fine-tune on squares whose colour is to be named."""
    images = folder / "rows" / "images"
    images.mkdir(parents=True, exist_ok=True)
    for colour in ("red", "blue"):
        Image.new("RGB", (12, 9), colour).save(images / f"{colour}.png")
    names = ["red" if i % 2 else "blue" for i in range(sum(SIZES.values()))]
    named = rows(folder / "rows", [{"image": f"images/{n}.png", "prompt": "Which?", "completion": n} for n in names])
    shape: dict[str, Any] = {"vision_hidden_size": 16, "vision_layers": 1, "hidden_size": 16, "layers": 1, "heads": 2}
    vision_model = VisionLanguageModel(**shape, intermediate_size=32)
    return FinetuneVLMConfig(**job(folder), **named, model=vision_model, sequence_length=128, answered_rows=0)
