"""The tests' trainings in each framework, as the benchmarks run them: long, without evaluation, with a hook in each forward."""

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
"""An empty callback of the framework; a host without listeners; a host with ten callbacks."""

OnForward = Callable[[], None]


class EmptyHandlers(Callback):
    """Listens to four events of a step, and does nothing."""

    def on_train_step_start(self, ctx: Context) -> None: ...

    def on_forward_end(self, ctx: Context) -> None: ...

    def on_optimizer_step_end(self, ctx: Context) -> None: ...

    def on_train_step_end(self, ctx: Context) -> None: ...


def names() -> list[str]:
    """Return the names of the loops, whether or not their framework is installed.

    Ultralytics is left out, because it pickles its models, and a model that counts its calls cannot be pickled.
    """
    found = sorted(path.stem for path in (TESTS / "bridges" / "loops").glob("*.py"))
    return [name for name in found if name not in ("__init__", "job", "trainer", "ultralytics")]


def shown(name: str) -> str:
    """Return how tables name the loop."""
    return "`attach` in a hand-written loop" if name == "bare" else name


def python_of(name: str) -> str:
    """Return the interpreter that has the framework of this loop. Composer has its own, made by tools/composer_venv.py."""
    return str(ROOT / ".venv-composer" / "bin" / "python") if name == "composer" else sys.executable


def loop_of(name: str) -> Any:
    """Return the module of the loop.

    Raises:
        ModuleNotFoundError: the framework is not installed.
    """
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    return importlib.import_module(f"bridges.loops.{name}")


def train(
    name: str, having: str, on_forward: OnForward, *, steps: int, log_every: int, model: Callable[[], nn.Module] | None = None
) -> None:
    """Train in a framework.

    Args:
        name: the name of the loop.
        having: one of `WITH`.
        on_forward: called at the beginning of each forward.
        steps: the minimum number of steps. It is rounded up to a multiple of six, the length of an epoch of the tests' data.
        log_every: steps between two records.
        model: the class of the model, which has four inputs and one output; by default that of the tests.
    """
    where, job = loop_of(name), loop_of("job")
    callbacks = {EMPTY: job.EMPTY, NOBODY: [], TEN: [EmptyHandlers() for _ in range(10)]}[having]
    points = replace(job.POINTS, model=counting(model or job.POINTS.model, on_forward), log_every=log_every)
    with tempfile.TemporaryDirectory() as folder:
        where.train(points, Path(folder), callbacks, strict=False, epochs=1, steps_an_epoch=-(-steps // 6) * 6, evaluate=False)


def train_peer(loop: Callable[[], float], on_forward: OnForward, *, steps: int) -> None:
    """Run one of the loops of `trainer.py` with this number of steps. `on_forward` is called at the beginning of each forward."""
    made = peers.parts

    def parts(device: str = "cpu") -> Any:
        model, batches, optimizer = made(device)
        model.__class__ = counting(nn.Sequential, on_forward)
        return model, (batches * -(-steps // len(batches)))[:steps], optimizer

    peers.parts = parts
    try:
        loop()
    finally:
        peers.parts = made


def counting(kind: Any, on_forward: OnForward) -> Any:
    """Return a subclass of this class of models that calls `on_forward` at the beginning of each forward."""

    class Counting(kind):  # type: ignore[misc]  # any class of models
        def forward(self, *args: Any) -> Any:
            on_forward()
            return kind.forward(self, *args)

    return Counting
