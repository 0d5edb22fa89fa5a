"""The programs that `built_on.py` trains with: their versions, and how each is started with and without callsheet."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

SCRIPTS = Path(__file__).resolve().parent / "built_on_trainings"

CALLBACKS = "callbacks.yaml"
"""The name of the file in a run's folder that lists the callbacks of the run."""

OBSERVES = ["watch.Watch", "SpeedMonitor", "MemoryMonitor", "LRMonitor"]
EMA = {"class_path": "EMA", "init_args": {"half_life": 2, "at_end": False}}
SAVER = {"class_path": "CheckpointSaver", "init_args": {"save_interval": "2ba", "keep": None}}
STOP_AT = 4
"""The step at which a callback requests a stop."""
ACTS = ["watch.Watch", EMA, SAVER, {"class_path": "watch.Stops", "init_args": {"at": STOP_AT}}]
SCHEDULER = {"class_path": "GradientAccumulationScheduler", "init_args": {"schedule": {1: 4}}}


@dataclass(frozen=True)
class Run:
    """One training: its folder, the callbacks (without any, callsheet is not used), whether the program itself saves, and further options."""

    folder: Path
    callbacks: list[Any] = field(default_factory=list)
    saves: bool = True
    options: tuple[str, ...] = ()

    @property
    def save_strategy(self) -> str:
        return "steps" if self.saves else "no"


@dataclass(frozen=True)
class Ask:
    """Something that callsheet is expected to reject: callbacks besides `watch.Watch`, or options of the script."""

    callbacks: list[Any]
    options: tuple[str, ...] = ()


Command = Callable[[Run], list[str]]
"""Returns the arguments of the interpreter that start a run. It may write files to the run's folder."""


@dataclass(frozen=True)
class Way:
    """One way to train with a program and callsheet.

    `attached` is how callsheet gets into the training. `acts` is whether callbacks may stop the training and save. `asks` are expected
    to be rejected. `options` are passed to the script in every run. With more than one of `ranks`, torchrun starts that many processes.
    """

    title: str
    attached: Literal["plugin", "host", "exec"]
    command: Command
    acts: bool = True
    asks: Mapping[str, Ask] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    ranks: int = 1


@dataclass(frozen=True)
class Program:
    """A program with its ways. `versions` are installed without dependencies into a venv that shares this environment's packages.

    `shown` are the packages whose versions the table shows, and `empty_modules` are imported by the program but not installed.
    """

    name: str
    shown: tuple[str, ...]
    versions: Mapping[str, str]
    ways: tuple[Way, ...]
    empty_modules: tuple[str, ...] = ()
    is_distributed: bool = False


# --- commands ---


def script(name: str) -> Command:
    """Run a script of this folder, which has callsheet's host in it."""

    def command(run: Run) -> list[str]:
        hosted = ["--callbacks", CALLBACKS] if run.callbacks else []
        return [str(SCRIPTS / name), "--save_strategy", run.save_strategy, *hosted, *run.options]

    return command


def executed(plain: Command) -> Command:
    """Run what `plain` runs without callbacks, under `callsheet exec` if the run has callbacks."""

    def command(run: Run) -> list[str]:
        alone = plain(Run(run.folder, saves=run.saves, options=run.options))
        prefix = ["-m", "callsheet", "exec", "--callbacks", CALLBACKS, "--log_interval", "1"] if run.callbacks else []
        return [*prefix, *alone]

    return command


TRAINING: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "num_train_epochs": 1, "learning_rate": 0.01, "logging_steps": 1, "seed": 3, "save_steps": 2,
    "per_device_train_batch_size": 2, "lr_scheduler_type": "constant", "output_dir": "out",
}  # fmt: skip


