"""One run as its guests from Composer see it: what they share, and what is counted for them.

Samples, tokens and seconds are counted here at every batch, as Composer counts them; our own timestamps move at log boundaries alone.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from callsheet.bridges.composer import names
from callsheet.bridges.composer import time as composer_time
from callsheet.bridges.composer.state import Logger, State
from callsheet.context import Context
from callsheet.time import Time, Timestamp
from callsheet.trainer.tasks import Task

_counts_of = Task().counts


class Kinds(NamedTuple):
    """Whose classes a callback was written with: Composer's own, or those of the same names here."""

    base: type | None
    Event: Any
    Time: Any
    Timestamp: Any
    logger: type
    is_theirs: bool

    @classmethod
    def of(cls, foreign: object) -> Kinds:
        """Composer's own where `foreign` is one of its callbacks; `base` is None where it derives from neither."""
        core = sys.modules.get("composer.core")
        if core is not None and isinstance(foreign, core.Callback):
            destination = sys.modules["composer.loggers"].LoggerDestination
            return cls(core.Callback, core.Event, core.Time, core.Timestamp, destination, True)
        ours = names
        base = ours.Callback if isinstance(foreign, ours.Callback) else None
        return cls(base, ours.Event, composer_time.Time, composer_time.Timestamp, ours.LoggerDestination, False)


class Counted(NamedTuple):
    """What Composer counts at every batch, and we do not."""

    sample: int = 0
    token: int = 0
    sample_in_epoch: int = 0
    token_in_epoch: int = 0
    token_in_iteration: int = 0
    total: float = 0.0
    iteration: float = 0.0
    epoch: float = 0.0
    batch: float = 0.0

    def next_batch(self, samples: int, tokens: int, seconds: float) -> Counted:
        """After one more batch."""
        sample, token, in_epoch, token_in_epoch, token_in_iteration, total, iteration, epoch, _ = self
        return Counted(
            sample + samples, token + tokens, in_epoch + samples, token_in_epoch + tokens, token_in_iteration + tokens,
            total + seconds, iteration + seconds, epoch + seconds, seconds,
        )  # fmt: skip

    def next_epoch(self) -> Counted:
        """After one more epoch."""
        return self._replace(sample_in_epoch=0, token_in_epoch=0, epoch=0.0, batch=0.0)

    def next_iteration(self) -> Counted:
        """After one more iteration."""
        return self.next_epoch()._replace(token_in_iteration=0, iteration=0.0)


class ComposerRun:
    """One run as its guests from Composer see it: their common State and Logger, and what is counted for them."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.ctx: Any = None  # the one in hand: training's or an evaluation's
        self.state = State(self)
        self.logger = Logger(self)
        self.guests: list[Any] = []
        """Those that have heard the run's start; the first of them does the counting."""
        self.closed: list[Any] = []
        self.counted = self.counted_before = Counted()
        self.apart = Counted()
        """The same of the evaluation or prediction in hand, and its batches in `batches_apart`."""
        self.batches_apart = 0
        self.evaluated: dict[str, dict[str, Any]] = {}
        """The last metrics of every dataset, by its name."""
        self.train_metrics: Mapping[str, Any] = {}
        """Where a Trainer computes the model's own metrics of training: what they are."""
        self.loss: Any = None
        """The last step's, detached."""
        self._fetched = (0, 0)
        self._since = time.perf_counter()
        self._made: tuple[Any, Any, Any] = (None, None, None)

    def fetched(self, ctx: Context) -> None:
        """A batch has come: of several for one step all count."""
        if ctx.batch is not None:
            samples, tokens = _counts_of(ctx.batch)
            self._fetched = self._fetched[0] + samples, self._fetched[1] + tokens

    def stepped(self, ctx: Context) -> None:
        """A step is over."""
        samples, tokens = self._fetched
        now, world = time.perf_counter(), ctx.run.world_size
        self.counted_before = self.counted
        self.counted = self.counted.next_batch(samples * world, tokens * world, now - self._since)
        self._fetched, self._since = (0, 0), now
        self.loss = ctx.loss if ctx.has("loss") else None

    def resume_clock(self) -> None:
        """Training goes on after something that is not counted as training."""
        self._since += time.perf_counter() - self._paused

    def pause_clock(self) -> None:
        """An evaluation begins."""
        self._paused = time.perf_counter()

    def start_clock(self) -> None:
        """Training begins."""
        self._since = time.perf_counter()

    def begin_apart(self) -> None:
        """An evaluation of one dataset begins, or a prediction."""
        self.apart, self.batches_apart, self._apart_since = Counted(), 0, time.perf_counter()

    def stepped_apart(self, ctx: Context) -> None:
        """A batch of it is over."""
        samples, tokens = _counts_of(ctx.batch)
        now, world = time.perf_counter(), ctx.run.world_size
        self.apart = self.apart.next_batch(samples * world, tokens * world, now - self._apart_since)
        self._apart_since = now
        self.batches_apart += 1

    def timestamp(self, at: Timestamp, counted: Counted) -> Any:
        """As Composer's callbacks know it; made where one is asked for, and kept until it moves."""
        if self._made[0] is not at or self._made[1] is not counted:
            self._made = (at, counted, self.timestamp_of(at, counted))
        return self._made[2]

    def timestamp_of(self, at: Timestamp, counted: Counted) -> Any:
        """The same, made anew."""
        return self.kinds.Timestamp(
            iteration=at.round,
            epoch=at.epoch,
            batch=at.batch,
            sample=counted.sample,
            token=counted.token,
            epoch_in_iteration=at.epoch_in_round,
            token_in_iteration=counted.token_in_iteration,
            batch_in_epoch=at.batch_in_epoch,
            sample_in_epoch=counted.sample_in_epoch,
            token_in_epoch=counted.token_in_epoch,
            total_wct=datetime.timedelta(seconds=counted.total),
            iteration_wct=datetime.timedelta(seconds=counted.iteration),
            epoch_wct=datetime.timedelta(seconds=counted.epoch),
            batch_wct=datetime.timedelta(seconds=counted.batch),
        )

    def time(self, ours: Time) -> Any:
        """A time of ours as one of Composer's."""
        value = float(ours.value) if ours.unit.value == "dur" else int(ours.value)
        return self.kinds.Time(value, ours.unit.value)
