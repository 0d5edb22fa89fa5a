"""A run on several ranks that is hard to resume: workers, augmentation, dropout, a scheduler, unequal shares of the data.

`job` is the code of one rank. `undisturbed` runs it without interruption; `survives` kills and restarts it until it ends.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from callsheet import Callback, Context, Trainer
from callsheet.callbacks import CheckpointSaver
from callsheet.checkpoint import find_checkpoints
from callsheet.testing import RankEnd, RankProcesses
from callsheet.trainer import Parallel, SeededDataset
from callsheet.trainer.parallel import ParallelKind

SAMPLES, EPOCHS = 43, 2
GLOBAL_BATCH = 4
STEPS = EPOCHS * -(-SAMPLES // GLOBAL_BATCH)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Fixed samples with noise from all three generators. `pause` slows loading, so that a kill can interrupt it."""

    def __init__(self, noise: float = 0.1, pause: float = 0.0) -> None:
        self.noise = noise
        self.inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(7))
        self.pause = pause

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.pause)
        noise = torch.randn(6) + random.random() + float(numpy.random.rand())
        return self.inputs[index] + self.noise * noise, self.inputs[index].sum(0, keepdim=True)


class RecordsLosses(Callback):
    """Records every step's loss on this rank and every metrics record, without rounding."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.records: list[list[Any]] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.losses.append(float(ctx.loss).hex())

    def on_log(self, ctx: Context) -> None:
        values = {name: value.hex() for name, value in ctx.record.values.items() if not name.endswith("per_second")}
        self.records.append([ctx.record.step, values])

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "records": list(self.records)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses, self.records = list(state["losses"]), list(state["records"])


@dataclass(frozen=True)
class Setting:
    """The configuration of a run."""

    parallel: ParallelKind = "single"
    world_size: int = 1
    shard_size: int | None = None
    workers: int = 0
    in_background: bool = False
    loader: str = "plain"
    pause: float = 0.0
    noise: float = 0.1

    def __str__(self) -> str:
        name = f"{self.parallel}, {self.world_size} {'rank' if self.world_size == 1 else 'ranks'}"
        return f"{name}, {self.workers} workers, {'saved in the background' if self.in_background else 'saved inline'}"


@dataclass(frozen=True)
class Death:
    """How a job is killed.

    `rank` (None: all ranks) receives `signal` after `after` seconds, or SIGKILL when it opens shard number `in_save` for writing.
    """

    rank: int | None = None
    signal: int = signal.SIGKILL
    after: float | None = None
    in_save: int | None = None


class DiesInSave:
    """An audit hook that kills this process when any thread opens the nth shard for writing."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and "shard-" in str(arguments[0]) and "w" in str(arguments[1] or "") + _flags(arguments[2]):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _flags(flags: Any) -> str:
    return "w" if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) else ""


def job(folder: str, setting: Setting, death: Death, seed: int) -> dict[str, Any]:
    """Run one rank. `seed` differs in every launch, so results are equal only if all random states are restored."""
    rank = int(os.environ["RANK"])
    if death.in_save is not None and death.rank in (None, rank):
        sys.addaudithook(DiesInSave(death.in_save))
    if death.after is not None and death.rank in (None, rank):
        threading.Timer(death.after, os.kill, (os.getpid(), death.signal)).start()
    is_new = not find_checkpoints(Path(folder) / "run" / "checkpoints").checkpoints
    torch.manual_seed(0 if is_new else seed)
    random.seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 16),
        nn.ReLU(),
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2 if setting.noise else 0.0), nn.ReLU()),
        nn.Linear(16, 1),
    )
    data: Dataset[Any] = Augmented(setting.noise, setting.pause)
    options: dict[str, Any] = {
        "batch_size": GLOBAL_BATCH // setting.world_size,
        "shuffle": True,
        "num_workers": setting.workers,
    }
    plain = partial(DataLoader, data, **options)
    stateful = partial(StatefulDataLoader, SeededDataset(data, 3), **options)
    curve = RecordsLosses()
    with Trainer(
        model,
        nn.functional.mse_loss,
        stateful if setting.loader == "stateful" else plain,
        DataLoader(Augmented(setting.noise), batch_size=2, shuffle=True),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 9)),
        max_duration=f"{EPOCHS}ep",
        clip_grad_norm=1.0,
        eval_interval="7ba",
        log_interval="3ba",
        parallel=Parallel(setting.parallel, shard_size=setting.shard_size),
        callbacks=[curve, CheckpointSaver(save_interval="2ba", keep=3)],
        save_in_background=setting.in_background,
        run_name="run",
        runs_folder=folder,
        resume="auto",
        seed=5 if is_new else seed,
        timeout_seconds=20,
        grace_seconds=15,
    ) as trainer:
        trainer.fit()
        outcome = str(trainer.run.outcome) if trainer.run.outcome is not None else "finished"
    if trainer.preempted:
        return {"outcome": "preempted"}
    weights = {name: _whole(tensor) for name, tensor in trainer.model.state_dict().items()} if setting.parallel != "fsdp" else {}
    return {"outcome": outcome, "losses": curve.losses, "records": curve.records, "weights": weights}


def _whole(tensor: Tensor) -> list[str]:
    return [value.hex() for value in tensor.flatten().tolist()]


def launch_once(folder: Path, setting: Setting, death: Death, seed: int, timeout: float = 90.0) -> list[RankEnd]:
    """Launch the job once and return how each rank ended."""
    with RankProcesses(job, setting.world_size, str(folder), setting, death, seed) as ranks:
        return ranks.wait(timeout)


def undisturbed(folder: Path, setting: Setting) -> list[Any]:
    """Return every rank's result of an uninterrupted run."""
    ends = launch_once(folder, setting, Death(), seed=5)
    assert not any(end.error for end in ends), "\n".join(end.error for end in ends)
    return [end.value for end in ends]


@dataclass
class Survival:
    """The result of a job that was killed and restarted: every rank's result, and the number of deaths."""

    values: list[Any]
    deaths: int


def survives(folder: Path, setting: Setting, deaths: list[Death], *, between: Callable[[Path], None] | None = None) -> Survival:
    """Start the job once for each death, then start it once more and let it finish."""
    died = 0
    for number, death in enumerate(deaths):
        ends = launch_once(folder, setting, death, seed=100 + number)
        if all(end.value is not None and end.value["outcome"] != "preempted" for end in ends):
            return Survival([end.value for end in ends], died)
        died += 1
        if between is not None:
            between(folder / "run" / "checkpoints")
    ends = launch_once(folder, setting, Death(), seed=200)
    assert not any(end.error for end in ends), "\n".join(end.error for end in ends)
    return Survival([end.value for end in ends], died)


def flip_a_bit(checkpoints: Path) -> None:
    """Damage one file of the newest sealed checkpoint."""
    sealed = sorted(checkpoints.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)
    if len(sealed) > 1:
        victim = random.choice(sorted(path for path in sealed[-1].parent.iterdir() if path.name != "checkpoint.txt"))
        content = bytearray(victim.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        victim.write_bytes(content)
