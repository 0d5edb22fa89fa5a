"""Guests from Composer: its callbacks and loggers in our loop, and in every loop that has a host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from callsheet.bridges.composer.names import COMPOSER_EVENTS, Event, to_their_names
from callsheet.bridges.composer.run import ComposerRun, Counted, Kinds
from callsheet.bridges.guest_base import Guest, no_guest
from callsheet.callback import at
from callsheet.context import Context
from callsheet.sheet import Handler

logger = logging.getLogger("callsheet")

_runs: WeakKeyDictionary[Context, dict[bool, ComposerRun]] = WeakKeyDictionary()
"""By a run's context: what its guests share, those that Composer's own classes are the base of, and the others."""


def _is_in_an_epoch(ctx: Context) -> bool:
    return ctx.state.timestamp.batch_in_epoch > 0


ONLY_WHERE: Mapping[str, Callable[[Context], bool]] = {
    "iteration_start": lambda ctx: not _is_in_an_epoch(ctx) and not ctx.state.timestamp.epoch_in_round,
    "epoch_start": lambda ctx: not _is_in_an_epoch(ctx),
    "after_dataloader": lambda ctx: ctx.batch is not None,
    "batch_checkpoint": lambda ctx: ctx.boundary == "step",
    "epoch_end": lambda ctx: ctx.state.timestamp.epoch >= ctx.epoch,
    "epoch_checkpoint": lambda ctx: ctx.boundary == "epoch",
    "iteration_end": lambda ctx: (
        bool(ctx.state.timestamp.round) and not ctx.state.timestamp.epoch_in_round and not _is_in_an_epoch(ctx)
    ),
    "iteration_checkpoint": lambda ctx: ctx.boundary == "round",
    "eval_before_all": lambda ctx: not ctx.standalone,
    "eval_after_all": lambda ctx: not ctx.standalone,
    "eval_standalone_start": lambda ctx: ctx.standalone,
    "eval_standalone_end": lambda ctx: ctx.standalone,
}
"""The events of Composer that are told at one of ours only now and then."""


def guest(foreign: Any, *, name: str = "", phase: str = "", strict: bool = True, run: ComposerRun | None = None) -> ComposerGuest:
    """A callback or logger that was written for Composer, or for `callsheet.compat.composer`, as a callback of ours.

    It is told Composer's forty events in Composer's order, then `close`, and `post_close` once all of the run's guests are closed. It
    is given a State and a Logger that have what `state.py` lists; `state.stop_training()` asks our loop to stop, and what it logs
    goes into our records. Its `state_dict` is in our checkpoints, under its own name.

    Args:
        foreign: the callback, an instance; one that overrides `run_event` hears everything there, and by no other method.
        name: under which its state is kept; else that of its class.
        phase: where in each event's order it stands; else `measure`, and `report` for a logger.
        strict: as in other bridges; Composer has no event that is never told here.
        run: what its guests share, for a Trainer that gives it to them.

    Raises:
        RegistrationError: it has none of Composer's methods.
    """
    kind = ComposerLoggerGuest if isinstance(foreign, Kinds.of(foreign).logger) else ComposerGuest
    return kind(foreign, name=name, phase=phase, strict=strict, run=run)


class ComposerGuest(Guest):
    """See `guest`."""

    FRAMEWORK = "Composer"
    EVENTS = COMPOSER_EVENTS
    OWN = {
        "on_run_start": "_begin",
        "on_train_start": "_trains",
        "on_fetch_end": "_fetched",
        "on_train_step_end": "_stepped",
        "on_epoch_end": "_epoch_over",
        "on_round_end": "_round_over",
        "on_eval_all_start": "_evaluates",
        "on_eval_start": "_begins_apart",
        "on_eval_step_end": "_stepped_apart",
        "on_eval_end": "_judged",
        "on_eval_all_end": "_evaluated",
        "on_predict_start": "_begins_apart",
        "on_predict_step_end": "_stepped_apart",
        "on_run_end": "_close",
    }
    PHASE = "measure"

    def __init__(
        self, foreign: Any, *, name: str = "", phase: str = "", strict: bool = True, run: ComposerRun | None = None
    ) -> None:
        self._kinds = Kinds.of(foreign)
        if isinstance(foreign, type) or not any(hasattr(foreign, each) for each in ("run_event", *Event)):
            raise no_guest(foreign, "a callback with one of the methods of Composer's")
        own, inherited = getattr(type(foreign), "run_event", None), getattr(self._kinds.base, "run_event", None)
        self._catches_all = own is not None and own is not inherited
        self._given = self._run = run
        super().__init__(foreign, name=name, phase=phase or self.PHASE, strict=strict)

    def listens_to(self, theirs: str) -> bool:
        """Whether the foreign callback has something to do at one of Composer's events: with `run_event` of its own at every one."""
        inherited = getattr(self._kinds.base, theirs, None)
        method = getattr(self.foreign, theirs, None)
        return self._catches_all or (method is not None and getattr(method, "__func__", method) is not inherited)

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """What calls it with State and Logger, where the event is one of Composer's this time."""
        tell = self._catching(theirs) if self._catches_all else self._telling(method)
        is_told = ONLY_WHERE.get(theirs)
        return tell if is_told is None else lambda ctx: tell(ctx) if is_told(ctx) else None

    def _telling(self, method: Callable[..., Any]) -> Handler:
        def tell(ctx: Context) -> None:
            run = self._run or self._joined(ctx)
            run.ctx = ctx
            method(run.state, run.logger)

        return tell

    def _catching(self, theirs: str) -> Handler:
        event, method = self._kinds.Event(theirs), self.foreign.run_event

        def tell(ctx: Context) -> None:
            run = self._run or self._joined(ctx)
            run.ctx = ctx
            method(event, run.state, run.logger)

        return tell

    # --- the run ---

    def _begin(self, ctx: Context) -> None:
        self._run = self._given
        self._joined(ctx)

    def _joined(self, ctx: Context) -> ComposerRun:
        run = self._run
        if run is None:
            runs = _runs.setdefault(ctx, {})
            run = self._run = runs.setdefault(self._kinds.is_theirs, ComposerRun(self._kinds))
        if self not in run.guests:
            run.guests.append(self)
        run.ctx = ctx
        return run

    def _close(self, ctx: Context) -> None:
        """The run's end: close it; the last of the guests lets all know that all are closed. Errors are reported, as Composer does."""
        run = self._run
        if run is None:
            return
        run.ctx = ctx
        run.guests.remove(self)
        try:
            getattr(self.foreign, "close", _nothing)(run.state, run.logger)
        except Exception as error:
            logger.error("%s.close() failed, and its post_close() is left out: %s", self.name, error, exc_info=error)
        else:
            run.closed.append(self)
        if run.guests:
            return
        for each in run.closed:
            try:
                getattr(each.foreign, "post_close", _nothing)()
            except Exception as error:
                logger.error("%s.post_close() failed: %s", each.name, error, exc_info=error)
        run.closed.clear()
        self._forget(run)

    def _forget(self, run: ComposerRun) -> None:
        self._run = self._given

    # --- what is counted, by the first guest for all ---

    def _counts(self) -> ComposerRun | None:
        run = self._run
        return run if run is not None and run.guests[0] is self else None

    def _trains(self, ctx: Context) -> None:
        if run := self._counts():
            run.start_clock()

    def _fetched(self, ctx: Context) -> None:
        if run := self._counts():
            run.fetched(ctx)

    def _stepped(self, ctx: Context) -> None:
        if run := self._counts():
            run.stepped(ctx)

    def _epoch_over(self, ctx: Context) -> None:
        if (run := self._counts()) and ONLY_WHERE["epoch_end"](ctx):
            run.counted_before, run.counted = run.counted, run.counted.next_epoch()

    def _round_over(self, ctx: Context) -> None:
        if (run := self._counts()) and ONLY_WHERE["iteration_end"](ctx):
            run.counted_before, run.counted = run.counted, run.counted.next_iteration()

    def _evaluates(self, ctx: Context) -> None:
        if run := self._counts():
            run.pause_clock()

    def _begins_apart(self, ctx: Context) -> None:
        if run := self._counts():
            run.begin_apart()

    def _stepped_apart(self, ctx: Context) -> None:
        if run := self._counts():
            run.stepped_apart(ctx)

    def _judged(self, ctx: Context) -> None:
        if run := self._counts():
            logged = {name.removeprefix(f"{ctx.eval_name}/"): value for name, value in ctx.logged(ctx.eval_name).items()}
            run.evaluated[ctx.eval_name] = {**ctx.eval_losses, **logged}

    def _evaluated(self, ctx: Context) -> None:
        if run := self._counts():
            run.resume_clock()

    # --- state ---

    def state_dict(self) -> Mapping[str, Any]:
        """The foreign callback's own, and what has been counted."""
        foreign = dict(super().state_dict())
        return {"foreign": foreign, "counted": list(self._run.counted if self._run is not None else Counted())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give it back."""
        super().load_state_dict(state.get("foreign", {}))
        if self._run is not None and "counted" in state:
            self._run.counted = self._run.counted_before = Counted(*state["counted"])


class ComposerLoggerGuest(ComposerGuest):
    """A LoggerDestination: it is given our records, under Composer's names, beside the events."""

    OWN = {**ComposerGuest.OWN, "on_log": "_record"}
    PHASE = "report"

    def __init__(
        self, foreign: Any, *, name: str = "", phase: str = "", strict: bool = True, run: ComposerRun | None = None
    ) -> None:
        super().__init__(foreign, name=name, phase=phase, strict=strict, run=run)
        begins = self.on_run_start
        self.on_run_start = at("change")(lambda ctx: begins(ctx))  # type: ignore[method-assign]  # loggers come first there

    def _record(self, ctx: Context) -> None:
        run = self._run or self._joined(ctx)
        run.ctx = ctx
        self.foreign.log_metrics(to_their_names(ctx.record.values, list(run.evaluated)), step=ctx.record.step)

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Settings of the run."""
        self.foreign.log_hyperparameters(dict(values))

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table."""
        self.foreign.log_table(list(columns), [list(row) for row in rows], name, step=ctx.step)

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Images."""
        self.foreign.log_images(list(images), name, step=ctx.step)

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """A file."""
        run = self._run or self._joined(ctx)
        self.foreign.upload_file(run.state, name, path, overwrite=True)


def _nothing(*_: Any) -> None:
    """What a callback without a base has in the place of methods that it leaves out."""
