"""Runs Composer's callbacks and loggers as callbacks of callsheet (guests)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from callsheet.bridges.composer.names import COMPOSER_EVENTS, Event, to_their_names
from callsheet.bridges.composer.run import ComposerRun, Counted, Kinds
from callsheet.bridges.guest_base import Guest, no_guest
from callsheet.core.callback import Phase, at
from callsheet.core.context import Context
from callsheet.core.wrappers import Handler

logger = logging.getLogger("callsheet")

_runs: WeakKeyDictionary[Context, dict[bool, ComposerRun]] = WeakKeyDictionary()
"""For each run, by the run's context: the state that the run's Composer callbacks share.

Callbacks that derive from Composer's own classes share the state under the key True, which uses Composer's types. All others
share the state under the key False.
"""


def _is_in_an_epoch(ctx: Context) -> bool:
    return ctx.state.timestamp.batch_in_epoch > 0


EVENT_CONDITIONS: Mapping[str, Callable[[Context], bool]] = {
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
"""For each event of Composer that is fired only under a condition: a function that returns whether the condition is met."""


def guest(
    foreign: Any, *, name: str = "", phase: Phase | None = None, strict: bool = True, run: ComposerRun | None = None
) -> ComposerGuest:
    """Wrap a callback or logger of Composer, or of `callsheet.compat.composer`, as a callsheet callback.

    The callback is called for Composer's forty events in Composer's order. At the run's end its `close` is called, and after
    the `close` of all Composer callbacks its `post_close`. It receives a State and a Logger that have some of the attributes
    of Composer's own. `state.stop_training()` requests a stop of callsheet's loop. What the callback logs is in callsheet's metrics
    records, and its `state_dict` is in callsheet's checkpoints.

    Args:
        foreign: the callback, an instance. If it overrides `run_event`, only this method is called, for every event.
        name: the name under which the callback's state is saved; by default that of its class.
        phase: the callback's phase; by default `measure`, and `report` for a logger.
        strict: has no effect, because callsheet fires every event of Composer.
        run: the state that the run's Composer callbacks share, if the caller has created it, as `callsheet.compat.composer` does.

    Returns:
        A callback for `Trainer(callbacks=[...])`, `attach` or a host of another framework.

    Raises:
        RegistrationError: the callback has none of Composer's methods.
    """
    kind = ComposerLoggerGuest if isinstance(foreign, Kinds.of(foreign).logger) else ComposerGuest
    return kind(foreign, name=name, phase=phase, strict=strict, run=run)


class ComposerGuest(Guest):
    """The callsheet callback that `guest` returns: it calls a callback of MosaicML Composer.

    The arguments are those of `guest`.
    """

    FRAMEWORK = "Composer"
    EVENTS = COMPOSER_EVENTS
    OWN_HANDLERS = {
        "on_run_start": "_begin",
        "on_train_start": "_start_clock",
        "on_train_step_end": "_count_step",
        "on_epoch_end": "_count_epoch",
        "on_round_end": "_count_round",
        "on_eval_all_start": "_pause_clock",
        "on_eval_start": "_begin_eval",
        "on_eval_step_end": "_count_eval_step",
        "on_eval_end": "_keep_eval_metrics",
        "on_eval_all_end": "_resume_clock",
        "on_predict_start": "_begin_eval",
        "on_predict_step_end": "_count_eval_step",
        "on_run_end": "_close",
    }
    PHASE: ClassVar[Phase] = "measure"

    def __init__(
        self, foreign: Any, *, name: str = "", phase: Phase | None = None, strict: bool = True, run: ComposerRun | None = None
    ) -> None:
        self._kinds = Kinds.of(foreign)
        if isinstance(foreign, type) or not any(hasattr(foreign, each) for each in ("run_event", *Event)):
            raise no_guest(foreign, "a callback with one of the methods of Composer's")
        own, inherited = getattr(type(foreign), "run_event", None), getattr(self._kinds.base, "run_event", None)
        self._catches_all = own is not None and own is not inherited
        self._given = self._run = run
        super().__init__(foreign, name=name, phase=phase or self.PHASE, strict=strict)

    def listens_to(self, theirs: str) -> bool:
        """Return whether the wrapped callback overrides the method `theirs`, or `run_event`, which is called for every event."""
        inherited = getattr(self._kinds.base, theirs, None)
        method = getattr(self.foreign, theirs, None)
        return self._catches_all or (method is not None and getattr(method, "__func__", method) is not inherited)

    def handler(self, theirs: str, method: Callable[..., Any]) -> Handler:
        """Return a handler that calls the wrapped callback with State and Logger.

        If `EVENT_CONDITIONS` has a condition for the event, the handler calls the callback only when the condition is met.
        """
        call = self._call_of_run_event(theirs) if self._catches_all else self._call_of_method(method)
        is_fired = EVENT_CONDITIONS.get(theirs)
        return call if is_fired is None else lambda ctx: call(ctx) if is_fired(ctx) else None

    def _call_of_method(self, method: Callable[..., Any]) -> Handler:
        def call(ctx: Context) -> None:
            run = self._run or self._join_run(ctx)
            run.ctx = ctx
            method(run.state, run.logger)

        return call

    def _call_of_run_event(self, theirs: str) -> Handler:
        event, method = self._kinds.Event(theirs), self.foreign.run_event

        def call(ctx: Context) -> None:
            run = self._run or self._join_run(ctx)
            run.ctx = ctx
            method(event, run.state, run.logger)

        return call

    # --- the run ---

    def _begin(self, ctx: Context) -> None:
        self._run = self._given
        self._join_run(ctx)

    def _join_run(self, ctx: Context) -> ComposerRun:
        run = self._run
        if run is None:
            runs = _runs.setdefault(ctx, {})
            run = self._run = runs.setdefault(self._kinds.is_theirs, ComposerRun(self._kinds))
        if self not in run.guests:
            run.guests.append(self)
        run.ctx = ctx
        return run

    def _close(self, ctx: Context) -> None:
        """Call the wrapped callback's `close`. When all Composer callbacks of the run are closed, call `post_close` of each.

        Errors are only logged.
        """
        run = self._run
        if run is None:
            return
        run.ctx = ctx
        run.guests.remove(self)
        try:
            getattr(self.foreign, "close", _nothing)(run.state, run.logger)
        except Exception as error:
            logger.error("%s.close() failed, so its post_close() is not called: %s", self.name, error, exc_info=error)
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

    # --- counting, which the first guest does for all guests ---

    def _counts(self) -> ComposerRun | None:
        run = self._run
        return run if run is not None and run.guests[0] is self else None

    def _start_clock(self, ctx: Context) -> None:
        if run := self._counts():
            run.state.restart()
            run.start(ctx)

    def _count_step(self, ctx: Context) -> None:
        if run := self._counts():
            run.count_step(ctx)

    def _count_epoch(self, ctx: Context) -> None:
        if (run := self._counts()) and EVENT_CONDITIONS["epoch_end"](ctx):
            run.count_exactly(ctx)
            run.count_end(ctx.state.timestamp, run.counted.next_epoch())

    def _count_round(self, ctx: Context) -> None:
        if (run := self._counts()) and EVENT_CONDITIONS["iteration_end"](ctx):
            run.count_end(ctx.state.timestamp, run.counted.next_iteration())

    def _pause_clock(self, ctx: Context) -> None:
        if run := self._counts():
            run.pause_clock()

    def _begin_eval(self, ctx: Context) -> None:
        if run := self._counts():
            run.begin_eval()

    def _count_eval_step(self, ctx: Context) -> None:
        if run := self._counts():
            run.count_eval_step(ctx)

    def _keep_eval_metrics(self, ctx: Context) -> None:
        if run := self._counts():
            run.end_eval(ctx)
            logged = {name.removeprefix(f"{ctx.eval_name}/"): value for name, value in ctx.logged(ctx.eval_name).items()}
            run.evaluated[ctx.eval_name] = {**ctx.eval_losses, **logged}

    def _resume_clock(self, ctx: Context) -> None:
        if run := self._counts():
            run.resume_clock()

    # --- state ---

    def state_dict(self) -> Mapping[str, Any]:
        """Return the wrapped callback's state, and the samples, tokens and times that Composer counts at every batch."""
        foreign = dict(super().state_dict())
        return {"foreign": foreign, "counted": list(self._run.counted if self._run is not None else Counted())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state.get("foreign", {}))
        if self._run is not None and "counted" in state:
            self._run.counted = Counted(*state["counted"])


