"""Frozen models that a task calls in addition to the model that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import mse_loss

from callsheet.callbacks import CheckpointSaver
from callsheet.testing import run_ranks
from callsheet.trainer import Task, Trainer
from callsheet.trainer.parallel import ParallelKind


class DistanceTask(Task):
    """Trains the model towards the outputs of another one."""

    def __init__(self, leader: nn.Module) -> None:
        self.frozen_models = (leader,)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            leads = self.frozen_models[0](batch)
        return model(batch), leads

    def loss(self, outputs: Any, batch: Any) -> Any:
        return mse_loss(*outputs)


def follow(folder: Path, parallel: ParallelKind) -> tuple[float, list[bool], list[float], bool]:
    torch.manual_seed(0)
    model, leader = (nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5 * i), nn.Linear(8, 2)) for i in range(2))
    leader.train()
    before = [parameter.detach().clone() for parameter in leader.parameters()]
    data = list(torch.randn(8, 4, 4))
    with Trainer(
        model, DistanceTask(leader), data, optimizer=lambda params: torch.optim.Adam(params, lr=0.05), max_duration="20ep", seed=1,
        parallel=parallel, device="cpu", callbacks=[CheckpointSaver(save_interval=None)], runs_folder=folder, run_name="run",
    ) as trainer:  # fmt: skip
        trainer.fit()
        apart = trainer.evaluate(data)["validation"]["loss"]
        sharded = [isinstance(one, FSDPModule) for one in (model, leader)]
        now = [getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)() for parameter in leader.parameters()]
    is_same = all(torch.equal(*pair) for pair in zip(before, now, strict=True)) and not leader.training
    held = sum(parameter.numel() for parameter in leader.parameters() if parameter.requires_grad)
    return apart, sharded, [held], is_same


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
@pytest.mark.slow
def test_frozen_models_keep_their_weights_and_are_sharded_like_the_model(tmp_path: Path, parallel: str) -> None:
    apart, sharded, held, is_same = follow(tmp_path / "one", "single")
    assert apart < 0.01
    assert is_same
    assert (sharded, held) == ([False, False], [0])
    for again, sharded, held, is_same in run_ranks(follow, 2, tmp_path / "two", parallel):
        assert again < 0.01
        assert is_same
        assert (sharded, held) == ([parallel == "fsdp"] * 2, [0])
