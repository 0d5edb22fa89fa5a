"""TRL's trainers are Hugging Face Trainers: callsheet's callbacks observe a fine-tuning and a preference tuning, and stop them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from transformers import TrainerCallback

from callsheet.bridges.huggingface import STATE, host
from callsheet.callbacks import EMA, CheckpointSaver, EarlyStopper, History, NaNMonitor, SpeedMonitor
from callsheet.testing import Recorder, check_events

from .built_on import BUILT_ON, STEPS, fine_tuning, preference_tuning


def test_fine_tuning_fires_all_events_and_learns(tmp_path: Path) -> None:
    recorder, history, saver = Recorder(), History(), CheckpointSaver(save_interval="3ba")
    trainer = fine_tuning(tmp_path, [host([recorder, history, saver, SpeedMonitor(), NaNMonitor()])])
    trainer.train()
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == trainer.state.global_step == STEPS
    assert len(history["validation/loss"]) == 3
    assert history["validation/loss"][-1] < history["validation/loss"][0]
    assert history["train/loss"] == pytest.approx([log["loss"] for log in trainer.state.log_history if "loss" in log], abs=1e-4)
    assert history["throughput/samples_per_second"]
    assert (tmp_path / "checkpoint-3" / STATE).is_dir()


def test_a_callback_of_ours_ends_it(tmp_path: Path) -> None:
    trainer = fine_tuning(tmp_path, [host([EarlyStopper(monitor="validation/loss", min_delta=1e9, patience=1)])])
    trainer.train()
    assert trainer.state.global_step == 4


def test_a_preference_tuning(tmp_path: Path) -> None:
    recorder, history = Recorder(), History()
    trainer = preference_tuning(tmp_path, [host([recorder, history])])
    trainer.train()
    check_events(recorder.events)
    assert recorder.events.count("on_train_step_end") == trainer.state.global_step == STEPS
    assert len(history["validation/rewards/margins"]) == 3
    assert history["huggingface/rewards/margins"][-1] > 0


class Counts(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """Records the steps at which the Trainer wrote a checkpoint."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.written.append(state.global_step)


@pytest.mark.parametrize("name", ["SFTTrainer", "DPOTrainer", "GRPOTrainer"])
def test_evaluations_and_saves_at_one_step_change_nothing_and_write_once(name: str, tmp_path: Path) -> None:
    recorder, counts = Recorder(), Counts()
    stopper = EarlyStopper(monitor="validation/loss", patience=9)
    observers = [
        recorder,
        CheckpointSaver(save_interval="2ba", monitor="validation/loss"),
        stopper,
        EMA(half_life=2, at_end=False),
    ]
    ours = BUILT_ON[name].make(tmp_path / "ours", [host(observers), counts], save_strategy="steps", save_steps=2)
    ours.train()
    plain = BUILT_ON[name].make(tmp_path / "plain", [], save_strategy="steps", save_steps=2)
    plain.train()
    one, other = ours.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (ours, plain)]
    assert losses[0] == losses[1]
    check_events(recorder.events)
    assert recorder.events.count("on_eval_all_end") == 3
    assert counts.written == [2, 4, 6]
    assert recorder.events.count("on_checkpoint_published") == 3