class ComposerLoggerGuest(ComposerGuest):
    """The callsheet callback that `guest` returns for a Composer logger (`LoggerDestination`).

    The logger receives Composer's events, and the values of callsheet's metrics records under Composer's names.
    """

    OWN_HANDLERS = {**ComposerGuest.OWN_HANDLERS, "on_log": "_record"}
    PHASE: ClassVar[Phase] = "report"

    def __init__(
        self, foreign: Any, *, name: str = "", phase: Phase | None = None, strict: bool = True, run: ComposerRun | None = None
    ) -> None:
        super().__init__(foreign, name=name, phase=phase, strict=strict, run=run)
        begins = self.on_run_start
        # At the start of a run, Composer calls loggers before callbacks. So handle `on_run_start` in the first phase, `change`.
        self.on_run_start = at("change")(lambda ctx: begins(ctx))  # type: ignore[method-assign]

    def _record(self, ctx: Context) -> None:
        run = self._run or self._join_run(ctx)
        run.ctx = ctx
        self.foreign.log_metrics(
            to_their_names(ctx.record.values, list(run.evaluated), run.train_metrics, run.loss_names), step=ctx.record.step
        )

    def log_hyperparameters(self, ctx: Context, values: Mapping[str, Any]) -> None:
        """Pass the run's settings to the wrapped logger."""
        self.foreign.log_hyperparameters(dict(values))

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Pass a table to the wrapped logger."""
        self.foreign.log_table(list(columns), [list(row) for row in rows], name, step=ctx.step)

    def log_images(self, ctx: Context, name: str, images: Sequence[Any]) -> None:
        """Pass images to the wrapped logger."""
        self.foreign.log_images(list(images), name, step=ctx.step)

    def log_file(self, ctx: Context, name: str, path: Path) -> None:
        """Upload a file through the wrapped logger."""
        run = self._run or self._join_run(ctx)
        self.foreign.upload_file(run.state, name, path, overwrite=True)


def _nothing(*_: Any) -> None:
    """Do nothing. Takes the place of a method `close` or `post_close` that a callback does not have."""
