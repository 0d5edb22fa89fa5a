"""Runs Ignite's handlers in callsheet's loop (as guests)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from ignite.engine import Events
from ignite.metrics import Metric

from callsheet.bridges.guest_base import Guest, NotOnTheList, no_guest, reject_never
from callsheet.bridges.ignite.engine import GuestEngine, label_of_handler, numbers, reject_handler
from callsheet.bridges.ignite.internals import GUEST, PACKAGE
from callsheet.core.callback import Callback, Phase
from callsheet.core.context import Context
from callsheet.core.time import TimeUnit
from callsheet.core.wrappers import Handler
from callsheet.errors import RegistrationError

GUEST_EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_train_start": ("STARTED",),
    "on_epoch_start": ("EPOCH_STARTED",),
    "on_fetch_start": ("GET_BATCH_STARTED",),
    "on_fetch_end": ("GET_BATCH_COMPLETED",),
    "on_train_step_start": ("ITERATION_STARTED",),
    "on_train_step_end": ("ITERATION_COMPLETED",),
    "on_epoch_end": ("EPOCH_COMPLETED",),
    "on_train_end": ("TERMINATE", "COMPLETED"),
    "on_exception": ("EXCEPTION_RAISED",),
    "on_eval_start": ("evaluator_started",),
    "on_eval_step_start": ("evaluator_iteration_started",),
    "on_eval_step_end": ("evaluator_iteration_completed",),
    "on_eval_all_end": ("evaluators_completed",),
}
"""For each event of callsheet, the events of Ignite's trainer that are fired then; for evaluators, a key of `EVALUATOR_EVENTS`."""

EVALUATOR_EVENTS: Mapping[str, tuple[Events, ...]] = {
    "evaluator_started": (Events.STARTED, Events.EPOCH_STARTED),
    "evaluator_iteration_started": (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED),
    "evaluator_iteration_completed": (Events.ITERATION_COMPLETED,),
    "evaluators_completed": (Events.EPOCH_COMPLETED, Events.COMPLETED),
}
"""For each name that `GUEST_EVENTS` uses for evaluators, the Ignite events of an evaluator that are fired together."""

TRAINER_ONLY_EVENTS = ("TERMINATE", "EXCEPTION_RAISED")
"""Events of Ignite that are fired for a trainer, and never for an evaluator."""


def guest(
    foreign: Any,
    event: Any = None,
    *,
    to_save: Mapping[str, Any] | None = None,
    name: str = "",
    phase: Phase = "measure",
    strict: bool = True,
) -> Callback:
    """Return one callsheet callback that wraps Ignite's handlers: `guest(Timer())`, `guest(TerminateOnNan(), Events.ITERATION_COMPLETED)`.

    To use several handlers in one callback, or handlers whose `attach` takes more arguments, attach them to a `GuestEngine` as to
    a trainer, and pass this engine. If a handler has a `state_dict`, callsheet's checkpoints contain its state.

    Args:
        foreign: a handler whose `attach` takes only the engine; a handler that is called at `event`; or a `GuestEngine`.
        event: an event of Ignite's, with or without filter, or several of them, joined by `|`.
        to_save: more objects to save, by name, such as the model of an `EMAHandler`.
        name: the key of the state in checkpoints. Empty: the name of the handler's class.
        phase: the callback's place in the order of each event.
        strict: whether to raise an error if a handler listens to an event that callsheet never fires; else log a warning.

    Raises:
        NotSupported: the handler cannot be a guest, or listens to an event that is never fired. The message names it.
        RegistrationError: `foreign` is no handler, or its engine belongs to another guest.

    Examples:
        >>> from ignite.handlers import Timer
        >>> timer = Timer()
        >>> callback = guest(timer)
    """
    if isinstance(foreign, GuestEngine):
        return IgniteGuest(foreign, to_save=to_save, name=name, phase=phase, strict=strict)
    if isinstance(foreign, (type, list, tuple, Callback)) or not (callable(foreign) or hasattr(foreign, "attach")):
        raise no_guest(foreign, "a handler of Ignite's")
    reject_handler(foreign)
    trainer = GuestEngine()
    if event is not None:
        trainer.add_event_handler(event, foreign)
    elif hasattr(foreign, "attach"):
        foreign.attach(trainer)
    else:
        raise RegistrationError(f"{foreign!r} has no attach(engine): give the event at which it is called, guest(handler, event)")
    return IgniteGuest(trainer, to_save=to_save, name=name or type(foreign).__name__, phase=phase, strict=strict)


