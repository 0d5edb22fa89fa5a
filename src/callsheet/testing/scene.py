"""Makes runs with a callback under test, so that the conformance checks can compare the results of the runs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.core.manager import CallbackManager
from callsheet.testing.grammar import check_events
from callsheet.testing.small_run import Moments, Watch, small_trainer, weights_of
from callsheet.trainer import Trainer

CLOCK_PATTERNS = ("time/*", "throughput/*", "memory/*", "system/*", "*per_second*", "*seconds*")
"""Patterns of values that are never compared between two runs, because they depend on time or on the machine."""

ACTING_PHASES = ("change", "decide")
"""The phases of callbacks whose purpose is to change training. The check that training stays the same does not apply to them."""

Factory = Callable[[], Callback]


class MakesTrainer(Hashable, Protocol):
    """The type of a function that makes a trainer. All calls return trainers with the same settings, which evaluate and train at least 10 steps.

    The function passes its arguments on to the trainer (`folder` as `runs_folder`). The trainer's run always has the same name.
    """

    def __call__(self, folder: Path, callbacks: CallbackManager, resume: str | None = None) -> Trainer: ...


@dataclass(frozen=True)
class Subject:
    """A callback under test, with details that the checks need if the callback's factory alone is not enough.

    Args:
        make: makes a new callback at each call.
        varies: patterns of values that differ between two equal runs, in addition to the usual ones (`time/*`, `throughput/*`,
            `memory/*`, `system/*`, and names with `seconds` or `per_second`): metrics by their names, and fields of the
            callback's state as `state/<key>`, such as `state/run_id`.
        trainer: makes the trainer for the test, if the small default run lacks something that the callback needs.
    """

    make: Factory
    varies: tuple[str, ...] = ()
    trainer: MakesTrainer = small_trainer

    @property
    def name(self) -> str:
        """The name of the callback's class or, if `make` fails to make a callback, the name of the function `make`."""
        if isinstance(self.make, type):
            return self.make.__name__
        try:
            return type(self.make()).__name__
        except Exception:  # ignore the error here: the check calls `make` again and reports it
            return getattr(self.make, "__qualname__", repr(self.make))

    def compares(self, name: str) -> bool:
        """Return whether a value must be the same in two runs with the same settings. Measured times, for example, may differ.

        Args:
            name: the name of a metric, or `state/<key>` for an entry of the callback's state.
        """
        return not any(fnmatchcase(name, pattern) for pattern in (*CLOCK_PATTERNS, *self.varies))


class ConformanceError(AssertionError):
    """Raised if a callback does not pass a check. The constructor's arguments are also attributes of the error.

    Args:
        callback: the name of the callback's class.
        check: the name of the check.
        found: what is wrong.
        hint: what to do.
    """

    def __init__(self, callback: str, check: str, found: str, hint: str) -> None:
        super().__init__(f"{callback} does not pass {check}: {found}; {hint}")
        self.callback, self.check, self.found, self.hint = callback, check, found, hint


class Found(Exception):
    """Raised by a check if a callback does not pass. The exception contains what is wrong, and a hint."""

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found, hint)
        self.found, self.hint = found, hint


class Planted(Exception):
    """An exception that a test raises on purpose during a run."""


