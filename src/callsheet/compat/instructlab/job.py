"""The job that `run_training` runs on each rank: the recipe `finetune`, with InstructLab's callbacks."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from callsheet.bridges.instructlab import InstructLabGuest
from callsheet.callbacks import CheckpointSaver
from callsheet.checkpoint import export_huggingface
from callsheet.compat.instructlab.arguments import TrainingArgs
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.core.ranks import read_ranks
from callsheet.core.run_state import CheckpointInfo
from callsheet.errors import ConfigError
from callsheet.recipes.data.rows import Rows
from callsheet.recipes.data.tables import Stream
from callsheet.recipes.finetune import Finetune, FinetuneConfig
from callsheet.recipes.models.language_model import LanguageModel
from callsheet.recipes.models.lora import ALL_LINEAR, Lora
from callsheet.recipes.schedules import Warmup, WarmupCosine

RUN_NAME = "training"
"""The name of the run's folder in `ckpt_output_dir`. InstructLab's folder `hf_format` is next to it."""


_NAMES = {
    "model": "model_path",
    "model.path": "model_path",
    "model.attention": "disable_flash_attn",
    "lora.r": "lora.rank",
    "lora.targets": "lora.target_modules",
    "train": "data_path",
    "train.path": "data_path",
    "validation": "validation_split",
    "chat_template": "chat_tmpl_path",
    "sequence_length": "max_seq_len",
    "seed": "random_seed",
    "batch_size": "effective_batch_size / ranks",
    "microbatch_size": "max_batch_len / max_seq_len",
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "adamw_weight_decay",
    "optimizer.betas": "adamw_betas",
    "optimizer.eps": "adamw_eps",
}
"""InstructLab's names of the keys of callsheet's recipe. For a value that is converted, the name is the expression that gives it."""


def job_of(args: TrainingArgs, train: str, validation: str | None, callbacks: list[Any]) -> Training:
    """Make the recipe and add the callbacks. Callbacks of InstructLab get a guest adapter, through which callsheet can call them."""
    job = Training(_config(args, train, validation, read_ranks().world_size))
    job.args = args
    known = Counter[str]()
    here: list[Callback] = []
    for each in callbacks:
        given = each if isinstance(each, Callback) else _Guest(each, args)
        known[label := label_of(given)] += 1
        if given is not each and known[label] > 1:  # give each of several callbacks of one class its own name
            given.name = f"{label}-{known[label]}"
        here.append(given)
    job.callbacks.add([*_savers(args), _Exports(job, args), *here])
    return job


class Training(Finetune):
    """The recipe `finetune`, with a learning-rate schedule over all steps of the training."""

    new_run_hint = "another ckpt_output_dir starts a new run"
    setting_names = _NAMES
    args: TrainingArgs | None = None
    """The arguments of `run_training`; None if an existing run is only opened, for example to export its model."""

    def read_data(self) -> None:
        """Read the data, and configure the scheduler for the resulting number of steps."""
        super().read_data()
        if (args := self.args) is None:
            return
        examples: Any = self.sets.examples["train"]
        steps, warmup = args.num_epochs * (len(examples) // args.effective_batch_size), args.warmup_steps
        if not steps:
            raise ConfigError(
                f"{args.data_path} has {len(examples)} examples of up to {args.max_seq_len} tokens, fewer than "
                f"effective_batch_size={args.effective_batch_size}; give a smaller one"
            )
        self.config.scheduler = (
            partial(WarmupCosine, total_steps=steps, warmup_steps=warmup)
            if warmup < steps
            else partial(Warmup, warmup_steps=warmup)
        )


class _Guest(InstructLabGuest):
    """Runs one of InstructLab's callbacks in callsheet's loop, with the paths that InstructLab would pass to it."""

    def __init__(self, foreign: Any, args: TrainingArgs) -> None:
        super().__init__(foreign)
        self._args = args

    def output_dir(self, ctx: Context) -> str:
        return self._args.ckpt_output_dir

    def checkpoint_path(self, info: CheckpointInfo, ctx: Context) -> str:
        """Return the folder of the checkpoint's exported model or, if a preemption caused the save, the checkpoint's own folder."""
        return info.path if info.kind == "preempt" else str(_export_folder(self._args, ctx))


class _Exports(Callback):
    """A callback that exports the model of every checkpoint as a Hugging Face folder, at the path that InstructLab uses.

    A checkpoint that was saved because of a preemption is not exported, because the run has no time for the export.
    """

    phase = "save"
    collective = True

    def __init__(self, job: Training, args: TrainingArgs) -> None:
        self._job, self._args = job, args
        self._group: Any = None

    def on_train_start(self, ctx: Context) -> None:
        """Create the process group through which the ranks coordinate the writing of exported models."""
        if ctx.run.world_size > 1 and self._group is None:
            self._group = distributed.new_group(backend="gloo")

    def on_checkpoint_published(self, ctx: Context) -> None:
        if ctx.checkpoint is None or ctx.checkpoint.kind == "preempt":
            return
        path, job = _export_folder(self._args, ctx), self._job
        if (lora := job.config.lora) is not None:
            lora.export_merged(ctx.model, path, writes=ctx.run.is_world_process_zero, processor=job.tokenizer)
        else:
            export_huggingface(ctx.model, path, group=self._group, processor=job.tokenizer)


def _export_folder(args: TrainingArgs, ctx: Context) -> Path:
    name = "last_epoch" if args.keep_last_checkpoint_only else f"samples_{ctx.state.timestamp.sample}"
    return Path(args.ckpt_output_dir) / "hf_format" / name


def _savers(args: TrainingArgs) -> list[Callback]:
    keep = 1 if args.keep_last_checkpoint_only else None
    wanted = {
        "epochs": "1ep" if args.checkpoint_at_epoch else "",
        "samples": f"{args.save_samples}sp" if args.save_samples > 0 else "",
    }
    return [
        CheckpointSaver(save_interval=every, keep=keep, save_at_end=False, name=name) for name, every in wanted.items() if every
    ]


def _config(args: TrainingArgs, train: str, validation: str | None, ranks: int) -> FinetuneConfig:
    lora = args.lora
    adamw = {"lr": args.learning_rate, "weight_decay": args.adamw_weight_decay, "betas": args.adamw_betas, "eps": args.adamw_eps}
    return FinetuneConfig(
        run_name=RUN_NAME,
        runs_folder=args.ckpt_output_dir,
        model=LanguageModel(path=args.model_path, attention="sdpa" if args.disable_flash_attn else None),
        lora=None if lora is None else Lora(lora.rank, float(lora.alpha), lora.dropout, lora.target_modules or ALL_LINEAR),
        train=Rows(train),
        validation={"validation": Rows(validation)} if validation is not None else {},
        chat_template=args.chat_tmpl_path,
        sequence_length=args.max_seq_len,
        too_long="drop",
        evaluate_first=False,
        samples=0,
        generated_tokens=1,
        seed=args.random_seed,
        max_duration=f"{args.num_epochs}ep",
        eval_interval=f"{args.validation_frequency}ba" if validation is not None else None,
        log_interval=1,
        stop_on_nan=False,  # as in InstructLab, do not stop at a NaN loss
        batch_size=args.effective_batch_size // ranks,
        microbatch_size=min(args.effective_batch_size // ranks, args.max_batch_len // args.max_seq_len),
        optimizer=partial(torch.optim.AdamW, **adamw),  # type: ignore[arg-type]  # the values have several types
        precision="bf16" if torch.cuda.is_available() else "fp32",
        parallel=args.parallel,
    )


def rows_of(args: TrainingArgs) -> tuple[str, str | None]:
    """Return the path of the training data and that of the validation data, which is None if there is no validation data.

    If a part of the data is for validation, two new files are written; otherwise the data file is used itself.
    """
    rows = Rows(args.data_path).read(())
    assert not isinstance(rows, Stream)  # `Rows.read` returns a stream only if streaming is requested
    for number, row in enumerate(rows, 1):
        if row.get("unmask"):
            raise ConfigError(
                f"{args.data_path}: row {number} has `unmask: true`, which is not supported: only the answers count in the loss"
            )
    if not args.validation_split:
        return args.data_path, None
    folder, order = Path(args.data_output_dir), list(range(len(rows)))
    folder.mkdir(parents=True, exist_ok=True)
    random.Random(args.random_seed).shuffle(order)
    count = max(1, round(args.validation_split * len(order)))
    parts = {"validation": sorted(order[:count]), "train": sorted(order[count:])}
    for name, chosen in parts.items():
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(dict(rows[index]))}\n" for index in chosen)
    return str(folder / "train.jsonl"), str(folder / "validation.jsonl")
