"""Converts AutoModel's configurations to configurations of callsheet's recipes. An unsupported key raises an error that names the key."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from callsheet.bridges.automodel.recipe import ConfigNode
from callsheet.compat.automodel.columns import MappedRows
from callsheet.compat.automodel.section import Section
from callsheet.core.ranks import read_ranks
from callsheet.errors import ConfigError
from callsheet.recipes.classify import ClassifyConfig
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.distill import DistillConfig
from callsheet.recipes.finetune import FinetuneConfig
from callsheet.recipes.finetune_vlm import FinetuneVLMConfig
from callsheet.recipes.job import JobConfig
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.models.lora import ALL_LINEAR, Lora
from callsheet.recipes.models.vision_language_model import VisionLanguageModel
from callsheet.recipes.schedules import Warmup, WarmupCosine, WarmupLinear

_LOAD_METHOD, _CREATE_METHOD = "from_pretrained", "from_config"
_MODEL_TARGETS = tuple(
    f"{kind}.{way}"
    for kind in ("NeMoAutoModelForCausalLM", "NeMoAutoModelForSequenceClassification", "NeMoAutoModelForImageTextToText")
    for way in (_LOAD_METHOD, _CREATE_METHOD)
)
_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_PARALLEL_MODES = {"fsdp2": "fsdp", "FSDP2Manager": "fsdp", "ddp": "ddp", "DDPManager": "ddp"}
_SCHEDULE_CLASSES = {"cosine": WarmupCosine, "linear": WarmupLinear, "constant": Warmup}
_HINTS = {
    **{
        name: f"give the recipe a logger of callsheet.loggers, in callbacks=, in the place of {name}"
        for name in ("wandb", "mlflow", "comet")
    },
    "fp8": "fp8 is not supported; callsheet.precision takes bf16 and fp16",
}


_NAMES = {
    "batch_size": "step_scheduler.local_batch_size",
    "gradient_accumulation_steps": "step_scheduler.global_batch_size / (local_batch_size * ranks)",
    "seed": "rng.seed",
    "clip_grad_norm": "clip_grad_norm.max_norm",
    "optimizer": "optimizer",
    "scheduler": "lr_scheduler",
    "scheduler.total_steps": "lr_scheduler.lr_decay_steps",
    "scheduler.warmup_steps": "lr_scheduler.lr_warmup_steps",
    "scheduler.final": "lr_scheduler.min_lr / optimizer.lr",
    "model": "model",
    "model.path": "model.pretrained_model_name_or_path",
    "model.attention": "model.attn_implementation",
    "model.dtype": "model.torch_dtype",
    "model.tokenizer": "tokenizer.pretrained_model_name_or_path",
    "model.processor": "processor.pretrained_model_name_or_path",
    "model.freeze": "freeze_config",
    "teacher": "teacher_model",
    "teacher.path": "teacher_model.pretrained_model_name_or_path",
    "teacher.attention": "teacher_model.attn_implementation",
    "teacher.dtype": "teacher_model.torch_dtype",
    "mix": "1 - kd_ratio",
    "kd_temperature": "kd_loss_fn.temperature",
    "lora": "peft",
    "lora.r": "peft.dim",
    "lora.targets": "peft.target_modules",
    "train": "dataset",
    "train.path": "dataset.path_or_dataset_id",
    "train.limit": "dataset.limit_dataset_samples",
    "train.columns": "dataset.column_mapping",
    "validation": "validation_dataset",
    "text_column": "dataset.text_column",
    "label_column": "dataset.label_column",
    "completion_only": "dataset.answer_only_loss_mask",
    "sequence_length": "dataset.seq_length or packed_sequence.packed_sequence_size",
    "packing": "packed_sequence",
}
"""AutoModel's names of the keys of callsheet's recipes. For a value that is converted, the name is the expression that gives it."""


def setting_names(kind: type[JobConfig]) -> dict[str, str]:
    """Return the names in an AutoModel configuration of the keys of callsheet's class `kind`, for messages.

    Keys that AutoModel does not have are in the section `callsheet`.
    """
    return {each.name: f"callsheet.{each.name}" for each in fields(kind)} | _NAMES


@dataclass
class Schedule:
    """The settings that say when AutoModel validates, saves checkpoints and ends training. AutoModel counts steps and epochs from 0."""

    ckpt_every_steps: int | None = None
    val_every_steps: int | None = None
    num_epochs: int | None = None
    grad_acc_steps: int = 1
    saves: bool = False
    best_metric_key: str | None = None
    constants: dict[str, float] = field(default_factory=dict)


def load_yaml_config(path: str | Path) -> ConfigNode:
    """Read an AutoModel configuration from a YAML file.

    Args:
        path: a YAML file.

    Returns:
        The configuration; an empty file gives an empty one.
    """
    return ConfigNode(yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {})


def parse_args_and_load_config(default: str | Path | None = None, argv: Sequence[str] | None = None) -> ConfigNode:
    """Read the file that `--config` names on the command line, with overrides such as `--step_scheduler.num_epochs 2`.

    Args:
        default: the file to read if the command line names none.
        argv: the arguments of the command line; None: those of this program.

    Returns:
        The configuration, with the overrides.

    Raises:
        ConfigError: no file is named, or an option has no value.
    """
    path, over = default, {}
    left = list(sys.argv[1:] if argv is None else argv)
    while left:
        name, has_value, value = left.pop(0).partition("=")
        if not name.startswith("-") or (not has_value and not left):
            raise ConfigError(f"{name!r}: give --config FILE, and values as --section.key VALUE")
        value = value if has_value else left.pop(0)
        if name in ("-c", "--config"):
            path = value
        else:
            over[name.lstrip("-")] = yaml.safe_load(value)
    if path is None:
        raise ConfigError("no configuration is named; give --config FILE")
    cfg = load_yaml_config(path)
    for name, value in over.items():
        cfg.set_by_dotted(name, value)
    return cfg


def convert_configuration(values: Mapping[str, Any], kind: type[JobConfig]) -> tuple[Any, Schedule]:
    """Convert an AutoModel configuration. Return an instance of callsheet's class `kind`, and the schedule of evaluations and saves.

    Raises:
        ConfigError: a key or value is not supported; the message names it and the nearest supported one.
    """
    cfg = Section(values)
    schedule = Schedule()
    given = {
        **_steps(cfg.part("step_scheduler"), schedule),
        **_surroundings(cfg),
        **_checkpoint(cfg.part("checkpoint"), schedule),
        **_optimizer(cfg),
        **_data(cfg, kind),
        "model": _model(cfg, "model", kind),
        "eval_interval": None,  # the callback `_AsScheduled` requests the evaluations, by AutoModel's schedule
        "log_interval": 1,
        "stop_on_nan": False,
    }
    if issubclass(kind, FinetuneConfig):
        given |= {"lora": _lora(cfg.part("peft")) if cfg.has("peft") else None, "evaluate_first": False, "samples": 0}
    if kind is FinetuneVLMConfig:
        given["answered_rows"] = 0
    if kind is DistillConfig:
        given |= _distillation(cfg, schedule, kind)
    given |= _own(cfg.part("callsheet"), kind)
    cfg.close(_HINTS)
    return kind(**given), schedule


def _own(section: Section, kind: type[JobConfig]) -> dict[str, Any]:
    """Return the values under the key `callsheet`, for fields of callsheet's configuration that AutoModel does not have."""
    names = [each.name for each in fields(kind)]
    found = {name: section.take(name) for name in names if section.has(name)}
    section.ignore(*names)
    return found