class Scene:
    """A run with a callback under test. The `with` statement makes the trainer and closes it.

    Args:
        subject: the callback under test.
        folder: the folder of this run; for a resume, the folder of the earlier run.
        callbacks: the callbacks of the run. A `Moments` (acts at fixed events) is added before them and a `Watch` (records the
            results) after them.
        at: the event and step at which `act` is called.
        act: a function that is called once.
        resume: the checkpoint to resume from.
        checking: passed to `CallbackManager`.

    Raises:
        Found: the lifecycle does not allow the events, or a callback raised an error that was only logged (`on_error="isolate"`).
    """

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        *callbacks: Callback,
        at: tuple[str, int] = ("", 0),
        act: Callable[[Context], Any] | None = None,
        resume: str | None = None,
        checking: bool = False,
    ) -> None:
        self.folder = folder
        self.watch, self.moments = Watch(), Moments(self.folder, *at, act)
        self.subject, self.callbacks = subject, callbacks
        self.weights: dict[str, Tensor] = {}
        """The weights of the model at the end of the run."""
        self.states: list[dict[str, Any]] = []
        """The states of the callbacks at the end of the run."""
        self.warnings: Counter[str] = Counter()
        """The warnings and errors that were logged during the run, with their counts."""
        self._resume = resume
        self._manager = CallbackManager(checking=checking)
        self._manager.register("*", self.moments.record, phase="change")
        self._manager.add(callbacks)
        self._manager.register("*", self.watch.record, phase="report")
        self._listener = _Listener(self.warnings)

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self._listener)
        try:
            self.trainer = self.subject.trainer(self.folder, self._manager, self._resume)
        except BaseException:
            logging.getLogger().removeHandler(self._listener)
            self._check_run()
            raise
        self._longest = self.trainer.state.max_duration
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        try:
            with self.trainer:  # close the trainer even if reading a state fails
                if error is not None:
                    self.trainer.__exit__(kind, error, frames)
                else:
                    self.weights = weights_of(self.trainer)
                    self._manager.state_dict()  # `state_dict` also waits for callbacks that run in other threads
                    self.states = [dict(callback.state_dict()) for callback in self.callbacks]
        finally:
            logging.getLogger().removeHandler(self._listener)
        if error is None or isinstance(error, (Planted, KeyboardInterrupt)):
            self._check_run()

    @property
    def comes_to(self) -> tuple[int, str]:
        """The result of the run: the number of steps that it made, and its outcome."""
        return len(self.watch.losses), self.watch.outcome

    def fit(self, until: str | None = None) -> Self:
        """Train until the time `until` of the run, or to the end of the run if `until` is None."""
        self.trainer.fit(until or self._longest)
        return self

    def _check_run(self) -> None:
        check_events(self.watch.events)
        for failed in self._manager.cost_report(0).failures:
            raise Found(
                f"it failed, and was isolated: {failed.last}", "isolation is for services that are down, not for mistakes"
            )


class _Listener(logging.Handler):
    def __init__(self, warnings: Counter[str]) -> None:
        super().__init__(logging.WARNING)
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        self._warnings[record.getMessage()] += 1


def difference_of_records(
    subject: Subject, one: Sequence[tuple[int, dict[str, str]]], other: Sequence[tuple[int, dict[str, str]]]
) -> str:
    """Return, as text, the first difference between two runs' metrics records, except for values that vary from run to run.

    The text is empty if there is no difference.
    """
    for (step, values), (other_step, others) in zip(one, other, strict=False):
        if step != other_step:
            return f"a record at step {step} in one, at step {other_step} in the other"
        if differs := difference(subject, values, others):
            return f"at step {step} {differs}"
    if len(one) != len(other):
        longer = max(one, other, key=len)
        return (
            f"{len(one)} records in one, {len(other)} in the other, which begins at step {longer[min(len(one), len(other))][0]}"
        )
    return ""


def difference_of_states(subject: Subject, one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return, as text, the first difference between two states of a callback, except for values that vary from run to run.

    The text is empty if there is no difference.
    """
    return difference(subject, dict(_leaves(one, "state")), dict(_leaves(other, "state")))


def difference(subject: Subject | None, one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return, as text, the first name whose values differ between two mappings, or that is missing in one of them.

    Values that the `subject` excludes are ignored. If `subject` is None, all values are compared.
    """
    for name in sorted(one.keys() | other.keys()):
        if (subject is None or subject.compares(name)) and one.get(name) != other.get(name):
            return f"{name} is {_readable(one.get(name))} in one, {_readable(other.get(name))} in the other"
    return ""


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        yield f"{path}/length", str(len(tree))
        for place, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{place}")
    elif isinstance(tree, Tensor):
        kept = tree.detach().cpu().contiguous()
        yield path, f"{kept.dtype} {tuple(kept.shape)} {kept.flatten().view(torch.uint8).numpy().tobytes().hex()}"
    else:
        yield path, tree.hex() if isinstance(tree, float) else repr(tree)


def _readable(value: str | None) -> str:
    if value is None:
        return "not there"
    if value.lstrip("-").startswith("0x"):
        try:
            value = repr(float.fromhex(value))
        except ValueError:  # the text begins with 0x but is not a float from `_leaves`: show it unchanged
            pass
    return value if len(value) <= 100 else f"{value[:97]}..."
