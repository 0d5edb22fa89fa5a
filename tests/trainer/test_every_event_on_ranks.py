"""Every event on four ranks with FSDP2: handlers receive the same events and replicated fields on every rank."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callsheet import Background, Callback, Context, MetricsRecord, Trainer
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, EVENTS, FIELDS, fields_available
from callsheet.testing import run_ranks

RANKS = 4
NOT_HERE = {"on_preempt", "on_exception"}
REPLICATED = {name for name, field in FIELDS.items() if field.kind in ("replicated", "reduced", "agreed")}


class WritesEvents(Callback):
    """Writes a line for every event on every rank; it has a method for each event."""

    def __init__(self, *, folder: str, name: str) -> None:
        self.folder, self.name = Path(folder), name

    def write(self, ctx: Context) -> None:
        with (self.folder / f"{self.name}-{ctx.run.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"event": ctx.event, "step": ctx.step, "epoch": ctx.epoch}) + "\n")


for _event in EVENTS:  # override each method, as a user's class would
    setattr(WritesEvents, _event, lambda self, ctx: self.write(ctx))


class Checker(Callback):
    """Compares the available fields with the lifecycle's table, and records the values that must be equal on all ranks."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.shared: list[tuple[str, str, Any]] = []

    def on_event(self, ctx: Context) -> None:
        event = str(ctx.event)
        for name in (*ALWAYS_AVAILABLE, *fields_available(event)):
            if not ctx.has(name):
                self.faults.append(f"{name} is not available at {event} on rank {ctx.run.rank}")
            elif name in REPLICATED and name not in ("event", "state", "control", "exception", "model"):
                self.shared.append((event, name, plain(getattr(ctx, name))))
        if event == "on_train_step_end" and not (isinstance(ctx.learning_rate, float) and ctx.learning_rate > 0):
            self.faults.append(f"learning_rate is {ctx.learning_rate!r} on rank {ctx.run.rank}")


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value).hex()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, MetricsRecord):
        return repr(replace(value, memory_bytes=0))  # differs by rank
    return repr(value)


def trained(folder: str) -> tuple[list[str], list[Any]]:
    torch.manual_seed(1)
    inputs = torch.randn(40, 8, generator=torch.Generator().manual_seed(4))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    checker = Checker()
    inline, behind = WritesEvents(folder=folder, name="inline"), WritesEvents(folder=folder, name="behind")
    with Trainer(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        nn.functional.mse_loss,
        lambda: DataLoader(data, batch_size=2, shuffle=True),
        lambda: DataLoader(data, batch_size=3),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        max_duration="2ep",
        eval_interval="4ba",
        log_interval="3ba",
        microbatch_size=1,
        clip_grad_norm=1.0,
        parallel="fsdp",
        run_name="every",
        runs_folder=folder,
        callbacks=[inline, Background(behind), checker],
        seed=2,
    ) as trainer:
        trainer.callbacks.register(
            "on_checkpoint_due", lambda ctx: ctx.control.save("now and then", replicated=True), every="4ba"
        )
        trainer.fit()
        trainer.test(DataLoader(data, batch_size=3))
        trainer.predict(DataLoader(data, batch_size=3))
    return checker.faults, checker.shared


@pytest.mark.test_all
def test_every_event_reaches_every_rank_with_its_fields(tmp_path: Path) -> None:
    ends = run_ranks(trained, RANKS, str(tmp_path), timeout=200)
    assert [faults for faults, _ in ends] == [[]] * RANKS
    first = ends[0][1]
    assert len(first) > 1000
    for rank, (_, shared) in enumerate(ends[1:], 1):
        for here, there in zip(first, shared, strict=True):
            assert here == there, f"rank {rank}"
    received = {
        (name, rank): [json.loads(line) for line in (tmp_path / f"{name}-{rank}.jsonl").read_text().splitlines()]
        for name in ("inline", "behind")
        for rank in range(RANKS)
    }
    counts = [Counter(line["event"] for line in lines) for lines in received.values()]
    assert counts == [counts[0]] * len(counts)
    assert set(counts[0]) == set(EVENTS) - NOT_HERE
    assert all(lines == received["inline", rank] for (_, rank), lines in received.items())


def test_the_check_can_fail(tmp_path: Path) -> None:
    """`Checker` reports a field whose window in the table is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.fields_available", lambda event: ("batch",))
        checker = Checker()
        with Trainer(
            nn.Linear(2, 1),
            nn.functional.mse_loss,
            [(torch.ones(1, 2), torch.ones(1, 1))],
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            max_duration="1ep",
            callbacks=[checker],
            runs_folder=tmp_path,
        ) as trainer:
            trainer.fit()
    assert any("batch is not available at on_train_start" in fault for fault in checker.faults)
