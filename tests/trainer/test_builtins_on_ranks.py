"""All built-ins on two ranks: they change nothing, write once, and do the same on all ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Context, NonFiniteError, Trainer
from callsheet.callbacks import CheckpointSaver, LRMonitor, NaNMonitor, SpeedMonitor
from callsheet.checkpoint import find_checkpoints
from callsheet.loggers import JSONLLogger, ProgressBarLogger, read_metrics
from callsheet.testing import Recorder, check_events, run_ranks
from callsheet.trainer.parallel import ParallelKind


def trained(folder: str, parallel: ParallelKind, watched: bool, poison: int = 0) -> dict[str, Any]:
    torch.manual_seed(1)
    inputs = torch.randn(23, 3, generator=torch.Generator().manual_seed(4))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    recorder = Recorder()
    callbacks: list[Callback] = [recorder]
    if watched:
        saver = CheckpointSaver(save_interval="2ba", keep=1, monitor="validation/loss")
        callbacks += [SpeedMonitor(), LRMonitor(), NaNMonitor(), saver, ProgressBarLogger(), JSONLLogger()]
    if poison:
        callbacks.append(Poison(poison))
    records: list[Any] = []
    with Trainer(
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1)),
        nn.functional.mse_loss,
        lambda: DataLoader(data, batch_size=2, shuffle=True),
        lambda: DataLoader(data, batch_size=3),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        max_duration="2ep",
        log_interval="3ba",
        parallel=parallel,
        run_name=f"{parallel}-{watched}",
        runs_folder=folder,
        callbacks=callbacks,
        save_in_background=True,
        seed=2,
    ) as trainer:
        trainer.callbacks.register(
            "on_log",
            lambda ctx: records.append(
                (ctx.record.step, ctx.record.values["train/loss"].hex() if "train/loss" in ctx.record.values else "")
            ),
        )
        trainer.fit()
        weights = [
            [x.hex() for x in tensor.full_tensor().flatten().tolist()] if parallel == "fsdp" else tensor.tolist()
            for tensor in trainer.model.state_dict().values()
        ]
    check_events(recorder.events)
    return {"weights": weights, "records": records}


class Poison(Callback):
    """Makes the loss of one rank infinite at one step."""

    phase = "change"

    def __init__(self, step: int) -> None:
        self.step = step

    def on_loss_end(self, ctx: Context) -> None:
        if ctx.step == self.step and ctx.run.rank == 1:
            ctx.loss = ctx.loss + float("inf")


@pytest.mark.test_all
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_built_ins_change_nothing_and_write_each_record_once(parallel: str, tmp_path: Path) -> None:
    plain = run_ranks(trained, 2, str(tmp_path), parallel, False)
    watched = run_ranks(trained, 2, str(tmp_path), parallel, True)
    assert watched == plain
    assert plain[0] == plain[1]
    folder = tmp_path / f"{parallel}-True"
    written = [
        (record.step, record.values["train/loss"].hex()) for record in read_metrics(folder) if "train/loss" in record.values
    ]
    assert written == [(step, loss) for step, loss in plain[0]["records"] if loss]  # each record is written once
    assert len(find_checkpoints(folder / "checkpoints").checkpoints) in (1, 2)  # the newest, and the best if it is another one


def poisoned(folder: str) -> str:
    logging.disable(logging.CRITICAL)
    try:
        trained(folder, "ddp", True, poison=4)
    except NonFiniteError as error:
        return str(error)
    return f"rank {os.environ['RANK']} saw nothing"


def test_an_infinite_loss_on_one_rank_is_detected_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(poisoned, 2, str(tmp_path))
    assert first == second
    assert "at step 4 on rank 1" in first
