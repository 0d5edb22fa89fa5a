"""callsheet's callbacks in axolotl, ms-swift, LLaMA-Factory and Unsloth, which train with the Hugging Face Trainer.

The packages pin many others, so each test needs an interpreter of its own in which its package is installed, and is skipped otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from callsheet.bridges.huggingface import STATE
from callsheet.core.spec import import_path
from callsheet.plugins.hosts import host_of

SOURCE = Path(__file__).parents[2] / "src"
CALLBACKS = """
- SpeedMonitor
- class_path: EMA
  init_args: {half_life: 2, at_end: false}
- class_path: CheckpointSaver
  init_args: {save_interval: 2ba, keep: null}
- class_path: stops.Stops
"""
STOPS = """
from callsheet import Callback

class Stops(Callback):
    def on_train_step_end(self, ctx):
        if ctx.step == 4:
            ctx.control.stop("enough")
"""
TRAINING = {
    "gradient_accumulation_steps": 2, "num_train_epochs": 1, "learning_rate": 0.01, "logging_steps": 1, "seed": 3,
    "per_device_train_batch_size": 2, "lr_scheduler_type": "constant",
}  # fmt: skip


def axolotl(folder: Path, output: str, *, max_steps: int | None, hosted: bool) -> list[str]:
    """Train with axolotl, whose configuration names the plugin."""
    import yaml

    names = {
        "num_train_epochs": "num_epochs",
        "per_device_train_batch_size": "micro_batch_size",
        "lr_scheduler_type": "lr_scheduler",
    }
    config: dict[str, Any] = {names.get(name, name): value for name, value in TRAINING.items()}
    config |= {
        "base_model": "./model", "datasets": [{"path": "texts.jsonl", "ds_type": "json", "type": "completion", "field": "text"}],
        "output_dir": output, "sequence_len": 64, "optimizer": "adamw_torch", "save_strategy": "no", "bf16": False, "fp16": False,
        "tf32": False, "flash_attention": False, "sample_packing": False, "val_set_size": 0, "warmup_steps": 0,
        **({"max_steps": max_steps} if max_steps else {}),
    }  # fmt: skip
    if hosted:
        config |= {"plugins": ["callsheet.plugins.axolotl.CallsheetPlugin"], "callsheet_callbacks": "callbacks.yaml"}
    (folder / f"{output}.yaml").write_text(yaml.safe_dump(config))
    return ["-m", "axolotl.cli.train", f"{output}.yaml"]


def swift(folder: Path, output: str, *, max_steps: int | None, hosted: bool) -> list[str]:
    """Train with ms-swift, whose arguments name a file that registers the callbacks."""
    (folder / "plugins.py").write_text('from callsheet.plugins.swift import register\n\nregister("callbacks.yaml")\n')
    options: dict[str, Any] = TRAINING | {
        "model": "./model", "model_type": "llama", "template": "dummy", "dataset": "./chats.jsonl", "output_dir": output,
        "tuner_type": "full", "torch_dtype": "float32", "max_length": 64, "save_strategy": "no", "report_to": "none", "use_hf": True,
        "split_dataset_ratio": 0, "use_cpu": True, "add_version": False, "warmup_steps": 0,
    }  # fmt: skip
    options |= {"external_plugins": "plugins.py", "callbacks": "callsheet"} if hosted else {}
    options |= {"max_steps": max_steps, "save_strategy": "steps", "save_steps": max_steps} if max_steps else {}
    return ["-m", "swift.cli.sft", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def llamafactory(folder: Path, output: str, *, max_steps: int | None, hosted: bool) -> list[str]:
    """Train with LLaMA-Factory, which takes callbacks from a program, not from its configuration."""
    import yaml

    config: dict[str, Any] = TRAINING | {
        "model_name_or_path": "./model", "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset_dir": ".",
        "dataset": "rows", "template": "empty", "cutoff_len": 64, "output_dir": output, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "bf16": False, **({"max_steps": max_steps} if max_steps else {}),
    }  # fmt: skip
    (folder / f"{output}.yaml").write_text(yaml.safe_dump(config))
    (folder / "train.py").write_text(
        "from llamafactory.train.tuner import run_exp\nfrom callsheet.bridges.huggingface import host\n"
        "from callsheet.callbacks import EMA, CheckpointSaver, SpeedMonitor\nfrom stops import Stops\n"
        "saver = CheckpointSaver(save_interval='2ba', keep=None)\n"
        "run_exp(callbacks=[host([SpeedMonitor(), EMA(half_life=2, at_end=False), saver, Stops()])])\n"
    )
    return ["train.py", f"{output}.yaml"] if hosted else ["-m", "llamafactory.launcher", f"{output}.yaml"]


def executed(folder: Path, output: str, *, max_steps: int | None, hosted: bool) -> list[str]:
    """Train with LLaMA-Factory under `callsheet exec`, which needs no program."""
    plain = llamafactory(folder, output, max_steps=max_steps, hosted=False)
    return ["-m", "callsheet", "exec", "--callbacks", "callbacks.yaml", *plain] if hosted else plain


UNSLOTH = """
import sys
from unsloth import FastLanguageModel  # first, because it replaces parts of the others
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from callsheet.bridges.huggingface import host
from callsheet.callbacks import EMA, CheckpointSaver, History, LRMonitor, SpeedMonitor
from callsheet.testing import Recorder, check_events
from stops import Stops

