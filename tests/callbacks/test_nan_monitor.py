from __future__ import annotations

import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

from callsheet import Callback, CallbackManager, Context, MetricsRecord, NonFiniteError, RunInfo, Trainer
from callsheet.callbacks import NaNMonitor
from callsheet.core.control import Control
from callsheet.core.events import Event
from callsheet.core.ranks import Ranks


class Losses:
    """A loss function that returns the given values at some steps, and 0.5 at all others."""

    def __init__(self, special: dict[int, float]) -> None:
        self.special = special
        self.step = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return torch.tensor(0.5)
        self.step += 1
        return outputs.sum() * 0 + self.special.get(self.step, 0.5)


class Events(Callback):
    """Records the names of the events, with their steps."""

    def __init__(self) -> None:
        self.recorded: list[tuple[str, int]] = []

    def on_event(self, ctx: Context) -> None:
        self.recorded.append((str(ctx.event), ctx.step))


def fit(folder: Path, special: dict[int, float], *, callbacks: tuple[Callback, ...] = (), **options: Any) -> None:
    data = [(torch.ones(2, 2), torch.ones(2, 1))] * 1000
    with Trainer(
        nn.Linear(2, 1),
        Losses(special),
        data,
        data[:1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        callbacks=[NaNMonitor(), *callbacks],
        runs_folder=folder,
        run_name="run",
        device="cpu",
        **options,
    ) as trainer:
        trainer.fit()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_names_the_first_bad_step_at_the_next_record(tmp_path: Path, bad: float) -> None:
    events = Events()
    with pytest.raises(NonFiniteError, match=rf"the loss was {bad} at step 14 on rank 0"):
        fit(tmp_path, {14: bad, 16: math.nan}, callbacks=(events,), max_duration="30ba", log_interval="10ba")
    assert ("on_train_step_end", 20) in events.recorded
    assert ("on_train_step_start", 21) not in events.recorded


def test_finite_losses_raise_no_error(tmp_path: Path) -> None:
    fit(tmp_path, {}, max_duration="700ba", log_interval="600ba")


def test_counts_steps_beyond_its_buffer(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="at step 513 "):
        fit(tmp_path, {513: math.nan}, max_duration="600ba", log_interval="600ba")


def test_checks_before_an_evaluation(tmp_path: Path) -> None:
    events = Events()
    with pytest.raises(NonFiniteError, match="at step 3 "):
        fit(tmp_path, {3: math.nan}, callbacks=(events,), max_duration="10ba", log_interval="10ba", eval_interval="5ba")
    assert not [event for event, _ in events.recorded if event.startswith("on_eval_s")]


def test_checks_before_a_checkpoint_is_written(tmp_path: Path) -> None:
    class Save(Callback):
        def on_train_step_end(self, ctx: Context) -> None:
            if ctx.step == 5:
                ctx.control.save("asked for")

    with pytest.raises(NonFiniteError, match="at step 3 "):
        fit(tmp_path, {3: math.nan}, callbacks=(Save(),), max_duration="10ba", log_interval="10ba")
    assert not (tmp_path / "run").exists()


def test_checks_the_last_steps_of_a_stopped_run(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_checkpoint_due(self, ctx: Context) -> None:
            if ctx.step == 5:  # after the boundary has decided whether a record is due
                ctx.control.stop("asked for")

    with pytest.raises(NonFiniteError, match="at step 5 "):
        fit(tmp_path, {5: math.nan}, callbacks=(Stop(),), max_duration="10ba", log_interval="10ba")


def test_an_overflow_of_the_sum_is_not_a_bad_loss(tmp_path: Path) -> None:
    monitor, ctx = NaNMonitor(), Context(RunInfo("run"))
    for ctx.step in (1, 2):
        ctx.loss = torch.tensor(60000.0, dtype=torch.float16)
        monitor.on_train_step_end(ctx)
    ctx.record = MetricsRecord(2, {"train/loss": math.inf})
    monitor.on_log(ctx)


def test_no_step_waits_for_the_device() -> None:
    """A meta tensor has no value; reading it would raise an error."""
    monitor, ctx = NaNMonitor(), Context(RunInfo("run"))
    for ctx.step in range(1, 1000):
        ctx.loss = torch.zeros((), device="meta")
        monitor.on_train_step_end(ctx)
    ctx.record = MetricsRecord(999, {"train/loss": 0.0})
    monitor.on_log(ctx)


def two_ranks(rank: int, folder: str, event: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ctx = Context(RunInfo("run", ranks=Ranks(rank=rank, world_size=2)), control=Control())
    manager = CallbackManager([NaNMonitor()])
    manager.open(ctx)
    for ctx.step in (1, 2, 3):
        ctx.loss = torch.tensor(math.nan if (rank, ctx.step) == (1, 2) else 0.5)
        manager.fire("on_train_step_end", ctx)
    ctx.record = MetricsRecord(3, {"train/loss": math.nan})  # the record is reduced over the ranks
    try:
        manager.fire(event, ctx)
    except NonFiniteError as error:
        Path(folder, f"rank{rank}.txt").write_text(str(error))
    torch.distributed.destroy_process_group()


@pytest.mark.test_all
@pytest.mark.parametrize("event", [Event.LOG, pytest.param(Event.CHECKPOINT_SAVE_START, marks=pytest.mark.slow)])
def test_all_ranks_raise_together(tmp_path: Path, event: Event) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=two_ranks, args=(rank, str(tmp_path), str(event))) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    for rank in (0, 1):
        assert "the loss was nan at step 2 on rank 1" in (tmp_path / f"rank{rank}.txt").read_text()
