"""Fields that a callback writes take effect, also with microbatches, accumulation and several ranks."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Callback, Context, Trainer
from callsheet.testing.ranks import run_ranks
from callsheet.trainer import Parallel
from callsheet.trainer.parallel import ParallelKind

pytestmark = pytest.mark.test_all


LR, WEIGHT = 0.1, 0.5
WRITTEN = ("nothing", "batch", "microbatch", "outputs", "loss", "halved")


class Changes(Callback):
    """Changes a field so that the loss (w x)^2 is four times as large. `halved` leaves the mean over equal samples unchanged."""

    phase = "change"

    def __init__(self, what: str) -> None:
        self.what = what

    def on_event(self, ctx: Context) -> None:
        match self.what, str(ctx.event):
            case "batch", "on_fetch_end" if ctx.batch is not None:
                ctx.batch = (ctx.batch[0] * 2, ctx.batch[1])
            case "halved", "on_fetch_end" if ctx.batch is not None:
                ctx.batch = tuple(part[: -(-len(part) // 2)] for part in ctx.batch)
            case "microbatch", "on_microbatch_start":
                ctx.microbatch = (ctx.microbatch[0] * 2, ctx.microbatch[1])
            case "outputs", "on_forward_end":
                ctx.outputs = ctx.outputs * 2
            case "loss", "on_loss_end":
                ctx.loss = ctx.loss * 4


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, ctx: Context) -> None:
        self.losses.append(ctx.record.values["train/loss"])


def data(kind: str) -> Any:
    """Return 6 samples of 1 with target 0, in batches of 2: on two ranks, this is a step of 4 and one of 2."""
    inputs: Tensor = torch.ones(6, 1)
    loader = DataLoader(TensorDataset(inputs, torch.zeros(6, 1)), batch_size=2)
    return loader if kind == "samples" else list(loader)


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "microbatches": {"microbatch_size": 1},
    "accumulated": {"gradient_accumulation_steps": 2},
    "both": {"gradient_accumulation_steps": 2, "microbatch_size": 1},
}


def train(what: str, kind: str, parallel: ParallelKind) -> dict[str, tuple[float, list[float]]]:
    """Return the weight after one step and the reported loss, for each entry of `WAYS`."""
    found = {}
    for name, parts in WAYS.items():
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, WEIGHT)
        losses = Losses()
        with Trainer(
            model,
            mse_loss,
            data(kind),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LR),
            callbacks=[Changes(what), losses],
            log_interval="1ba",
            parallel=Parallel(parallel),
            timeout_seconds=20,
            **parts,
        ) as trainer:
            trainer.fit("1ba")
            weight: Any = model.weight.detach()
            found[name] = ((weight.full_tensor() if parallel == "fsdp" else weight).item(), losses.losses)
    return found


def train_all(kind: str, parallel: ParallelKind) -> dict[str, Any]:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    return {what: train(what, kind, parallel) for what in WRITTEN}


@functools.cache
def trained_on_ranks(kind: str, parallel: ParallelKind) -> list[dict[str, Any]]:
    return run_ranks(train_all, 2, kind, parallel)


@pytest.mark.parametrize("what", WRITTEN)
@pytest.mark.parametrize(("parallel", "kind"), [("single", "list"), ("ddp", "samples"), ("ddp", "list"), ("fsdp", "samples")])
def test_written_fields_take_effect(what: str, parallel: ParallelKind, kind: str) -> None:
    factor = 1 if what in ("nothing", "halved") else 4
    expected = (pytest.approx(WEIGHT - LR * factor * 2 * WEIGHT), [pytest.approx(factor * WEIGHT**2)])
    ranks = [{what: train(what, kind, parallel)}] if parallel == "single" else trained_on_ranks(kind, parallel)
    for found in ranks:
        assert found[what] == dict.fromkeys(WAYS, expected)