def _steps(section: Section, schedule: Schedule) -> dict[str, Any]:
    local = section.number("local_batch_size", 1)
    world_size = read_ranks().world_size
    whole = section.number("global_batch_size", local * world_size)
    if whole % (local * world_size):
        section.reject("global_batch_size", f"{whole} is no multiple of local_batch_size={local} times {world_size} ranks")
    schedule.grad_acc_steps = whole // (local * world_size)
    schedule.ckpt_every_steps = section.number("ckpt_every_steps")
    schedule.val_every_steps = section.number("val_every_steps")
    schedule.num_epochs, steps = section.number("num_epochs"), section.number("max_steps")
    if steps is None:
        schedule.num_epochs = schedule.num_epochs or 10
    length = f"{steps}ba" if steps is not None else f"{schedule.num_epochs}ep"
    return {"batch_size": local, "gradient_accumulation_steps": schedule.grad_acc_steps, "max_duration": length}


def _surroundings(cfg: Section) -> dict[str, Any]:
    cfg.ignore("recipe", "ci")
    found: dict[str, Any] = {}
    rng = cfg.part("rng")
    rng.target("StatefulRNG")
    rng.ignore("ranked")
    seed = cfg.number("seed", 42)
    found["seed"] = rng.number("seed", seed)
    ranks = cfg.part("dist_env")
    ranks.ignore("backend")  # callsheet itself chooses a backend that fits the device
    if (minutes := ranks.number("timeout_minutes")) is not None:
        found["timeout_seconds"] = 60.0 * minutes
    split = cfg.part("distributed")
    named = split.target(*_PARALLEL_MODES) or split.take("strategy")
    if named is not None and named not in _PARALLEL_MODES:
        split.reject("strategy", f"{named!r} is not supported (one of fsdp2, ddp)")
    if named:
        found["parallel"] = _PARALLEL_MODES[named] if read_ranks().world_size > 1 else "auto"
    for name in ("tp_size", "cp_size", "pp_size", "ep_size"):
        if (size := split.take(name)) not in (None, "none", 1):
            split.reject(name, f"{size}: only the data is shared out among ranks here")
    split.ignore("dp_size", "dp_replicate_size", "sequence_parallel")
    clip = cfg.part("clip_grad_norm")
    if (norm := clip.number("max_norm", cfg.number("max_grad_norm"))) is not None:
        found["clip_grad_norm"] = float(norm)
    loss = cfg.part("loss_fn")
    loss.target("MaskedCrossEntropy", "CrossEntropyLoss")
    return found