def axolotl(run: Run) -> list[str]:
    """Train with axolotl, whose configuration names the plugin."""
    names = {
        "num_train_epochs": "num_epochs",
        "per_device_train_batch_size": "micro_batch_size",
        "lr_scheduler_type": "lr_scheduler",
    }
    config: dict[str, Any] = {names.get(name, name): value for name, value in TRAINING.items()}
    config |= {
        "base_model": "../model", "datasets": [{"path": "../texts.jsonl", "ds_type": "json", "type": "completion", "field": "text"}],
        "sequence_len": 64, "optimizer": "adamw_torch", "save_strategy": run.save_strategy, "bf16": False, "fp16": False, "tf32": False,
        "flash_attention": False, "sample_packing": False, "val_set_size": 0, "warmup_steps": 0,
    }  # fmt: skip
    if run.callbacks:
        config |= {"plugins": ["callsheet.plugins.axolotl.CallsheetPlugin"], "callsheet_callbacks": CALLBACKS}
    if not run.saves:
        del config["save_steps"]
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    return ["-m", "axolotl.cli.train", "config.yaml"]


def swift(run: Run) -> list[str]:
    """Train with ms-swift, whose arguments name a file that registers the callbacks."""
    options: dict[str, Any] = TRAINING | {
        "model": "../model", "model_type": "llama", "template": "dummy", "dataset": "../chats.jsonl", "tuner_type": "full",
        "torch_dtype": "float32", "max_length": 64, "save_strategy": run.save_strategy, "report_to": "none", "use_hf": True,
        "split_dataset_ratio": 0, "use_cpu": True, "add_version": False, "warmup_steps": 0,
    }  # fmt: skip
    if run.callbacks:
        (run.folder / "plugins.py").write_text(f'from callsheet.plugins.swift import register\n\nregister("{CALLBACKS}")\n')
        options |= {"external_plugins": "plugins.py", "callbacks": "callsheet"}
    return ["-m", "swift.cli.sft", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def llamafactory(run: Run) -> list[str]:
    """Train with LLaMA-Factory, which takes callbacks from a program, not from its configuration."""
    config: dict[str, Any] = TRAINING | {
        "model_name_or_path": "../model", "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset_dir": "..",
        "dataset": "rows", "template": "empty", "cutoff_len": 64, "save_strategy": run.save_strategy, "report_to": "none",
        "use_cpu": True, "bf16": False,
    }  # fmt: skip
    (run.folder / "config.yaml").write_text(yaml.safe_dump(config))
    program = [str(SCRIPTS / "with_llamafactory.py")] if run.callbacks else ["-m", "llamafactory.launcher"]
    return [*program, "config.yaml"]


def prepare(folder: Path) -> None:
    """Write the model and the data of all programs."""
    from tests.bridges.built_on import language_model

    model, tokenizer = language_model()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    numbers = range(24)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"{i} and {i} is {2 * i}"}) + "\n" for i in numbers))
    talks = [[{"role": "user", "content": f"{i} and {i}"}, {"role": "assistant", "content": f"{2 * i}"}] for i in numbers]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    rows = [{"instruction": f"{i} and {i}", "input": "", "output": f"{2 * i}"} for i in numbers]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))


# --- programs ---

OF_HAND_WRITTEN_LOOPS = {"CheckpointSaver": Ask([SAVER]), "EMA": Ask([EMA])}
OF_TRAINERS = {"GradientAccumulationScheduler": Ask([SCHEDULER])}
OF_DEEPSPEED = {
    **OF_TRAINERS,
    "fp16": Ask([], ("--fp16",)),
    "ZeRO stage 3": Ask([], ("--stage", "3")),
}

