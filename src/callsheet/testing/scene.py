"""One run of a callback that is tested, and what came of it."""

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

from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.manager import CallbackManager
from callsheet.testing.grammar import check_events
from callsheet.testing.small_run import Moments, Watch, small_trainer, weights_of
from callsheet.trainer import Trainer

CLOCK = ("time/*", "throughput/*", "memory/*", "system/*", "*per_second*", "*seconds*")
"""Patterns of what is never compared between two runs, since a clock or the machine has its say in it."""

ACTS = ("change", "decide")
"""The phases of those whose purpose is to act on training: they need not be neutral."""

Factory = Callable[[], Callback]


class MakesTrainer(Hashable, Protocol):
    """A function that makes a trainer, the same each time; it trains for 10 steps at least, evaluates, and makes records.

    It passes `folder` on as `runs_folder`, and `resume`; its run always has the same name.
    """

    def __call__(self, folder: Path, callbacks: CallbackManager, resume: str | None = None) -> Trainer: ...


@dataclass(frozen=True)
class Subject:
    """A callback to be tested, where its factory alone does not say enough.

    Args:
        make: makes a new one at each call.
        varies: patterns of what differs between two runs that are alike, besides the usual (`time/*`, `throughput/*`, `memory/*`,
            `system/*`, and names with `seconds` or `per_second`): metrics by their names, and fields of its state as
            `state/<key>`, such as `state/run_id`.
        trainer: makes the run that it is tested in, where the small one has not what it needs.
    """

    make: Factory
    varies: tuple[str, ...] = ()
    trainer: MakesTrainer = small_trainer

    @property
    def name(self) -> str:
        """The name of the class that the factory makes, or, where it makes nothing, the factory's."""
        if isinstance(self.make, type):
            return self.make.__name__
        try:
            return type(self.make()).__name__
        except Exception:  # which the check tells of that called it
            return getattr(self.make, "__qualname__", repr(self.make))

    def compares(self, name: str) -> bool:
        """Whether this metric or field of the state has to be the same in two runs that are alike."""
        return not any(fnmatchcase(name, pattern) for pattern in (*CLOCK, *self.varies))


class ConformanceError(AssertionError):
    """A callback that does not hold what it has to: `callback`, the `check`, what was `found`, and the `mend`."""

    def __init__(self, callback: str, check: str, found: str, hint: str) -> None:
        super().__init__(f"{callback} does not pass {check}: {found}; {hint}")
        self.callback, self.check, self.found, self.hint = callback, check, found, hint


class Found(Exception):
    """What a check found, and the mend."""

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found, hint)
        self.found, self.hint = found, hint


class Planted(Exception):
    """Raised on purpose in the midst of a run."""


class Scene:
    """One run: `with` makes the trainer, and closes it.

    Args:
        subject: what is tested.
        folder: for this run alone; where it resumes, that of the run before.
        callbacks: those in the run, besides `Moments` before them and a `Watch` after them.
        at: event and step at which
        act: is called.
        resume: the checkpoint to go on from.
        checking: as `CallbackManager` has it.

    Raises:
        Found: events that the lifecycle does not allow, or a failure of a callback that is isolated.
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
        """At the end."""
        self.states: list[dict[str, Any]] = []
        """Of the callbacks, at the end."""
        self.said: Counter[str] = Counter()
        """Warnings and worse, and how often each was."""
        self._resume = resume
        self._manager = CallbackManager(checking=checking)
        self._manager.register("*", self.moments.hear, phase="change")
        self._manager.add(callbacks)
        self._manager.register("*", self.watch.hear, phase="report")
        self._listener = _Listener(self.said)

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self._listener)
        try:
            self.trainer = self.subject.trainer(self.folder, self._manager, self._resume)
        except BaseException:
            logging.getLogger().removeHandler(self._listener)
            self._look()
            raise
        self._longest = self.trainer.state.max_duration
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None) -> None:
        try:
            with self.trainer:  # which is closed, also where a state cannot be read
                if error is not None:
                    self.trainer.__exit__(kind, error, frames)
                else:
                    self.weights = weights_of(self.trainer)
                    self._manager.state_dict()  # which waits for those in lanes
                    self.states = [dict(callback.state_dict()) for callback in self.callbacks]
        finally:
            logging.getLogger().removeHandler(self._listener)
        if error is None or isinstance(error, (Planted, KeyboardInterrupt)):
            self._look()

    @property
    def comes_to(self) -> tuple[int, str]:
        """How many steps it made, and its outcome."""
        return len(self.watch.losses), self.watch.outcome

    def fit(self, until: str | None = None) -> Self:
        """Train, to the end where nothing else is said."""
        self.trainer.fit(until or self._longest)
        return self

    def _look(self) -> None:
        check_events(self.watch.events)
        for failed in self._manager.cost_report(0).failures:
            raise Found(f"it failed, and was isolated: {failed.last}", "isolation is for what is down, not for mistakes")


class _Listener(logging.Handler):
    def __init__(self, said: Counter[str]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said[record.getMessage()] += 1


def difference_of_records(
    subject: Subject, one: Sequence[tuple[int, dict[str, str]]], other: Sequence[tuple[int, dict[str, str]]]
) -> str:
    """Where two runs' records differ first, in what can be compared; empty where they do not."""
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
    """Where two states differ first, in what can be compared; empty where they do not."""
    return difference(subject, dict(_leaves(one, "state")), dict(_leaves(other, "state")))


def difference(subject: Subject | None, one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first name that is in one alone, or has another value there; of all names where there is no subject."""
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
    try:
        value = repr(float.fromhex(value)) if value.lstrip("-").startswith("0x") else value
    except ValueError:
        pass
    return value if len(value) <= 100 else f"{value[:97]}..."
