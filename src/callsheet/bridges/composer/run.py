"""The state that Composer's callbacks share in one run of callsheet's loop.

Samples, tokens and seconds are counted here at every batch, as in Composer. callsheet's timestamps count them only at log
boundaries.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from callsheet.bridges.composer import names
from callsheet.bridges.composer import time as composer_time
from callsheet.bridges.composer.state import Logger, State
from callsheet.bridges.guest_counts import counts_in_all
from callsheet.core.context import Context
from callsheet.core.time import Time, Timestamp


class Kinds(NamedTuple):
    """The classes (`Event`, `Time`, ...) that a Composer callback expects: Composer's own, or callsheet's classes of the same names."""

    base: type | None
    Event: Any
    Time: Any
    Timestamp: Any
    logger: type
    is_theirs: bool

    @classmethod
    def of(cls, foreign: object) -> Kinds:
        """Return Composer's own classes if the callback `foreign` derives from Composer's `Callback`, otherwise callsheet's classes.

        If `foreign` derives from neither Composer's nor callsheet's `Callback`, `base` is None.
        """
        core = sys.modules.get("composer.core")
        if core is not None and isinstance(foreign, core.Callback):
            destination = sys.modules["composer.loggers"].LoggerDestination
            return cls(core.Callback, core.Event, core.Time, core.Timestamp, destination, True)
        ours = names
        base = ours.Callback if isinstance(foreign, ours.Callback) else None
        return cls(base, ours.Event, composer_time.Time, composer_time.Timestamp, ours.LoggerDestination, False)


class Counted(NamedTuple):
    """Those counters of Composer's `Timestamp` that callsheet does not count itself at every batch: samples, tokens and seconds."""

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
        """Return the counters after one more batch, with its samples, tokens and seconds added."""
        sample, token, in_epoch, token_in_epoch, token_in_iteration, total, iteration, epoch, _ = self
        return Counted(
            sample + samples, token + tokens, in_epoch + samples, token_in_epoch + tokens, token_in_iteration + tokens,
            total + seconds, iteration + seconds, epoch + seconds, seconds,
        )  # fmt: skip

    def with_more(self, samples: int, tokens: int) -> Counted:
        """Return the counters with these samples and tokens added to the counters of the run, the iteration and the epoch."""
        return self._replace(
            sample=self.sample + samples,
            token=self.token + tokens,
            sample_in_epoch=self.sample_in_epoch + samples,
            token_in_epoch=self.token_in_epoch + tokens,
            token_in_iteration=self.token_in_iteration + tokens,
        )

    def next_epoch(self) -> Counted:
        """Return the counters after the end of an epoch: the counters within the epoch start at 0 again."""
        return self._replace(sample_in_epoch=0, token_in_epoch=0, epoch=0.0, batch=0.0)

    def next_iteration(self) -> Counted:
        """Return the counters after the end of an iteration (a group of epochs): the iteration's counters start at 0 again."""
        return self.next_epoch()._replace(token_in_iteration=0, iteration=0.0)


