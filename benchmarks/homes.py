"""The tests' short trainings in each framework, as the benchmarks run them: long, without evaluation, and telling every forward."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

import trainer as peers
from callsheet import Callback, Context

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
EMPTY, NOBODY, TEN = WITH = ("empty", "nobody", "ten")
"""An empty callback of the framework's own; a host that nobody listens to; one of ten callbacks."""

Told = Callable[[], None]


class Nothing(Callback):
    """Hears four events of a step, and does nothing."""

    def on_train_step_start(self, ctx: Context) -> None: ...

    def on_forward_end(self, ctx: Context) -> None: ...

    def on_optimizer_step_end(self, ctx: Context) -> None: ...

    def on_train_step_end(self, ctx: Context) -> None: ...


def names() -> list[str]:
    """All that there are, whether or not their framework is installed."""
    found = sorted(path.stem for path in (TESTS / "bridges" / "homes").glob("*.py"))
    return [name for name in found if name not in ("__init__", "job", "trainer")]


def python_of(name: str) -> str:
    """The interpreter that has its framework: Composer's is in a venv of its own, which tools/composer_venv.py makes."""
    return str(ROOT / ".venv-composer" / "bin" / "python") if name == "composer" else sys.executable


def home(name: str) -> Any:
    """Its module.

    Raises:
        ModuleNotFoundError: its framework is not installed.
    """
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    return importlib.import_module(f"bridges.homes.{name}")


def train(
    name: str, having: str, told: Told, *, steps: int, log_every: int, model: Callable[[], nn.Module] | None = None
) -> None:
    """Train in a framework; `told` is called at the beginning of each forward.

    Args:
        name: the name of the home.
        having: one of `WITH`.
        told: called at the beginning of each forward.
        steps: the least number of steps; whole epochs of the tests' data are six.
        log_every: steps between two records.
        model: the class of the model, from four numbers to one; by default the one of the tests.
    """
    where, job = home(name), home("job")
    callbacks = {EMPTY: job.EMPTY, NOBODY: [], TEN: [Nothing() for _ in range(10)]}[having]
    points = replace(job.POINTS, model=telling(model or job.POINTS.model, told), log_every=log_every)
    with tempfile.TemporaryDirectory() as folder:
        where.train(points, Path(folder), callbacks, strict=False, epochs=1, steps_an_epoch=-(-steps // 6) * 6, evaluate=False)


def train_a_peer(loop: Callable[[], float], told: Told, *, steps: int) -> None:
    """One of the loops of trainer.py, of whose model every forward is told."""
    made = peers.parts

    def parts(device: str = "cpu") -> Any:
        model, batches, optimizer = made(device)
        model.__class__ = telling(nn.Sequential, told)
        return model, (batches * -(-steps // len(batches)))[:steps], optimizer

    peers.parts = parts
    try:
        loop()
    finally:
        peers.parts = made


def telling(kind: Any, told: Told) -> Any:
    """That class of models, telling its forwards."""

    class Telling(kind):  # type: ignore[misc]  # any class of models
        def forward(self, *args: Any) -> Any:
            told()
            return kind.forward(self, *args)

    return Telling
