"""Trainer on CUDA: synchronizations happen only at log boundaries, resume is exact, ranks use NCCL. Run by `make test-gpu`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver, LRMonitor, NaNMonitor, SpeedMonitor
from callsheet.errors import MissingPackage
from callsheet.loggers import JSONLLogger
from callsheet.testing import Subject, run_ranks
from callsheet.trainer.parallel import ParallelKind

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LOG_EVERY, STEPS = 10, 40


class CountsWaits(Callback):
    """Lets torch warn about every synchronization with the device, and records the warnings by step."""

    def __init__(self) -> None:
        self.waits: dict[int, list[str]] = {}
        self._catching: Any = None
        self._caught: list[warnings.WarningMessage] = []

    def on_fetch_start(self, ctx: Context) -> None:
        self._note(ctx.step)
        self._catching = warnings.catch_warnings(record=True)
        self._caught = self._catching.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def on_train_end(self, ctx: Context) -> None:
        self._note(ctx.step)

    def _note(self, step: int) -> None:
        torch.cuda.set_sync_debug_mode("default")
        if self._catching is not None:
            found = [str(warning.message) for warning in self._caught if "synchroniz" in str(warning.message)]
            self.waits.setdefault(step, []).extend(found)  # several batches may be fetched for one step
            self._catching.__exit__(None, None, None)
            self._catching = None


def parts(device: str = "cuda") -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))
    return model, [(torch.randn(32, 64, device=device), torch.randn(32, 8, device=device)) for _ in range(STEPS)]


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"gradient_accumulation_steps": 2}, {"microbatch_size": 8}, {"clip_grad_norm": 1.0}]
)
def test_nothing_waits_for_the_device_off_log_boundaries(options: dict[str, Any]) -> None:
    model, data = parts()
    counts = CountsWaits()
    watching: list[Callback] = [SpeedMonitor(), LRMonitor(), NaNMonitor()]
    with Trainer(
        model,
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        log_interval=f"{LOG_EVERY}ba",
        callbacks=[*watching, counts],
        **options,
    ) as trainer:
        trainer.fit()
    off = {
        step: recorded for step, recorded in counts.waits.items() if step > 1 and step % LOG_EVERY and step < max(counts.waits)
    }
    assert off
    assert {step: recorded for step, recorded in off.items() if recorded} == {}
    assert any(counts.waits.values())  # the counter records those at the boundaries


WAITS = ("Generate",)
"""Those whose purpose takes a wait off log boundaries: it writes what it has drawn when its interval is over."""


def test_no_observing_built_in_waits_for_the_device_off_log_boundaries(
    built_in: str, subjects: Mapping[str, Subject], tmp_path: Path
) -> None:
    try:
        watching = subjects[built_in].make()
    except MissingPackage as missing:
        pytest.skip(str(missing))
    if built_in in WAITS or watching.phase not in ("measure", "report"):
        pytest.skip("it does more than watch")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 2, 1))
    data = [(torch.rand(8, 3, 16, 16, device="cuda"), torch.randint(2, (8, 16, 16), device="cuda")) for _ in range(STEPS)]
    counts = CountsWaits()
    with Trainer(
        model,
        nn.functional.cross_entropy,
        data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        log_interval=f"{LOG_EVERY}ba",
        callbacks=[watching, counts],
        runs_folder=tmp_path,
        run_name="watched",
    ) as trainer:
        trainer.fit()
    off = {
        step: recorded for step, recorded in counts.waits.items() if step > 1 and step % LOG_EVERY and step < max(counts.waits)
    }
    assert len(off) > STEPS / 2
    assert {step: recorded for step, recorded in off.items() if recorded} == {}


def curve(folder: Path, resume: str | None, until: str) -> list[str]:
    model, data = parts()
    losses: list[str] = []
    with Trainer(
        model,
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        max_duration=until,
        callbacks=[CheckpointSaver(save_interval="7ba", keep=9), JSONLLogger()],
        log_interval=f"{LOG_EVERY}ba",
        save_in_background=True,
        run_name="run",
        runs_folder=folder,
        resume=resume,
        seed=3,
    ) as trainer:
        trainer.callbacks.register("on_train_step_end", lambda ctx: losses.append(float(ctx.loss).hex()))
        trainer.fit()
    return losses


def recorded(folder: Path) -> dict[int, str]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return {each["step"]: each["values"]["train/loss"].hex() for each in map(json.loads, lines) if "values" in each}


def test_a_resumed_run_has_the_same_losses(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    straight = curve(tmp_path / "straight", None, "30ba")
    first = curve(tmp_path / "broken", None, "17ba")
    second = curve(tmp_path / "broken", "auto", "30ba")
    assert first + second == straight


def test_a_run_resumed_between_two_records_has_the_same_records(tmp_path: Path) -> None:
    """The first losses of the next record are loaded from the checkpoint into host memory, and the others are on the device."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    curve(tmp_path / "straight", None, "30ba")
    between = tmp_path / "straight" / "run" / "checkpoints" / "ep0-ba14"
    curve(tmp_path / "resumed", str(between), "30ba")
    expected = {step: loss for step, loss in recorded(tmp_path / "straight").items() if step > 14}
    assert recorded(tmp_path / "resumed") == expected
    assert expected.keys() == {20, 30}


def test_an_out_of_memory_error_lists_remedies() -> None:
    class Greedy(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            torch.empty(2**50, device="cuda")
            return super().forward(inputs)

    data = [(torch.ones(2, 3), torch.ones(2, 1))]
    trainer = Trainer(Greedy(3, 1), nn.functional.mse_loss, data, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit()
    assert any("allocated now" in note and "precision='bf16'" in note for note in caught.value.__notes__)


def over_nccl(kind: ParallelKind) -> list[str]:
    model, data = parts("cpu")
    losses: list[str] = []
    with Trainer(
        model, nn.functional.mse_loss, data, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), parallel=kind, seed=1
    ) as trainer:
        trainer.callbacks.register("on_log", lambda ctx: losses.append(ctx.record.values["train/loss"].hex()))
        trainer.fit()
    return losses


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_train_over_nccl(kind: str) -> None:
    first, second = run_ranks(over_nccl, 2, kind)
    assert first == second
    assert first


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_single_rank_trains_over_nccl(kind: str) -> None:
    assert all(run_ranks(over_nccl, 1, kind))


class RecordsWeights(Callback):
    """Records the model's weights when each checkpoint is saved."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_checkpoint_save_start(self, ctx: Context) -> None:
        self.weights[ctx.step] = {name: tensor.clone() for name, tensor in ctx.model.state_dict().items()}


def test_a_checkpoint_written_in_the_background_has_the_weights_of_its_step(tmp_path: Path) -> None:
    """The copy from the device overlaps the next steps, which change the weights."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))
    data = [(torch.randn(64, 2048, device="cuda"), torch.randn(64, 2048, device="cuda")) for _ in range(20)]
    weighs = RecordsWeights()
    with Trainer(
        model,
        nn.functional.mse_loss,
        data,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        callbacks=[CheckpointSaver(save_interval="5ba", keep=10), weighs],
        save_in_background=True,
        run_name="run",
        runs_folder=tmp_path,
    ) as trainer:
        trainer.fit()
    assert len(weighs.weights) >= 4
    for step, expected in weighs.weights.items():
        found = load_file(tmp_path / "run" / "checkpoints" / f"ep0-ba{step}" / "shard-00000.safetensors")
        assert all(torch.equal(found[f"state.model.{name}"], tensor.cpu()) for name, tensor in expected.items()), step
