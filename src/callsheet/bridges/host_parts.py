"""Where a host evaluates and saves by itself: what the boundaries of a run ask for, passed on to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from callsheet.context import CheckpointInfo, Context
from callsheet.control import Request
from callsheet.errors import mark_as_users
from callsheet.spans import Spans
from callsheet.trainer.checkpoints import Stateful
from callsheet.trainer.evaluation import Undone

Evaluates = Callable[[], Mapping[str, Mapping[str, Any]]]


class HostEvaluation:
    """The host's own evaluation, where it can be asked for one; what it found, by the dataset's name."""

    is_resumed = False
    """An evaluation that a signal kept from being made is lost: our checkpoints do not know the host's."""

    def __init__(
        self, ctx: Context, evaluates: Evaluates | None, tell: Callable[[Mapping[str, Mapping[str, Any]]], None]
    ) -> None:
        self.loaders: dict[str, Any] = {"": None}
        self.schedules: dict[str, Any] = {}
        self.results: dict[str, dict[str, float]] = {}
        self.undone: Undone | None = None
        """What is due at the boundary in hand, until it is made; it is not saved: a host's checkpoints are not its evaluation's to know."""
        self._ctx = ctx
        self._evaluates = evaluates
        self._tell = tell
        self.asks: Callable[[], None] | None = None
        """Asks the host for an evaluation that it makes, and tells, later."""

    def due(self, ctx: Context, is_over: bool) -> list[str]:
        """Whether a callback has asked for one that can be made now; a host that makes it later is asked here."""
        if ctx.control.evaluate_requested is None:
            return []
        if self.asks is None:
            return [""]
        self.asks()
        ctx.control.done("evaluate")
        return []

    def evaluate(self, loaders: Any, *, standalone: bool) -> dict[str, dict[str, float]]:
        """Ask the host, and tell what it found."""
        assert self._evaluates is not None  # else the request was refused
        try:
            found = self._evaluates()
        except BaseException as error:
            mark_as_users(error)
            raise
        self._tell(found)
        return self.results

    def take(self) -> dict[str, float]:
        """Nothing more to record: telling has done it."""
        return {}

    def done(self, ctx: Context, due: list[str]) -> None:
        """It has been carried out."""
        self.undone = None
        ctx.control.done("evaluate")


class HostCheckpoints:
    """The host's own checkpoints: what callbacks ask for is passed on, and what the host has written is told afterwards."""

    is_writing = False
    stopped_by: Request | None = None
    next_step = sys.maxsize

    def __init__(self, ctx: Context, spans: Spans, saves: Callable[[tuple[Request, ...]], None]) -> None:
        self.shared: dict[str, Stateful] = {}
        self.local: dict[str, Stateful] = {}
        self.requests: tuple[Request, ...] = ()
        """What the next checkpoint of the host answers."""
        self.loads: Callable[[], CheckpointInfo | None] = lambda: None
        """Takes back what stands in the checkpoint that the host goes on from, and says which; None where there is none."""
        self._ctx = ctx
        self._spans = spans
        self._saves = saves

    def durable(self) -> int:
        """The host's are not written in the background, as far as is known here."""
        return 0

    def load(self, resume: str | None) -> None:
        """The host has loaded already, but for what is kept here."""
        with self._spans.checkpoint_load:
            self._ctx.checkpoint = self.loads()
        self._ctx.close("on_checkpoint_load_end")

    def save(self, requests: tuple[Request, ...], path: str | None, **_: Any) -> None:
        """Ask the host."""
        self.requests += requests
        try:
            self._saves(requests)
        except BaseException as error:
            mark_as_users(error)
            raise

    def earlier_stop(self) -> None:
        """Return None: whether a stopped run trains on is the host's to say."""

    def publish(self, durable: int) -> None:
        """Nothing is on its way."""

    def prepare(self, step: int) -> None:
        """Nothing is written here."""

    finish = close = lambda self: None
