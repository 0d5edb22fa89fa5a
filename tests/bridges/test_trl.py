"""TRL's trainers are Hugging Face Trainers: callsheet's callbacks observe a fine-tuning and a preference tuning, and stop them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from callsheet import Callback
from callsheet.bridges.huggingface import STATE, host
from callsheet.callbacks import EMA, CheckpointSaver, EarlyStopper, History, NaNMonitor, SpeedMonitor
from callsheet.recipes.models.byte_tokenizer import byte_tokenizer
from callsheet.testing import Recorder, check_events

ROWS = 12


def made() -> tuple[Any, PreTrainedTokenizerFast]:
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokenizer


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "run"), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "num_train_epochs": 1,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "bf16": False, "max_length": 64, "learning_rate": 1e-2, "activation_checkpointing": False, **more,
    }  # fmt: skip


def fine_tuned(folder: Path, callbacks: list[Callback], **more: Any) -> SFTTrainer:
    model, tokenizer = made()
    data = Dataset.from_list([{"prompt": f"{i} and {i} is", "completion": f" {2 * i}"} for i in range(ROWS)])
    trainer = SFTTrainer(
        model, SFTConfig(**options(folder, **more)), train_dataset=data, eval_dataset=data.select(range(4)), processing_class=tokenizer,
        callbacks=[host(callbacks)],
    )  # fmt: skip
    trainer.train()
    return trainer


def test_a_fine_tuning_fires_the_whole_lifecycle_and_learns(tmp_path: Path) -> None:
    recorder, history, saver = Recorder(), History(), CheckpointSaver(save_interval="3ba")
    trainer = fine_tuned(tmp_path, [recorder, history, saver, SpeedMonitor(), NaNMonitor()])
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == trainer.state.global_step == ROWS // 2
    assert len(history["validation/loss"]) == 3
    assert history["validation/loss"][-1] < history["validation/loss"][0]
    assert history["train/loss"] == pytest.approx([log["loss"] for log in trainer.state.log_history if "loss" in log], abs=1e-4)
    assert history["throughput/samples_per_second"]
    assert (tmp_path / "run" / "checkpoint-3" / STATE).is_dir()


def test_a_callback_of_ours_ends_it(tmp_path: Path) -> None:
    stopper = EarlyStopper(monitor="validation/loss", min_delta=1e9, patience=1)
    assert fine_tuned(tmp_path, [stopper]).state.global_step == 4


def test_a_preference_tuning(tmp_path: Path) -> None:
    model, tokenizer = made()
    rows = [{"prompt": f"{i} is", "chosen": " even" if i % 2 == 0 else " odd", "rejected": " blue"} for i in range(ROWS)]
    data = Dataset.from_list(rows)
    recorder, history = Recorder(), History()
    trainer = DPOTrainer(
        model, made()[0], DPOConfig(**options(tmp_path)), train_dataset=data, eval_dataset=data.select(range(4)), processing_class=tokenizer,
        callbacks=[host([recorder, history])],
    )  # fmt: skip
    trainer.train()
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == trainer.state.global_step == ROWS // 2
    assert len(history["validation/rewards/margins"]) == 3
    assert history["huggingface/rewards/margins"][-1] > 0


class Counts(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """Notes at which steps the Trainer has written a checkpoint."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.written.append(state.global_step)


def supervised(folder: Path, callbacks: list[Any], **more: Any) -> Any:
    model, tokenizer = made()
    data = Dataset.from_list([{"prompt": f"{i} and {i} is", "completion": f" {2 * i}"} for i in range(ROWS)])
    return SFTTrainer(
        model, SFTConfig(**options(folder, **more)), train_dataset=data, eval_dataset=data.select(range(4)), processing_class=tokenizer,
        callbacks=callbacks,
    )  # fmt: skip


def preferred(folder: Path, callbacks: list[Any], **more: Any) -> Any:
    model, tokenizer = made()
    data = Dataset.from_list([{"prompt": f"{i} is", "chosen": " odd", "rejected": " blue"} for i in range(ROWS)])
    return DPOTrainer(
        model, made()[0], DPOConfig(**options(folder, **more)), train_dataset=data, eval_dataset=data.select(range(4)),
        processing_class=tokenizer, callbacks=callbacks,
    )  # fmt: skip


def rewarded(folder: Path, callbacks: list[Any], **more: Any) -> Any:
    model, tokenizer = made()
    data = Dataset.from_list([{"prompt": f"{i} is"} for i in range(ROWS)])
    given = options(folder, **more) | {
        "num_generations": 2,
        "num_generations_eval": 2,
        "max_completion_length": 4,
        "max_steps": 6,
    }
    del given["max_length"]

    def is_long(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    return GRPOTrainer(
        model, is_long, GRPOConfig(**given), train_dataset=data, eval_dataset=data.select(range(4)), processing_class=tokenizer,
        callbacks=callbacks,
    )  # fmt: skip


@pytest.mark.parametrize("tuned", [supervised, preferred, rewarded])
def test_evaluations_and_saves_at_one_step_change_nothing_and_write_once(tuned: Any, tmp_path: Path) -> None:
    recorder, counts = Recorder(), Counts()
    stopper = EarlyStopper(monitor="validation/loss", patience=9)
    observers = [
        recorder,
        CheckpointSaver(save_interval="2ba", monitor="validation/loss"),
        stopper,
        EMA(half_life=2, at_end=False),
    ]
    ours = tuned(tmp_path / "ours", [host(observers), counts], save_strategy="steps", save_steps=2)
    ours.train()
    plain = tuned(tmp_path / "plain", [], save_strategy="steps", save_steps=2)
    plain.train()
    one, other = ours.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (ours, plain)]
    assert losses[0] == losses[1]
    check_events(recorder.events)
    assert recorder.events.count("on_eval_all_end") == 3
    assert counts.written == [2, 4, 6]
    assert recorder.events.count("on_checkpoint_published") == 3
