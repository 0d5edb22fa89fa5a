"""The conformance check that runs callbacks on several ranks. It can check many callbacks in the same processes."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import SkipTest

from torch import Tensor

from callsheet.testing.ranks import RankProcesses
from callsheet.testing.scene import (
    ACTING_PHASES,
    ConformanceError,
    Factory,
    Found,
    Scene,
    Subject,
    difference,
    difference_of_records,
    difference_of_states,
)
from callsheet.testing.small_run import SAVED_AT_STEP, same_weights, steps_of

_DURATION = "6ba"
_GRACE_SECONDS = 10.0  # after one rank has reported a failure, the other ranks have this many seconds to report theirs
_CHECK_NAME = "runs_on_ranks"
_HINT = "limit only writing to one rank, let every rank reach each collective, and reduce what goes into a metrics record"


def check_on_ranks(
    factories: Sequence[Factory | Subject], folder: str | os.PathLike[str], *, world_size: int = 2, timeout: float = 90.0
) -> None:
    """Check the callbacks of several factories on several ranks, one after the other in the same processes.

    Args:
        factories: the factories of the callbacks, importable in another process.
        folder: a folder to write to.
        world_size: the number of ranks.
        timeout: seconds after which a callback that has not finished counts as hanging.

    Raises:
        ConformanceError: some callbacks do not pass; the message names all of them.
        unittest.SkipTest: a factory cannot be sent to another process.
    """
    errors = [error for error in find_on_ranks(factories, folder, world_size=world_size, timeout=timeout) if error is not None]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        names = ", ".join(error.callback for error in errors)
        raise ConformanceError(names, _CHECK_NAME, "\n".join(map(str, errors)), "see the hint of each")


def find_on_ranks(
    factories: Sequence[Factory | Subject], folder: str | os.PathLike[str], *, world_size: int = 2, timeout: float = 90.0
) -> list[ConformanceError | None]:
    """Check callbacks on several ranks. Return an error (or None) for each callback, so that each can have its own test.

    The arguments are those of `check_on_ranks`.

    Returns:
        For each callback, in the order of `factories`: its error, or None if it passes.

    Raises:
        unittest.SkipTest: a factory cannot be sent to another process.
    """
    subjects = [what if isinstance(what, Subject) else Subject(what) for what in factories]
    packed = [_pack(subject) for subject in subjects]
    found: list[ConformanceError | None] = []
    # If a callback fails, the processes end. Start new ones for the remaining callbacks.
    while len(found) < len(subjects):
        first = len(found)
        own = Path(mkdtemp(dir=folder, prefix=f"{_CHECK_NAME}-"))
        crash = _run(packed, own, first, world_size, timeout)
        for subject, ends in zip(subjects[first:], _ends(own, first, len(subjects), world_size), strict=True):
            what = _error_of(ends, crash, timeout)
            found.append(ConformanceError(subject.name, _CHECK_NAME, what, _HINT) if what else None)
            if any(end is None or end.found for end in ends):
                break
    return found


@dataclass
class _End:
    """The results of a run with one callback on one rank. `found` says why the callback does not pass; it is empty if it passes."""

    found: str = ""
    steps: int = 0
    outcome: str = ""
    records: list[tuple[int, dict[str, str]]] = field(default_factory=list)


def _pack(subject: Subject) -> bytes:
    """Return `subject`, the callback under test with its details, as a pickle for another process."""
    try:
        return pickle.dumps(subject)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = error
    try:
        import cloudpickle  # type: ignore[import-untyped]

        packed: bytes = cloudpickle.dumps(subject)
        return packed
    except ImportError:
        raise SkipTest(
            f"not checked on several ranks: {subject.name} cannot be sent to another process ({reason}); give a class or a function at "
            "the top of a module, or a functools.partial of one, or pip install cloudpickle"
        ) from None


def _run(packed: list[bytes], folder: Path, first: int, world_size: int, timeout: float) -> str:
    """Run the check on all ranks, and wait until they end. Return an error message if a rank crashed.

    Stop waiting if no callback is finished for `timeout` seconds, or shortly after a callback has failed.
    """
    last, moment, failed_at = 0, time.monotonic(), 0.0
    with RankProcesses(_on_this_rank, world_size, packed, str(folder), first) as ranks:
        while any(process.exitcode is None for process in ranks.processes):
            now, there = time.monotonic(), len(os.listdir(folder))
            if there != last:
                last, moment = there, now
            if not failed_at and any(path.name.endswith("failed") for path in folder.iterdir()):
                failed_at = now
            if now - moment > timeout or (failed_at and now - failed_at > _GRACE_SECONDS):
                break
            time.sleep(0.05)
        ends = ranks.wait(0.2)
    return next((f"rank {end.rank} crashed: {end.error or end.exitcode}" for end in ends if end.error or end.exitcode), "")


def _on_this_rank(packed: list[bytes], folder: str, first: int) -> None:
    """Run the check on one rank: write a result file for each callback, and stop after the first callback that does not pass."""
    bare: dict[Any, dict[str, Tensor]] = {}
    for number in range(first, len(packed)):
        end = _End()
        try:
            subject: Subject = pickle.loads(packed[number])
            own = Path(folder, f"run-{number}")
            if subject.trainer not in bare:
                with Scene(subject, own / "bare") as scene:
                    scene.fit(_DURATION)
                bare[subject.trainer] = scene.weights
            end = _check(subject, own / "watched", bare[subject.trainer])
        except Found as error:
            end.found = error.found
        except BaseException:  # catch SystemExit too, because the process that started the ranks reports every error
            end.found = traceback.format_exc()
        path = _path(Path(folder), number, int(os.environ["RANK"]))
        draft = path.with_suffix(".draft")
        draft.write_bytes(pickle.dumps(end))
        os.replace(draft, path)
        if end.found:
            path.with_suffix(".failed").touch()
            return


def _check(subject: Subject, folder: Path, bare: dict[str, Tensor]) -> _End:
    callback = subject.make()
    with Scene(subject, folder, callback) as whole:
        whole.fit(_DURATION)
    steps, outcome = whole.comes_to
    end = _End(steps=steps, outcome=outcome, records=whole.watch.records)
    if callback.phase not in ACTING_PHASES and not same_weights(whole.weights, bare):
        end.found = "the weights differ from a run without the callback"
    if SAVED_AT_STEP not in whole.watch.checkpoints:
        end.found = f"the run ended before its checkpoint at step {SAVED_AT_STEP}"
    if end.found:
        return end
    with Scene(subject, folder, subject.make(), resume=whole.watch.checkpoints[SAVED_AT_STEP]) as resumed:
        resumed.fit(_DURATION)
    records = [steps_of(scene.watch.records, after=SAVED_AT_STEP) for scene in (resumed, whole)]
    if differs := difference_of_records(subject, *records):
        end.found = f"resumed, and uninterrupted: {differs}"
    elif not same_weights(resumed.weights, whole.weights):
        end.found = "resumed, and uninterrupted: the weights at the end differ"
    elif differs := difference_of_states(subject, resumed.states[0], whole.states[0]):
        end.found = f"resumed, and uninterrupted: {differs}"
    return end


def _path(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}-rank{rank}.end"


def _ends(folder: Path, first: int, count: int, world_size: int) -> list[list[_End | None]]:
    """Return, for each callback, the results of all ranks, read from their files.

    A result is None if the rank did not finish the callback.
    """
    return [
        [
            pickle.loads(path.read_bytes()) if (path := _path(folder, number, rank)).exists() else None
            for rank in range(world_size)
        ]
        for number in range(first, count)
    ]


def _error_of(ends: list[_End | None], crash: str, timeout: float) -> str:
    """Return the reason why a callback with these results does not pass the check, or an empty text if it passes."""
    for rank, end in enumerate(ends):
        if end is not None and end.found:
            return f"on rank {rank} {end.found}"
    for rank, end in enumerate(ends):
        if end is None:
            return crash or f"rank {rank} did not finish within {timeout:g} s"
    finished = [end for end in ends if end is not None]
    one = finished[0]
    for rank, end in enumerate(finished[1:], 1):
        if (end.steps, end.outcome) != (one.steps, one.outcome):
            return f"rank 0 made {one.steps} steps and {one.outcome}, rank {rank} {end.steps} and {end.outcome}"
        if differs := _difference(one, end):
            return f"rank 0's records, and rank {rank}'s: {differs}"
    return ""


def _difference(one: _End, other: _End) -> str:
    """Return the first difference between the metrics records of two ranks as text; empty if there is none.

    Even measured times must be equal, because callbacks that decide by a metrics record must see the same values on all ranks.
    """
    if [step for step, _ in one.records] != [step for step, _ in other.records]:
        return f"of the steps {[step for step, _ in one.records]} in one, {[step for step, _ in other.records]} in the other"
    for (step, values), (_, others) in zip(one.records, other.records, strict=True):
        if differs := difference(None, values, others):
            return f"at step {step} {differs}"
    return ""