class ComposerRun:
    """The State, the Logger and the counters that Composer's callbacks share in one run of callsheet's loop."""

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        self.ctx: Any = None  # the context of the current event: the context of training or of an evaluation
        self.state = State(self)
        self.logger = Logger(self)
        self.guests: list[Any] = []
        """The guests (Composer's callbacks) that have joined the run. The first guest counts steps and samples for all guests."""
        self.closed: list[Any] = []
        self.counted = Counted()
        self.previous: tuple[Timestamp, Counted] | None = None
        """callsheet's timestamp and Composer's counters before the last step, epoch or iteration was counted; None at first."""
        self.looks_back = False
        """Whether `state.timestamp` is the previous timestamp."""
        self.loss_names: frozenset[str] = frozenset()
        """The names of the losses of a step, if there are several."""
        self.eval_counted = Counted()
        """The counters of the current evaluation or prediction, except the number of batches, which is in `eval_batches`."""
        self.eval_batches = 0
        self.evaluated: dict[str, dict[str, Any]] = {}
        """The latest evaluation metrics of every dataset, by the dataset's name."""
        self.train_metrics: Mapping[str, Any] = {}
        """The model's own training metrics, if a Trainer computes them."""
        self.loss: Any = None
        """The loss of the last step, detached."""
        self._now: Timestamp | None = None  # callsheet's timestamp when Composer's counters were last changed
        self._since = time.perf_counter()
        self._made: tuple[Any, Any, Any] = (None, None, None)

    def count_step(self, ctx: Context) -> None:
        """Count a training step in Composer's counters."""
        samples, tokens = self._uncounted_samples_and_tokens(ctx)
        now = time.perf_counter()
        # An earlier estimate may have been too high. The counters never decrease within an epoch, because intervals depend on them.
        counted = self.counted.next_batch(max(0, samples), max(0, tokens), now - self._since)
        self.count(ctx.state.previous_timestamp, ctx.state.timestamp, counted)
        if ctx.has("loss_dict") and len(ctx.loss_dict) > 1:
            self.loss_names = frozenset(ctx.loss_dict)
        self._since = now
        self.loss = ctx.loss if ctx.has("loss") else None

    def count(self, before: Timestamp, now: Timestamp, counted: Counted) -> None:
        """Store the present counters in `previous`, and set the counters to `counted`.

        `before` and `now` are callsheet's timestamps before and after this change.
        """
        self.previous, self._now, self.counted = (before, self.counted), now, counted

    def count_exactly(self, ctx: Context) -> None:
        """Set the counters of samples and tokens to those of all ranks, which are exact at the end of an epoch."""
        self.counted = self.counted.with_more(*self._uncounted_samples_and_tokens(ctx))

    def _uncounted_samples_and_tokens(self, ctx: Context) -> tuple[int, int]:
        """Return how many samples and tokens of all ranks are not in the counters yet. Negative if earlier estimates were too high."""
        now, tally = ctx.state.timestamp, ctx.tally
        samples, tokens = now.sample - self.counted.sample, now.token - self.counted.token
        return (samples, tokens) if tally is None else (samples + tally.uncounted_samples, tokens + tally.uncounted_tokens)

    def count_end(self, now: Timestamp, counted: Counted) -> None:
        """Count the end of an epoch or iteration. `now` is callsheet's timestamp after this end."""
        self.count(self._now or now, now, counted)

    @contextmanager
    def before_last_change(self) -> Iterator[None]:
        """Within the `with` block, let `state.timestamp` leave out the step, epoch or iteration that was counted last."""
        self.looks_back = True
        try:
            yield
        finally:
            self.looks_back = False

    def resume_clock(self) -> None:
        """Resume the training clock after an evaluation."""
        self._since += time.perf_counter() - self._paused

    def pause_clock(self) -> None:
        """Pause the training clock during an evaluation."""
        self._paused = time.perf_counter()

    def start(self, ctx: Context) -> None:
        """Start the training clock, which measures the seconds of each step.

        If a run is resumed without the counters, count the samples and tokens of the earlier run.
        """
        self._since = time.perf_counter()
        if not self.counted.sample:
            samples, tokens = self._uncounted_samples_and_tokens(ctx)
            self.counted = self.counted._replace(sample=samples, token=tokens)

    def begin_eval(self) -> None:
        """Set the counters of evaluations to 0, because a prediction or the evaluation of a dataset begins."""
        self.eval_counted, self.eval_batches, self._eval_since = Counted(), 0, time.perf_counter()

    def count_eval_step(self, ctx: Context) -> None:
        """Count a batch of the evaluation or prediction."""
        now = time.perf_counter()
        self.eval_counted = self.eval_counted.next_batch(*counts_in_all(ctx), now - self._eval_since)
        self._eval_since = now
        self.eval_batches += 1

    def end_eval(self, ctx: Context) -> None:
        """Set the counter of samples to their exact number at the end of an evaluation, if it is known."""
        if ctx.eval_samples is not None:
            self.eval_counted = self.eval_counted._replace(sample=ctx.eval_samples, sample_in_epoch=ctx.eval_samples)

    def timestamp(self, at: Timestamp, counted: Counted) -> Any:
        """Return the progress of the run as a Composer `Timestamp`.

        The `Timestamp` is created when it is needed, and cached until the progress changes.
        """
        if self._made[0] is not at or self._made[1] is not counted:
            self._made = (at, counted, self.timestamp_of(at, counted))
        return self._made[2]

    def timestamp_of(self, at: Timestamp, counted: Counted) -> Any:
        """Create a Composer `Timestamp` from callsheet's timestamp (`at`) and the counts of samples, tokens and seconds (`counted`)."""
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
        """Convert callsheet's `Time` to Composer's `Time`."""
        value = float(ours.value) if ours.unit.value == "dur" else int(ours.value)
        return self.kinds.Time(value, ours.unit.value)