def _checkpoint(section: Section, schedule: Schedule) -> dict[str, Any]:
    schedule.saves = bool(section.take("enabled", True))
    schedule.best_metric_key = section.take("best_metric_key")
    section.ignore("load_base_model")
    if (form := section.take("model_save_format")) not in (None, "safetensors"):
        section.reject(
            "model_save_format", f"{form!r} is not supported: weights are written as safetensors, or as tensors without pickles"
        )
    folder = Path(section.take("checkpoint_dir", "checkpoints"))
    found = {
        "runs_folder": str(folder.parent),
        "run_name": folder.name,
        "export": bool(section.take("save_consolidated", False)),
        "save_in_background": bool(section.take("is_async", False)),
    }
    if (path := section.take("restore_from")) is not None:
        found["resume"] = str(path)
    return found


def _optimizer(cfg: Section) -> dict[str, Any]:
    section = cfg.part("optimizer")
    target = section.take("_target_", "torch.optim.AdamW")
    kind = _import(section, target) if isinstance(target, str) else target
    names = ("lr", "betas", "eps", "weight_decay", "momentum", "foreach", "fused", "amsgrad", "nesterov", "dampening")
    options = {name: section.take(name) for name in names if section.has(name)}
    options = {name: float(value) if name in ("lr", "eps", "weight_decay") else value for name, value in options.items()}
    section.ignore(*names)
    found: dict[str, Any] = {"optimizer": partial(kind, **options)}
    if cfg.has("lr_scheduler"):
        found["scheduler"] = _rate(cfg.part("lr_scheduler"), cfg, options.get("lr"))
    return found