def trained(output, callbacks, **more):
    is_full = sys.argv[1] == "full"
    model, tokenizer = FastLanguageModel.from_pretrained(
        "./model", max_seq_length=64, load_in_4bit=False, dtype=torch.float32, full_finetuning=is_full
    )
    if not is_full:
        model = FastLanguageModel.get_peft_model(model, r=2, target_modules=["q_proj", "v_proj"], random_state=3)
    arguments = SFTConfig(
        output_dir=output, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=1, logging_steps=1,
        learning_rate=1e-2, lr_scheduler_type="constant", report_to=[], save_strategy="no", seed=3, dataset_text_field="text",
        max_length=64, bf16=False, fp16=False, **more,
    )
    rows = Dataset.from_json("texts.jsonl")
    trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=rows, args=arguments, callbacks=callbacks)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer.state.global_step, losses, list(trainer.model.state_dict().values())

recorder, history, saver = Recorder(), History(), CheckpointSaver(save_interval="2ba", keep=None)
acting = [EMA(half_life=2, at_end=False), saver, Stops()]
ours = trained("hosted", [host([recorder, history, SpeedMonitor(), LRMonitor(), *acting])])
plain = trained("plain", [], max_steps=4)
assert ours[:2] == plain[:2], (ours[:2], plain[:2])
assert ours[0] == 4
assert history["train/loss"] == plain[1], history["train/loss"]
assert all(torch.equal(one, other) for one, other in zip(ours[2], plain[2], strict=True))
check_events(recorder.events)
assert recorder.events.count("on_backward_end") == 8
"""


def prepare(folder: Path) -> dict[str, str]:
    """Write a model, the data and the callbacks, and return the environment of the training."""
    from .built_on import language_model

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
    (folder / "callbacks.yaml").write_text(CALLBACKS)
    (folder / "stops.py").write_text(STOPS)
    return os.environ | {
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "1", "AXOLOTL_DO_NOT_TRACK": "1",
    }  # fmt: skip


BROKEN = """
from callsheet import Callback

class Broken(Callback):
    collective = {collective}

    def on_train_step_end(self, ctx):
        raise RuntimeError("broken")

    def on_predict_end(self, ctx):
        ...  # an event that the Trainer never fires
"""


@pytest.mark.parametrize("is_default", [False, True])
def test_the_host_of_a_plugin_does_not_end_the_training(
    is_default: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a callback file, errors of callbacks are isolated. With the default callbacks, not even errors of collective callbacks end training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"broken_{is_default}"
    (tmp_path / f"{module}.py").write_text(BROKEN.format(collective=is_default))
    (tmp_path / "callbacks.yaml").write_text(f"- {module}.Broken\n")
    hosted = host_of(None if is_default else "callbacks.yaml")
    if is_default:
        hosted.manager.add(import_path(f"{module}.Broken")())
    rows = [{"x": torch.tensor([float(number)]), "labels": torch.ones(1)} for number in range(8)]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.layer(x) - labels).square().mean()}

    def trained(callbacks: list[Any]) -> list[torch.Tensor]:
        arguments = TrainingArguments("out", max_steps=3, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True)
        trainer = Trainer(Model(), arguments, train_dataset=rows, callbacks=callbacks)
        trainer.train()
        return list(trainer.model.parameters())

    assert all(torch.equal(one, other) for one, other in zip(trained([hosted]), trained([]), strict=True))
    assert "broken" in caplog.text


@pytest.mark.parametrize(
    ("package", "command", "keeps_states"),
    [("axolotl", axolotl, True), ("swift", swift, True), ("llamafactory", llamafactory, True), ("llamafactory", executed, False)],
)
def test_a_configured_training_stops_and_saves_with_the_same_weights(
    package: str, command: Callable[..., list[str]], keeps_states: bool, tmp_path: Path
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed here")
    from safetensors.torch import load_file

    environment = prepare(tmp_path)
    for output, max_steps in (("hosted", None), ("plain", 4)):
        arguments = command(tmp_path, output, max_steps=max_steps, hosted=output == "hosted")
        ran = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
    ours = load_file(tmp_path / "hosted" / "checkpoint-4" / "model.safetensors")
    written = tmp_path / "plain" / "checkpoint-4"  # ms-swift writes only these weights
    theirs = load_file((written if written.exists() else tmp_path / "plain") / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "hosted" / "checkpoint-2" / STATE).is_dir() is keeps_states  # `callsheet exec` adds nothing to checkpoints
    assert json.loads((tmp_path / "hosted" / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4
    assert not list((tmp_path / "hosted").glob("checkpoint-[56]"))


@pytest.mark.skipif(find_spec("unsloth") is None, reason="unsloth is not installed here")
@pytest.mark.parametrize("what", ["full", "adapter"])
def test_unsloth_trains_as_without_callbacks(what: str, tmp_path: Path) -> None:
    environment = prepare(tmp_path)
    (tmp_path / "train.py").write_text(UNSLOTH)
    arguments = [sys.executable, "train.py", what]
    ran = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert (tmp_path / "hosted" / "checkpoint-2" / STATE).is_dir()