PROGRAMS = (
    Program(
        "skorch",
        ("skorch",),
        {"skorch": "1.4.0"},
        (Way("skorch", "exec", executed(script("with_skorch.py")), acts=False, asks=OF_HAND_WRITTEN_LOOPS),),
    ),
    Program(
        "fastai",
        ("fastai",),
        {
            "fastai": "2.8.12", "fastcore": "2.2.41", "fastprogress": "1.0.3", "fasttransform": "0.0.5", "fastdownload": "0.0.8",
            "plum-dispatch": "2.9.0", "matplotlib": "3.11.2", "pyparsing": "3.3.3", "cycler": "0.12.1",
            "kiwisolver": "1.5.1", "fonttools": "4.68.0", "beartype": "0.23.1",
        },
        (Way("fastai", "exec", executed(script("with_fastai.py")), acts=False, asks=OF_HAND_WRITTEN_LOOPS),),
    ),
    Program(
        "DeepSpeed",
        ("deepspeed",),
        {"deepspeed": "0.19.8", "hjson": "3.1.0", "py-cpuinfo": "9.0.0", "ninja": "1.13.2", "msgpack": "1.2.4", "einops": "0.8.2"},
        (
            Way("DeepSpeed in the Hugging Face Trainer", "host", script("with_deepspeed_and_trainer.py"), asks=OF_DEEPSPEED),
            *(
                Way(
                    f"DeepSpeed in the Hugging Face Trainer on two ranks, ZeRO stage {stage}",
                    "host",
                    script("with_deepspeed_and_trainer.py"),
                    options=("--stage", str(stage)),
                    ranks=2,
                )
                for stage in (1, 2)
            ),
            Way("DeepSpeed in a loop with Accelerate", "host", script("with_deepspeed_and_accelerate.py")),
            Way("DeepSpeed in a loop with Accelerate", "exec", executed(script("with_deepspeed_and_accelerate.py"))),
            Way(
                "DeepSpeed without ZeRO in a loop with Accelerate",
                "exec",
                executed(script("with_deepspeed_and_accelerate.py")),
                acts=False,
                asks=OF_HAND_WRITTEN_LOOPS,
                options=("--stage", "0"),
            ),
        ),
        is_distributed=True,
    ),
    Program(
        "LLaMA-Factory",
        ("llamafactory", "transformers"),
        {
            "llamafactory": "0.9.5", "transformers": "5.6.0", "datasets": "4.0.0", "peft": "0.18.1", "trl": "0.24.0",
            "tokenizers": "0.22.2", "huggingface_hub": "1.17.0", "dill": "0.3.8", "omegaconf": "2.4.0",
        },
        (
            Way("LLaMA-Factory", "host", llamafactory, asks=OF_TRAINERS),
            Way("LLaMA-Factory", "exec", executed(llamafactory), asks=OF_TRAINERS),
        ),
        empty_modules=("torchaudio",),
    ),
    Program(
        "axolotl",
        ("axolotl", "transformers"),
        {
            "axolotl": "0.19.0", "transformers": "5.16.1", "trl": "1.9.0", "peft": "0.20.0", "accelerate": "1.13.0",
            "datasets": "4.8.4", "huggingface_hub": "1.17.0", "fire": "0.7.1", "termcolor": "3.3.0", "addict": "2.4.0",
            "axolotl-contribs-lgpl": "0.0.7", "axolotl-contribs-mit": "0.0.6", "posthog": "6.7.11", "numba": "0.68.1",
            "llvmlite": "0.50.0", "six": "1.17.0", "backoff": "2.2.1", "bitsandbytes": "0.50.2", "kernels": "0.16.2", "kernels-data": "0.16.2",
            "fastcore": "2.2.41", "triton": "3.9.0",
        },
        (Way("axolotl", "plugin", axolotl, asks=OF_TRAINERS),),
    ),
    Program(
        "ms-swift",
        ("ms-swift", "transformers"),
        {
            "ms-swift": "4.6.0", "transformers": "5.19.0", "datasets": "4.8.4", "peft": "0.20.0", "trl": "0.29.1",
            "modelscope": "1.40.2", "modelscope_hub": "0.5.1", "json_repair": "0.64.6", "einops": "0.8.2",
        },
        (Way("ms-swift", "plugin", swift, asks=OF_TRAINERS),),
    ),
    Program(
        "Unsloth",
        ("unsloth", "transformers", "trl"),
        {
            "unsloth": "2026.10.9", "unsloth_zoo": "2026.10.9", "transformers": "5.17.0", "trl": "1.15.0", "datasets": "4.8.4",
            "huggingface_hub": "1.17.0",
        },
        (
            Way("Unsloth on the whole model", "host", script("with_unsloth.py"), asks=OF_TRAINERS),
            Way("Unsloth on a LoRA adapter", "host", script("with_unsloth.py"), asks=OF_TRAINERS, options=("--adapter",)),
        ),
    ),
    Program(
        "Megatron-LM",
        ("megatron-core",),
        {"megatron-core": "0.16.1"},
        (Way("Megatron-LM", "host", script("with_megatron_lm.py")),),
    ),
)  # fmt: skip
