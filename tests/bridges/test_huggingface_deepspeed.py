"""The Hugging Face host under DeepSpeed, whose engine steps the optimizer within `accelerator.backward`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from torch import Tensor
from transformers import TrainerCallback

from callsheet import Callback, Context
from callsheet.bridges.huggingface import host
from callsheet.callbacks import EMA, History
from callsheet.errors import NotSupported
from callsheet.testing import Recorder, check_events

from .test_huggingface import trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # accelerate wraps the optimizer

ROOT = Path(__file__).parents[2]


class Engine:
    """Implements the parts of DeepSpeed's engine that accelerate uses, with a torch optimizer."""

    def __init__(self, optimizer: Any, scheduler: Any, *, stage: int = 1, is_fp16: bool = False) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self._stage, self._is_fp16 = stage, is_fp16

    def fp16_enabled(self) -> bool:
        return self._is_fp16

    def zero_optimization_stage(self) -> int:
        return self._stage

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def backward(self, loss: Tensor, **_: Any) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


class UsesEngine(TrainerCallback):  # type: ignore[misc]  # transformers' types are not read
    """Gives the Trainer accelerate's objects for DeepSpeed, around an `Engine`, when training begins."""

    trainer: Any

    def __init__(self, **engine: Any) -> None:
        self.engine = engine

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        of = self.trainer
        optimizer, scheduler = of.optimizer.optimizer, of.lr_scheduler
        wrapped = DeepSpeedEngineWrapper(Engine(optimizer, scheduler, **self.engine))
        of.accelerator.deepspeed_engine_wrapped = wrapped
        # Accelerate does the same if its distributed type is DEEPSPEED, which would also need a process group.
        of.accelerator.backward = lambda loss: wrapped.backward(loss, sync_gradients=of.accelerator.sync_gradients)
        of.optimizer = DeepSpeedOptimizerWrapper(optimizer)
        of.lr_scheduler = DeepSpeedSchedulerWrapper(scheduler, of.optimizer)


def with_engine(folder: Path, callbacks: list[Any], **engine: Any) -> Any:
    uses = UsesEngine(**engine)
    uses.trainer = made = trainer(folder, [uses, *callbacks], gradient_accumulation_steps=2, max_grad_norm=0.0, logging_steps=1)
    return made


class StepStarts(Callback):
    """Records whether the weights are unchanged when the optimizer's step starts, and changed when it ends."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.found: list[tuple[bool, bool]] = []

    def on_train_step_start(self, ctx: Context) -> None:
        self.before = [value.clone() for value in ctx.model.state_dict().values()]

    def on_optimizer_step_start(self, ctx: Context) -> None:
        self.is_same = self._is_same(ctx)

    def on_optimizer_step_end(self, ctx: Context) -> None:
        self.found.append((self.is_same, self._is_same(ctx)))

    def _is_same(self, ctx: Context) -> bool:
        return all(torch.equal(one, other) for one, other in zip(self.before, ctx.model.state_dict().values(), strict=True))


@pytest.mark.parametrize("listens", [True, False])
def test_the_optimizer_s_step_starts_before_the_engine_steps(listens: bool, tmp_path: Path) -> None:
    """The recorded learning rate is that of the step, although the scheduler has stepped when the Trainer reports the step."""
    histories, starts, recorder = [History(), History()], StepStarts(), Recorder()
    ours = with_engine(tmp_path / "ours", [host([histories[0], *([starts, recorder] if listens else [])])])
    ours.train()
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "logging_steps": 1}
    plain = trainer(tmp_path / "plain", [host([histories[1]])], **options)
    plain.train()
    assert all(torch.equal(a, b) for a, b in zip(weights(ours), weights(plain), strict=True))
    assert histories[0]["train/learning_rate"] == histories[1]["train/learning_rate"]
    assert histories[0]["train/loss"] == histories[1]["train/loss"]
    if listens:
        check_events(recorder.events)
        assert starts.found == [(True, False)] * 6


def test_fp16_and_callbacks_that_need_whole_weights_under_zero_3_are_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(NotSupported, match="DeepSpeed scales the loss of an fp16 training"):
        with_engine(tmp_path, [host([History()])], is_fp16=True).train()
    with pytest.raises(NotSupported, match="DeepSpeed ZeRO stage 3 leaves the model without whole weights"):
        with_engine(tmp_path, [host([EMA()])], stage=3).train()
    history = History()
    with_engine(tmp_path, [host([history], strict=False)], stage=3).train()
    assert "DeepSpeed ZeRO stage 3" in caplog.text
    assert len(history["train/loss"]) == 6


REAL = """
import sys
from pathlib import Path
import torch
from callsheet.bridges.huggingface import host
from callsheet.callbacks import EMA, CheckpointSaver, History
from callsheet.testing import Recorder, check_events
from tests.bridges.built_on import adapter_tuning
from tests.bridges.test_huggingface_deepspeed import StepStarts

config = {
    "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}
folder, found = Path(sys.argv[1]), {}
for name in ("ours", "plain"):
    recorder, starts, history = Recorder(), StepStarts(), History()
    saver = CheckpointSaver(save_interval="3ba", keep=None)
    callbacks = [host([recorder, starts, history, saver, EMA(half_life=2, at_end=False)])] if name == "ours" else []
    trainer = adapter_tuning(folder / name, callbacks, deepspeed=config, use_cpu=False)  # with use_cpu, DeepSpeed is not used
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine", type(trainer.model_wrapped)
    found[name] = [tensor.detach().clone() for tensor in trainer.model.state_dict().values()]
    if name == "ours":
        check_events(recorder.events)
        assert starts.found == [(True, False)] * 6, starts.found
        assert len(set(history["train/learning_rate"])) == 6, history["train/learning_rate"]
        assert history["train/learning_rate"][0] == 0.01, history["train/learning_rate"]
        assert (folder / name / "checkpoint-3" / "callsheet").is_dir()
assert all(torch.equal(a, b) for a, b in zip(found["ours"], found["plain"], strict=True))
"""


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed here")
def test_real_deepspeed_trains_as_without_callbacks(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "RANK": "0",
        "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29587",
    }  # fmt: skip
    arguments = [sys.executable, "-c", REAL, str(tmp_path)]
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr[-3000:]
