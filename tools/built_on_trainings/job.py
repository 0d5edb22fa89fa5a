"""What the scripts of the trainings share: their options, the callbacks, and how they write their own results.

callsheet is imported only if the script is called with callbacks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OUT = Path("out")
"""The folder of the script's results."""

_parser = argparse.ArgumentParser()
_parser.add_argument("--callbacks", help="a YAML file that lists callsheet's callbacks")
_parser.add_argument("--save_strategy", default="steps", help="`steps` (every two) or `no`")
_parser.add_argument("--stage", type=int, default=1, help="the stage of DeepSpeed's ZeRO")
_parser.add_argument("--fp16", action="store_true")
_parser.add_argument("--adapter", action="store_true", help="train a LoRA adapter instead of the whole model")
options = _parser.parse_args()

TRAINING: dict[str, Any] = {
    "output_dir": str(OUT), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1,
    "learning_rate": 0.01, "lr_scheduler_type": "constant", "logging_steps": 1, "save_steps": 2, "seed": 3, "report_to": [],
    "disable_tqdm": True, "bf16": False, "fp16": options.fp16, "save_strategy": options.save_strategy,
}  # fmt: skip
"""The training arguments of transformers."""


def callbacks() -> list[Any]:
    """Return the callbacks that the file lists."""
    from callsheet.exec.log_pace import LogPace
    from callsheet.exec.observers import observers_of

    return observers_of(options.callbacks)(LogPace(1))


def hosts() -> list[Any]:
    """Return callsheet's host for the Hugging Face Trainer, in a list that is empty without callbacks."""
    if not options.callbacks:
        return []
    from callsheet.bridges.huggingface import host

    return [host(callbacks())]


def write(losses: Sequence[float], model: Any) -> None:
    """Write the loss of each step and the final weights to the files that the Hugging Face Trainer would write."""
    from safetensors.torch import save_file

    OUT.mkdir(exist_ok=True)
    state = {"global_step": len(losses), "log_history": [{"loss": loss} for loss in losses]}
    (OUT / "trainer_state.json").write_text(json.dumps(state))
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, OUT / "model.safetensors")
