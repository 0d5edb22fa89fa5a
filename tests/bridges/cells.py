"""Computes a cell of the matrix: compares a built-in callback's effects in a framework's loop with its effects in our Trainer."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkstemp
from types import ModuleType

import torch

from callsheet import Callback, CallsheetError, Context
from callsheet.bridges.matrix import Cell
from callsheet.callbacks import DiskSpaceGuard, EarlyStopper, LossSpikeDetector, SaveOnTrigger, ThresholdStopper, TimeLimit
from callsheet.errors import NotSupported, RequestRejected
from callsheet.run.run_marker import MARKER
from callsheet.testing import Subject

from .loops.job import IMAGES, POINTS, TOKENS, Job

EPOCHS = 3


def triggered() -> Callback:
    """Return a `SaveOnTrigger` with a trigger file that requests a checkpoint and a stop."""
    number, path = mkstemp()
    os.write(number, b"save as asked\nstop as asked\n")
    os.close(number)
    return SaveOnTrigger(file=path, seconds=0)


WITH_CAUSE: dict[str, Callable[[], Callback]] = {
    "DiskSpaceGuard": lambda: DiskSpaceGuard(warn_below=2**62, stop_below=2**62),
    "EarlyStopper": lambda: EarlyStopper(monitor="validation/loss", min_delta=1e9, patience="1ep"),
    "LossSpikeDetector": lambda: LossSpikeDetector(window=4, threshold=1e-9, action="stop"),
    "SaveOnTrigger": triggered,
    "ThresholdStopper": lambda: ThresholdStopper(monitor="train/loss", threshold=1e9),
    "TimeLimit": lambda: TimeLimit(limit=0.001),
}
"""Built-ins that act only under some condition, with arguments that make the condition true."""


class RecordsLoadedSteps(Callback):
    """Records the steps of the checkpoints from which the run resumes."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        if ctx.checkpoint is not None:
            self.steps.append(ctx.checkpoint.step)


class Observer(Callback):
    """Records the observable effects of a run: metric names, checkpoints, evaluations, outcome and failures."""

    phase = "restore"  # the last phase, so that it sees the effects of all other callbacks

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.saved = self.evaluated = 0
        self.outcome = ""
        self.failures: list[str] = []

    def on_event(self, ctx: Context) -> None:
        event = str(ctx.event)
        if event == "on_log":
            self.names |= ctx.record.values.keys()
        self.saved += event == "on_checkpoint_published"
        self.evaluated += event == "on_eval_all_end"
        if event == "on_run_end":
            self.outcome = str(ctx.run.outcome)
            self.failures = [str(failure) for failure in ctx.run.failures]


@dataclass(frozen=True)
class Effects:
    """The observable effects of a run, as `Observer` records them."""

    names: set[str]
    suffixes: set[str]
    saves: bool
    outcome: str
    weights: tuple[torch.Tensor, ...] = field(repr=False)

    def has_effect(self, without: Effects) -> bool:
        """Return whether the callback has an effect: the run has not failed, and differs from a run without the callback."""
        differs = (self.names, self.suffixes, self.saves, self.outcome) != (
            without.names,
            without.suffixes,
            without.saves,
            without.outcome,
        )
        return self.outcome != "failed" and (differs or not _same(self, without))

    def missing_effects(self, wanted: Effects, without: Effects, wanted_without: Effects) -> list[str]:
        """Return the effects that the callback has in the run `wanted`, but lacks in this run.

        `without` and `wanted_without` are the same runs without the callback.
        """
        found = []
        if names := (wanted.names - wanted_without.names) - self.names:
            found.append(f"logs no {_listed(names)}")
        if suffixes := (wanted.suffixes - wanted_without.suffixes) - (self.suffixes - without.suffixes):
            found.append(f"writes no {_listed(suffixes)}")
        if wanted.saves and not self.saves:
            found.append("saves nothing")
        if wanted.outcome != self.outcome:
            found.append(f"the run ends as {self.outcome}, not as {wanted.outcome}")
        if wanted.outcome == "finished" and not _same(wanted, wanted_without) and _same(self, without):
            found.append("does not change the weights")
        return found


def loop_of(name: str) -> ModuleType:
    """Import a framework's training loop by the name of its file in `loops`.

    Raises:
        ModuleNotFoundError: its framework is not installed.
    """
    return importlib.import_module(f"{__package__}.loops.{name}")


def job_of(subject: Subject) -> Job:
    """Return the job (model and data) for which the built-in callback is meant."""
    return {"images": IMAGES, "language": TOKENS}.get(getattr(subject.trainer, "__name__", ""), POINTS)


def effects(where: str, job: Job, callbacks: Iterable[Callback], folder: Path, *, strict: bool) -> Effects:
    """Train the job with the callbacks in the loop `where`, and return the effects. No callback may fail."""
    observer = Observer()
    model = loop_of(where).train(job, folder, [*callbacks, observer], strict=strict, epochs=EPOCHS)
    assert not observer.failures, observer.failures
    paths = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != MARKER and not any("checkpoint" in part for part in path.parts)
    ]
    return Effects(
        observer.names,
        {re.sub(r"\d+", "N", path.suffix or path.name) for path in paths},
        observer.saved > 0,
        observer.outcome,
        tuple(tensor.detach().clone() for tensor in model.state_dict().values()),
    )


@cache
def effects_without_callback(where: str, job: Job, folder: Path) -> Effects:
    """Return the effects of a run without the built-in callback."""
    return effects(where, job, [], folder / f"{where}-{id(job)}", strict=False)


@cache
def in_our_trainer(subject: Subject, make: Callable[[], Callback], folder: Path) -> Effects:
    """Return the built-in callback's effects in callsheet's own Trainer."""
    return effects("trainer", job_of(subject), [make()], folder, strict=True)


def cell(where: str, name: str, subject: Subject, folder: Path, shared: Path) -> Cell:
    """Compare the built-in callback's effects in the loop `where` with those in callsheet's own Trainer."""
    make, job = WITH_CAUSE.get(name, subject.make), job_of(subject)
    rejection = ""
    try:
        found = effects(where, job, [make()], folder / "strict", strict=True)
    except NotSupported as error:
        rejection = _short(error)
        try:
            found = effects(where, job, [make()], folder / "loose", strict=False)
        except (NotSupported, RequestRejected) as again:
            return Cell("rejected", _short(again))
    except RequestRejected as error:
        return Cell("rejected", _short(error))
    wanted = in_our_trainer(subject, make, shared / name)
    without, wanted_without = effects_without_callback(where, job, shared), effects_without_callback("trainer", job, shared)
    assert name not in WITH_CAUSE or wanted.has_effect(wanted_without)
    if rejection and not found.has_effect(without):
        return Cell("rejected", rejection)
    why = "; ".join([*([rejection] if rejection else []), *found.missing_effects(wanted, without, wanted_without)])
    return Cell("limited" if why else "works", why)


def _same(one: Effects, other: Effects) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


def _listed(names: set[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:4]) + (f" and {len(first) - 4} more" if len(first) > 4 else "")


def _short(error: CallsheetError) -> str:
    """Return the first clause of an error message. It says what is not supported."""
    return str(error).partition("; ")[0]