class IgniteGuest(Guest):
    """The callsheet callback that `guest` returns: it calls the Ignite handlers that are attached to the engine `foreign`.

    Make it with `guest`, which describes `to_save` and the `options` that every guest has.
    """

    FRAMEWORK: ClassVar[str] = "Ignite"
    PACKAGE, INTERNALS = PACKAGE, GUEST
    EVENTS: ClassVar[Mapping[str, tuple[str, ...]]] = GUEST_EVENTS
    OWN_HANDLERS: ClassVar[Mapping[str, str]] = {"on_train_start": "_begin"}
    NEVER_CALLED: ClassVar[tuple[str, ...]] = ("DATALOADER_STOP_ITERATION", "TERMINATE_SINGLE_EPOCH", "INTERRUPT")

    foreign: GuestEngine

    def __init__(self, foreign: GuestEngine, *, to_save: Mapping[str, Any] | None, **options: Any) -> None:
        if foreign.is_taken:
            raise RegistrationError("this engine belongs to a guest already: attach all handlers to it, and give it once")
        self._engines = [foreign, *foreign.evaluators.values()]
        self._has_metrics = any(isinstance(owner, Metric) for owner in foreign.owners())
        super().__init__(foreign, **options)
        foreign.is_taken = True
        self._to_save = dict(to_save or {})

    def listens_to(self, theirs: str) -> bool:
        """Return whether an Ignite handler is attached for the event `theirs`."""
        if theirs in EVALUATOR_EVENTS:
            events = EVALUATOR_EVENTS[theirs]
            # Handlers of an iteration's end read a count that `_evaluator_iteration_started` updates. So they need the start, too.
            if theirs == "evaluator_iteration_started":
                events += EVALUATOR_EVENTS["evaluator_iteration_completed"]
            return any(engine.listens_to(event) for engine in self.foreign.evaluators.values() for event in events)
        return self.foreign.listens_to(Events[theirs]) or (theirs == "EPOCH_COMPLETED" and self._has_metrics)

    def handler(self, theirs: str, method: Any) -> Handler:
        """Return the method of this class that fires Ignite's event `theirs`. For example, `_epoch_started` fires EPOCH_STARTED."""
        handler: Handler = getattr(self, f"_{theirs.lower()}")
        return handler

    def _reject(self, never: list[str], strict: bool) -> None:
        listeners: dict[str, list[str]] = {}
        for engine in self._engines:
            for event in (*self.NEVER_CALLED, *(() if engine is self.foreign else TRAINER_ONLY_EVENTS)):
                for handler, _, _ in engine._event_handlers[Events[event]]:
                    listeners.setdefault(label_of_handler(handler), []).append(event)
        for listener, events in listeners.items():
            reject_never(listener, events, self.FRAMEWORK, strict)

    # --- the trainer's events ---

    def _begin(self, ctx: Context) -> None:
        engine, longest = self.foreign, ctx.state.max_duration
        state = engine.state
        state.epoch_length = ctx.state.epoch_batches
        state.max_epochs = state.max_iters = None
        if longest is not None and longest.unit is TimeUnit.EPOCH:
            state.max_epochs = int(longest.value)
        elif longest is not None and longest.unit is TimeUnit.BATCH:
            state.max_iters = int(longest.value)
        for each in self._engines:
            each.should_terminate = False
            each.fired_events = frozenset(event.name for event in Events if each.listens_to(event))

    def _update(self, ctx: Context) -> Any:
        """Set the engine's state to the run's progress. Return the state, or None if a handler has terminated the engine."""
        engine = self.foreign
        if engine.should_terminate:
            return None
        engine.ctx = ctx
        state = engine.state
        state.iteration, state.epoch = ctx.step, ctx.epoch
        return state

    def _fire(self, event: Events, ctx: Context) -> None:
        if self._update(ctx) is not None:
            self.foreign._fire_event(event)

    def _started(self, ctx: Context) -> None:
        self._fire(Events.STARTED, ctx)

    def _epoch_started(self, ctx: Context) -> None:
        self._fire(Events.EPOCH_STARTED, ctx)

    def _get_batch_started(self, ctx: Context) -> None:
        state = self._update(ctx)
        if state is not None and (state.epoch_length is None or ctx.state.timestamp.batch_in_epoch < state.epoch_length):
            state.batch = None
            self.foreign._fire_event(Events.GET_BATCH_STARTED)

    def _get_batch_completed(self, ctx: Context) -> None:
        state = self._update(ctx)
        if state is not None and ctx.batch is not None:
            state.batch = ctx.batch
            self.foreign._fire_event(Events.GET_BATCH_COMPLETED)
            if state.batch is not ctx.batch:
                ctx.batch = state.batch

    def _iteration_started(self, ctx: Context) -> None:
        state = self._update(ctx)
        if state is not None:
            state.batch, state.output = ctx.batch, None
            self.foreign._fire_event(Events.ITERATION_STARTED)
            if state.batch is not ctx.batch:
                raise NotOnTheList(
                    "a guest may replace the batch of an Ignite engine at GET_BATCH_COMPLETED, not at ITERATION_STARTED"
                )

    def _iteration_completed(self, ctx: Context) -> None:
        state = self._update(ctx)
        if state is not None:
            state.batch, state.output = ctx.batch, self.foreign.output(ctx)
            self.foreign._fire_event(Events.ITERATION_COMPLETED)

    def _epoch_completed(self, ctx: Context) -> None:
        # An epoch that was left early is not counted. In Ignite too, EPOCH_COMPLETED is not fired for such an epoch.
        if ctx.state.timestamp.epoch >= ctx.epoch:
            self._fire(Events.EPOCH_COMPLETED, ctx)
            self._log(ctx, self.foreign, "ignite")

    def _terminate(self, ctx: Context) -> None:
        if self.foreign.should_terminate or ctx.control.stop_requested is not None:
            self.foreign._fire_event(Events.TERMINATE)

    def _completed(self, ctx: Context) -> None:
        if self.foreign.should_terminate != "skip_completed":
            self.foreign.state.iteration, self.foreign.state.epoch = ctx.step, ctx.epoch
            self.foreign._fire_event(Events.COMPLETED)

    def _exception_raised(self, ctx: Context) -> None:
        try:
            self.foreign._fire_event(Events.EXCEPTION_RAISED, ctx.exception)
        except BaseException as raised:
            # If an Ignite handler raises `ctx.exception` again, ignore that, because callsheet raises this exception itself.
            if raised is not ctx.exception:
                raise

    # --- the evaluators' events ---

    def _evaluator(self, ctx: Context, name: str) -> GuestEngine | None:
        """Return the evaluator of a dataset; None if there is none, or if a handler has terminated the trainer's engine.

        Before that, update the trainer's engine, because handlers of an evaluator may read it. In Ignite, an evaluator runs in a
        handler of the trainer, so the trainer's last event is the end of an epoch or of an iteration.
        """
        engine = self.foreign.evaluators.get(name)
        if engine is None or self._update(ctx) is None:
            return None
        self.foreign.last_event_name = (
            Events.ITERATION_COMPLETED if ctx.state.timestamp.batch_in_epoch else Events.EPOCH_COMPLETED
        )
        return engine

    def _evaluator_started(self, ctx: Context) -> None:
        engine = self._evaluator(ctx, ctx.eval_name)
        if engine is not None:
            state = engine.state
            state.iteration, state.epoch, state.max_epochs = 0, 0, 1
            engine._fire_event(Events.STARTED)
            state.epoch = 1
            engine._fire_event(Events.EPOCH_STARTED)

    def _evaluator_iteration_started(self, ctx: Context) -> None:
        engine = self.foreign.evaluators.get(ctx.eval_name)
        if engine is not None and not self.foreign.should_terminate:
            state = engine.state
            state.batch = None
            engine._fire_event(Events.GET_BATCH_STARTED)
            state.batch, state.output = ctx.batch, None
            engine._fire_event(Events.GET_BATCH_COMPLETED)
            state.iteration += 1
            engine._fire_event(Events.ITERATION_STARTED)

    def _evaluator_iteration_completed(self, ctx: Context) -> None:
        engine = self.foreign.evaluators.get(ctx.eval_name)
        if engine is not None and not self.foreign.should_terminate:
            engine.state.output = engine.output(ctx)
            engine._fire_event(Events.ITERATION_COMPLETED)

    def _evaluators_completed(self, ctx: Context) -> None:
        for name, results in ctx.eval_results.items():
            engine = self._evaluator(ctx, name)
            if engine is not None:
                engine.state.metrics.update(results)
                engine._fire_event(Events.EPOCH_COMPLETED)
                self._log(ctx, engine, name, known=results)
                engine._fire_event(Events.COMPLETED)

    def _log(self, ctx: Context, engine: GuestEngine, family: str, *, known: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Add the values of the attached Ignite metrics to callsheet's next metrics record."""
        if found := {name: value for name, value in numbers(engine.state.metrics).items() if name not in known}:
            ctx.log({f"{family}/{name}": value for name, value in found.items()})

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the objects in `to_save`, and of the attached handlers that have a `state_dict`, by class name."""
        return {name: part.state_dict() for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts().items():
            if name in state:
                part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for engine in self._engines:
            for owner in engine.owners():
                if hasattr(owner, "state_dict") and not any(owner is part for part in parts.values()):
                    kind = type(owner).__name__
                    parts[kind if kind not in parts else f"{kind}-{sum(each.startswith(kind) for each in parts)}"] = owner
        return parts | self._to_save