def _rate(section: Section, cfg: Section, rate: float | None) -> Any:
    style = section.take("lr_decay_style", "cosine")
    if style not in _SCHEDULE_CLASSES:
        section.reject("lr_decay_style", f"{style!r} is not supported (one of {', '.join(_SCHEDULE_CLASSES)})")
    warmup, steps, least = section.number("lr_warmup_steps"), section.number("lr_decay_steps"), section.take("min_lr")
    if style == "constant":
        return partial(Warmup, warmup_steps=int(warmup or 0))
    if steps is None:
        section.reject("lr_decay_steps", "say over how many steps the rate falls")
    final = 0.01 if least is None else float(least) / rate if rate else 0.0
    return partial(
        _SCHEDULE_CLASSES[style],
        total_steps=int(steps),
        warmup_steps=int(min(1000, steps // 10) if warmup is None else warmup),
        final=final,
    )


def _model(cfg: Section, name: str, kind: type[JobConfig]) -> LanguageModel:
    section = cfg.part(name)
    section.target(*_MODEL_TARGETS)
    found: dict[str, Any] = {
        "path": section.take("pretrained_model_name_or_path"),
        "revision": section.take("revision"),
        "attention": section.take("attn_implementation"),
        "config": section.take("config"),
    }
    section.ignore("num_labels")  # callsheet derives the number of classes from the dataset's rows
    named = section.first("torch_dtype", "dtype")
    if named is not None:
        found["dtype"] = _DTYPE_NAMES.get(str(named), str(named).removeprefix("torch."))
    if name == "model":
        tokenizer = cfg.part("tokenizer")
        found["tokenizer"] = tokenizer.take("pretrained_model_name_or_path")
    if kind is not FinetuneVLMConfig:
        return LanguageModel(**found)
    frozen = cfg.part("freeze_config")
    towers = {"freeze_vision_tower": "vision_tower", "freeze_language_model": "language_model"}
    found["freeze"] = [tower for key, tower in towers.items() if frozen.take(key)]
    found["processor"] = cfg.part("processor").take("pretrained_model_name_or_path")
    return VisionLanguageModel(**{key: value for key, value in found.items() if value is not None})


def _lora(section: Section) -> Lora:
    section.target("PeftConfig")
    targets = section.take("target_modules")
    if section.take("match_all_linear"):
        targets = ALL_LINEAR
    section.ignore("use_triton")
    if targets is None:
        section.reject("target_modules", "name modules, or set match_all_linear")
    bare = targets if isinstance(targets, str) else [str(target).removeprefix("*.").removeprefix("*") for target in targets]
    return Lora(
        r=int(section.number("dim", 8)),
        alpha=float(section.number("alpha", 32)),
        dropout=float(section.number("dropout", 0.0)),
        targets=bare,
    )


def _distillation(cfg: Section, schedule: Schedule, kind: type[JobConfig]) -> dict[str, Any]:
    if not cfg.has("teacher_model"):
        cfg.reject("teacher_model", "a distillation needs a teacher")
    ratio = float(cfg.number("kd_ratio", 0.5))
    loss = cfg.part("kd_loss_fn")
    loss.target("KDLoss")
    loss.ignore("ignore_index")
    temperature = float(loss.number("temperature", 1.0))
    schedule.constants = {"kd_ratio": ratio, "temperature": temperature}
    return {"teacher": _model(cfg, "teacher_model", kind), "mix": 1.0 - ratio, "kd_temperature": temperature}


# --- converting the configuration of the data ---


def _data(cfg: Section, kind: type[JobConfig]) -> dict[str, Any]:
    loader, other = cfg.part("dataloader"), cfg.part("validation_dataloader")
    for section in (loader, other):
        section.target("StatefulDataLoader", "DataLoader")
        section.ignore("collate_fn", "drop_last", "pin_memory")
    if loader.take("shuffle", True) is False:
        loader.reject("shuffle", "false is not supported: rows to train on are taken in random order")
    other.ignore("shuffle")
    found: dict[str, Any] = {"workers": int(loader.number("num_workers", 0) or 0)}
    other.ignore("num_workers")
    if (size := other.number("batch_size")) is not None:
        found["eval_batch_size"] = int(size)
    packed = cfg.part("packed_sequence")
    if (length := packed.number("packed_sequence_size", 0)) and not issubclass(kind, FinetuneConfig):
        packed.reject("packed_sequence_size", "rows are packed in fine-tuning and distillation alone")
    if length:
        found |= {"packing": True, "sequence_length": int(length)}
    if not cfg.has("dataset"):
        cfg.reject("dataset", "there is nothing to train on")
    lengths: list[int] = []
    found["train"] = _rows(cfg.part("dataset"), kind, found, lengths)
    found["validation"] = {}
    for name in cfg.names("validation_dataset"):
        shown = name.removeprefix("validation_dataset").lstrip("_") or "validation"
        if cfg.has(name):
            found["validation"][shown] = _rows(cfg.part(name), kind, found, lengths)
        else:
            cfg.ignore(name)
    cfg.ignore("validation_dataset")
    if lengths and not length:
        found["sequence_length"] = max(lengths)
    return found


def _rows(section: Section, kind: type[JobConfig], found: dict[str, Any], lengths: list[int]) -> Rows:
    section.target("ColumnMappedTextInstructionDataset", "ChatDataset", "Rows")
    path = section.first("path_or_dataset_id", "path_or_dataset", "path")
    if not isinstance(path, str):
        section.reject("path_or_dataset_id", "give a file of JSON lines, a folder of them, or the name of a dataset on the hub")
    options = {"name": section.take("name"), "split": section.take("split") or "train"}
    options |= {"limit": section.first("limit_dataset_samples", "num_samples_limit")}
    options["streaming"] = bool(section.take("streaming", False))
    if (length := section.number("seq_length")) is not None:
        lengths.append(int(length))
    columns = section.take("column_mapping")
    if kind is ClassifyConfig:
        for ours, theirs in (("text_column", "text_column"), ("label_column", "label_column")):
            if section.has(theirs):
                found[ours] = section.take(theirs)
            section.ignore(theirs)
    elif issubclass(kind, FinetuneConfig) and section.take("answer_only_loss_mask", True) is False:
        found["completion_only"] = False
    if columns is None:
        return Rows(path, **options)
    if kind is ClassifyConfig:
        section.reject("column_mapping", "give text_column and label_column")
    return MappedRows(path, **options, columns=_map_columns(section, columns))


def _map_columns(section: Section, columns: Any) -> dict[str, str]:
    valid = ("context", "question", "answer")
    if not isinstance(columns, Mapping) or not set(columns) <= set(valid) or "answer" not in columns or len(columns) < 2:
        section.reject(
            "column_mapping", f"{columns!r}: name the column of the answer, and of the question, of the context, or of both"
        )
    return {str(name): str(column) for name, column in columns.items()}


def _import(section: Section, target: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        section.reject("_target_", f"there is no {target!r}; give a class of torch.optim, such as torch.optim.AdamW")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        section.reject("_target_", f"{target} is no optimizer of torch")
    return found
