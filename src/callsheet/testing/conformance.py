"""The conformance suite: checks that every callback must pass. The tests of a callback call these checks.

The checks run on the CPU, so they cannot detect a callback that waits for the device.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Protocol
from unittest import SkipTest

import torch

from callsheet.core.randomness import random_state, restore_random_state
from callsheet.testing import checks
from callsheet.testing.conformance_on_ranks import find_on_ranks
from callsheet.testing.scene import ConformanceError, Factory, Found, Subject


class Check(Protocol):
    """The type of a conformance check: a function that takes a callback's factory (or a `Subject`) and a folder to write to."""

    __name__: str

    def __call__(self, what: Factory | Subject, folder: str | os.PathLike[str]) -> None:
        """Raise ConformanceError if the callback does not pass. Raise SkipTest, with the reason, if the check cannot run."""


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """While the `with` block runs, limit torch to one thread, which is faster for a very small model.

    Restore the random states of the process after the block.
    """
    states, threads = random_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    if freezes := not _was_anything_frozen():
        # The checks collect garbage many times. After `gc.freeze`, collections are fast, because they skip existing objects.
        gc.freeze()
    try:
        yield
    finally:
        restore_random_state(states)
        torch.set_num_threads(threads)
        if freezes:
            gc.unfreeze()


@cache
def _was_anything_frozen() -> bool:
    """Return whether `gc.freeze` was called before the first check. The result is cached, because counting takes up to a second."""
    return gc.get_freeze_count() > 0


def _check(check: Callable[[Subject, Path], None]) -> Check:
    """Wrap a check function so that its errors name the callback and the check."""

    @wraps(check)
    def run(what: Factory | Subject, folder: str | os.PathLike[str]) -> None:
        subject = what if isinstance(what, Subject) else Subject(what)
        own = Path(folder, check.__name__)
        own.mkdir(parents=True, exist_ok=True)
        try:
            with _on_one_thread():
                check(subject, own)
        except (SkipTest, ConformanceError):
            raise
        except Found as found:
            raise ConformanceError(subject.name, check.__name__, found.found, found.hint) from found.__cause__
        except Exception as error:
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
            raised = f"{type(error).__name__}: {error}{notes}"
            raise ConformanceError(
                subject.name, check.__name__, raised, "the traceback above shows where it comes from"
            ) from error

    return run


def runs_on_ranks(subject: Subject, folder: Path) -> None:
    """Check that the callback works on two ranks.

    The outcome and the metrics records must be the same on both ranks, the callback must not change training (except in the phases
    `change` and `decide`), and it must be possible to resume the run.
    """
    for error in find_on_ranks([subject], folder):
        if error is not None:
            raise error


CONFORMANCE: tuple[Check, ...] = tuple(
    map(
        _check,
        (
            checks.constructs,
            checks.registers,
            checks.two_work_in_one_run,
            checks.fits_twice,
            checks.closes_twice,
            checks.lets_errors_out,
            checks.is_preemptive,
            checks.resumes,
            checks.is_neutral,
            checks.leaves_nothing,
            runs_on_ranks,
        ),
    )
)
"""All checks. Each takes a callback's factory (or a `Subject`) and a folder. A test can be parametrized over them in pytest."""


def check_callback(what: Factory | Subject, folder: str | os.PathLike[str]) -> None:
    """Run all checks of `CONFORMANCE` on a callback. The checks make short real runs on the CPU; the last check uses two ranks.

    Args:
        what: makes a new callback at each call, such as its class; or a `Subject` with more details. For the run on two ranks it
            must be importable in another process: a class, a function or a `functools.partial` of one. A lambda, or something
            defined in a function, needs the package `cloudpickle`.
        folder: a folder to write to, such as pytest's `tmp_path`.

    Raises:
        ConformanceError: the callback does not pass a check; the message has a hint.
        unittest.SkipTest: the callback passes all checks that could run; the reason says which checks could not run.

    Examples:
        >>> from callsheet.callbacks import LRMonitor
        >>> def test_lr_monitor(tmp_path):
        ...     check_callback(LRMonitor, tmp_path)
    """
    skipped = []
    for check in CONFORMANCE:
        try:
            check(what, folder)
        except SkipTest as reason:
            skipped.append(f"{check.__name__}: {reason}")
    if skipped:
        raise SkipTest("; ".join(skipped))
