"""A small run that is hard to resume: shuffling, augmentation, dropout, a scheduler, optimizer moments, clipping, rounds.

It is also a script for tests that kill it: `python small_run.py <folder> <report> [--until-sigterm STEP] [--loader KIND]`.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from callsheet import Callback, Context, Trainer
from callsheet.checkpoint import find_checkpoints

LOADERS = ("dataloader", "stateful", "list", "stream")
SAMPLES, BATCH_SIZE, STEPS_PER_EPOCH = 11, 4, 3
EPOCHS, STEPS = 4, 12


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Fixed samples with noise from Python's, NumPy's and torch's generators."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[index]
        noise = torch.randn(3) + random.random() + float(numpy.random.rand())
        return inputs + 0.1 * noise, inputs.sum(0, keepdim=True)


class Stream:
    """Yields the noisy data in random order; it has no length and no state dict."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = Noisy()
        order = random.sample(range(SAMPLES), SAMPLES)
        for start in range(0, SAMPLES, BATCH_SIZE):
            inputs, targets = zip(*(data[i] for i in order[start : start + BATCH_SIZE]), strict=True)
            yield torch.stack(inputs), torch.stack(targets)


def made_loader(kind: str) -> Any:
    if kind == "dataloader":
        return DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True)
    if kind == "workers":
        return DataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True)
    if kind == "stateful":
        return StatefulDataLoader(Noisy(), batch_size=BATCH_SIZE, shuffle=True)
    if kind == "list":
        whole = Noisy().inputs
        return [(part, part.sum(1, keepdim=True)) for part in torch.split(whole, BATCH_SIZE)]
    return Stream()


class History(Callback):
    """Records every step's loss and every metrics record, without rounding. Its state dict keeps them for a resumed run."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.records: list[list[Any]] = []

    def on_train_step_end(self, ctx: Context) -> None:
        self.losses.append(float(ctx.loss).hex())

    def on_log(self, ctx: Context) -> None:
        self.records.append([ctx.record.step, {name: value.hex() for name, value in ctx.record.values.items()}])

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "records": list(self.records)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses, self.records = list(state["losses"]), list(state["records"])


class SavesAt(Callback):
    """Requests a checkpoint at every boundary of the given kinds, and a stop too if `stops`."""

    phase = "save"

    def __init__(self, *boundaries: str, stops: bool = False) -> None:
        self.boundaries = boundaries
        self.stops = stops

    def on_checkpoint_due(self, ctx: Context) -> None:
        if ctx.boundary in self.boundaries:
            ctx.control.save("a boundary", kind="periodic")
            if self.stops:
                ctx.control.stop("one boundary at a time", resumable=True)


def small_trainer(
    folder: Path,
    *callbacks: Callback,
    loader: str = "dataloader",
    seed: int = 0,
    resume: str | Path | None = None,
    **changes: Any,
) -> Trainer:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1))
    evaluation = DataLoader(Noisy(), batch_size=5, shuffle=True)
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 3)),
        "max_duration": f"{EPOCHS}ep",
        "eval_dataloader": {"noisy": evaluation},
        "microbatch_size": 3,
        "clip_grad_norm": 0.5,
        "eval_interval": "4ba",
        "log_interval": "5ba",
        "epochs_per_round": 2,
        "seed": seed,
        "run_name": "small",
        "runs_folder": folder,
        "resume": resume,
        "callbacks": callbacks,
    }
    # The Trainer calls this function after it has set the seed, so what the loader draws in its constructor is reproducible.
    return Trainer(
        model,
        nn.functional.mse_loss,
        lambda: made_loader(loader),
        **(arguments | changes),
    )


def result(trainer: Trainer, history: History) -> dict[str, Any]:
    """Return all losses, metrics records and final weights, without rounding."""
    weights = {name: [value.hex() for value in tensor.flatten().tolist()] for name, tensor in trainer.model.state_dict().items()}
    return {"losses": history.losses, "records": history.records, "weights": weights}


def run_small(
    folder: Path,
    *callbacks: Callback,
    loader: str = "dataloader",
    seed: int = 0,
    resume: str | Path | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Train from the beginning or from a checkpoint. The result covers the whole run, including the steps before a resume."""
    history = History()
    with small_trainer(folder, history, *callbacks, loader=loader, seed=seed, resume=resume, **changes) as trainer:
        trainer.fit()
    return result(trainer, history)


def checkpoints(folder: Path, run: str = "small") -> list[Path]:
    """Return the run's checkpoints, oldest first."""
    found = find_checkpoints(folder / run / "checkpoints")
    assert not found.skipped
    return [Path(checkpoint.path) for checkpoint in sorted(found.checkpoints, key=lambda c: c.seal.sealed_at)]


def seed_for(folder: Path) -> int:
    """Return 0, or a random seed if the run has a checkpoint, from which all random states are restored."""
    return random.randrange(1, 1000) if find_checkpoints(folder / "small" / "checkpoints").checkpoints else 0


class Progress(Callback):
    """Appends each completed step to a file, and waits for the signal at step `until`."""

    def __init__(self, path: Path, until: int | None, came: list[int]) -> None:
        self.path = path
        self.until = until
        self.came = came
        self.events: list[str] = []

    def on_event(self, ctx: Context) -> None:
        event = str(ctx.event)
        if event in ("on_preempt", "on_exception", "on_train_end", "on_run_end"):
            self.events.append(event)
        if event == "on_train_step_end":
            with self.path.open("a") as file:
                file.write(f"{ctx.step}\n")
            if ctx.step == self.until:
                deadline = time.monotonic() + 60
                while not self.came:  # not a threading.Event: signal handlers must not use its lock, as they run inside this wait
                    assert time.monotonic() < deadline, "the signal never came"
                    time.sleep(0.001)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--until-sigterm", type=int)
    parser.add_argument("--loader", default="dataloader")
    given = parser.parse_args(arguments)
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    if given.until_sigterm is not None:
        signal.signal(signal.SIGTERM, note)  # the Trainer calls the previous handler too
    progress = Progress(given.folder / "steps.txt", given.until_sigterm, came)
    history = History()
    saves = [] if given.until_sigterm is not None else [SavesAt("step", "epoch")]
    with small_trainer(
        given.folder, history, progress, *saves, seed=seed_for(given.folder), resume="auto", loader=given.loader
    ) as trainer:
        trainer.fit()
    report = {"outcome": trainer.run.outcome, "events": progress.events, "step": trainer.state.timestamp.batch}
    given.report.write_text(json.dumps(report))
    if given.until_sigterm is None:
        sys.stdin.read()  # wait to be killed


if __name__ == "__main__":
    main(sys.argv[1:])
