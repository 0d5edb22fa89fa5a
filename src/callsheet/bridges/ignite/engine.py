"""The engine to which Ignite's handlers are attached in callsheet's loop. The loop fires the engine's events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import ismethod, unwrap
from typing import Any
from weakref import ReferenceType

from ignite.engine import Engine, Events, State
from torch import Tensor

from callsheet.bridges.guest_base import NotOnTheList
from callsheet.core.context import Context
from callsheet.errors import NotSupported

REJECTED_HANDLERS: Mapping[str, str] = {
    "BasicTimeProfiler": "it measures Ignite's loop, and callsheet runs its own; use callsheet's cost report",
    "HandlersTimeProfiler": "it measures Ignite's loop, and callsheet runs its own; use callsheet's cost report",
    "FastaiLRFinder": "it runs the trainer itself",
}
"""Ignite's handlers that cannot be guests, with the reason for each."""

ALLOWED_METHODS = frozenset(
    {
        *("add_event_handler", "has_event_handler", "remove_event_handler", "on", "register_events", "has_registered_events"),
        *("fire_event", "terminate", "state_dict_user_keys"),
    }
)
"""The methods of a `GuestEngine` that an Ignite handler may call.

A handler may also read `state`, `last_event_name`, `should_terminate` and `logger`.
"""


class GuestState(State):  # type: ignore[misc]  # mypy does not read Ignite's types
    """The `engine.state` of a `GuestEngine`. It lacks Ignite's `dataloader` and `seed`. Handlers may add attributes to it."""

    def __init__(self) -> None:
        super().__init__()
        del self.dataloader, self.seed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotOnTheList(
            f"the state of an Ignite engine has here no {name!r}: a guest may use {', '.join(sorted(vars(self)))}, and what handlers add"
        )


class GuestEngine(Engine):  # type: ignore[misc]  # mypy does not read Ignite's types
    """Takes the place of Ignite's trainer when Ignite's handlers run in callsheet's loop.

    They may call only the methods in `ALLOWED_METHODS`. `engine.state` counts steps as iterations, and holds the batch, the output
    and the metrics. `terminate()` requests that the run stops.

    Args:
        output: returns the value of `engine.state.output` at the end of a step. The default is the step's loss, a tensor.
    """

    def __init__(self, output: Callable[[Context], Any] = lambda ctx: ctx.loss) -> None:
        super().__init__(_runs_nothing)
        self._at: dict[int, tuple[Any, list[Any]]] = {}  # `id` of an event -> the event and its handlers
        self.state = GuestState()
        self.output = output
        self.evaluators: dict[str, GuestEngine] = {}
        self.ctx: Context | None = None
        """The context of the latest event. None before training has begun."""
        self.is_taken = False
        """Whether a guest uses this engine. An engine can belong to only one guest."""
        self.fired_events: frozenset[str] | None = None
        """The names of the events that are fired in this run. None before training has begun."""

    def evaluator(self, name: str = "validation", output: Callable[[Context], Any] | None = None) -> GuestEngine:
        """Return the engine that takes the place of Ignite's evaluator for the dataset `name`. The first call creates it.

        After an evaluation, its `state.metrics` contain the evaluation's results and the values of attached Ignite metrics.

        Args:
            name: the name of the dataset.
            output: returns the value of the engine's `state.output` after each batch. None: the model's output, or a tuple of
                output and targets if the batch is a pair, as with `create_supervised_evaluator`. It has no effect if the engine
                exists already.
        """
        if name not in self.evaluators:
            self.evaluators[name] = _GuestEvaluator(output or _outputs_and_targets)
        return self.evaluators[name]

    def add_event_handler(self, event_name: Any, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Add a handler for an event, as `Engine.add_event_handler` of Ignite does.

        Args:
            event_name: an event of Ignite's, with or without filter, or several of them, joined by `|`.
            handler: a function. It is called with the engine (unless it takes no arguments) and the further arguments given here.

        Returns:
            What Ignite returns: an object with which the handler can be removed.

        Raises:
            NotSupported: the handler cannot be a guest, or training has begun and the event is not fired in this run.
        """
        reject_handler(handler)
        name = getattr(event_name, "name", "")
        if self.fired_events is not None and name in Events.__members__ and name not in self.fired_events:
            raise NotSupported(
                f"{label_of_handler(handler)} was attached to {name} of Ignite during training: attach it before training begins"
            )
        self._at.clear()
        return super().add_event_handler(event_name, handler, *args, **kwargs)

    def remove_event_handler(self, handler: Callable[..., Any], event_name: Any) -> None:
        """Remove a handler from an event, as `Engine.remove_event_handler` of Ignite does.

        Args:
            handler: the handler.
            event_name: the event for which it was added.
        """
        self._at.clear()
        super().remove_event_handler(handler, event_name)

    def _fire_event(self, event_name: Any, *event_args: Any) -> None:
        """Fire an event as Ignite does, but faster.

        This method writes no log line, and avoids the event's hash, which is slow because Python code computes it.
        """
        known = self._at.get(id(event_name))
        if known is None:
            known = self._at[id(event_name)] = event_name, self._event_handlers[event_name]
        self.last_event_name = event_name
        for handler, args, kwargs in known[1]:
            if args and type(args[0]) is ReferenceType:  # Ignite stores a weak reference to the engine as the first argument
                if len(args) == 1 and not (kwargs or event_args):
                    handler(self)
                else:
                    handler(self, *event_args, *args[1:], **kwargs)
            else:
                handler(*event_args, *args, **kwargs)

    def terminate(self, skip_completed: bool = False) -> None:
        """Request that callsheet's run stops. After this call, only Ignite's events at the end of a run are fired.

        Args:
            skip_completed: whether to leave out the event `COMPLETED` too.

        Raises:
            NotSupported: training has not begun.
        """
        if self.ctx is None:
            raise NotOnTheList("an Ignite engine can be terminated here only after training has begun")
        super().terminate(skip_completed)
        self.ctx.control.stop("a guest has terminated the engine")

    def listens_to(self, event: Events) -> bool:
        """Return whether an event has handlers.

        Args:
            event: an event of Ignite's.
        """
        return bool(self._event_handlers.get(event))

    def owners(self) -> list[Any]:
        """Return the owners of the attached handlers, without duplicates. A method's owner is its object; a function is its own owner."""
        found: dict[int, Any] = {}
        for registered in self._event_handlers.values():
            for handler, _, _ in registered:
                handler = _unwrap_handler(handler)
                owner = getattr(handler, "__self__", handler)
                found.setdefault(id(owner), owner)
        return list(found.values())


class _GuestEvaluator(GuestEngine):
    def terminate(self, skip_completed: bool = False) -> None:
        raise NotOnTheList("an evaluator of Ignite's cannot be terminated here: evaluations run to their end")


def _make_rejecting_method(name: str) -> Callable[..., None]:
    def reject(self: GuestEngine, *args: Any, **kwargs: Any) -> None:
        raise NotOnTheList(
            f"an Ignite engine has here no {name}(): a guest may call {', '.join(sorted(ALLOWED_METHODS))}; for the rest, run the handler in Ignite"
        )

    return reject


for _name in dir(Engine):
    if not _name.startswith("_") and callable(getattr(Engine, _name)) and _name not in ALLOWED_METHODS:
        setattr(GuestEngine, _name, _make_rejecting_method(_name))


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return only those metrics that are a single number: an `int`, a `float` or a tensor with one element."""
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _outputs_and_targets(ctx: Context) -> Any:
    batch = ctx.batch
    return (ctx.outputs, batch[1]) if isinstance(batch, (tuple, list)) and len(batch) == 2 else ctx.outputs


def _runs_nothing(engine: Engine, batch: Any) -> None: ...


def reject_handler(handler: Any) -> None:
    """Raise NotSupported if the handler cannot be a guest; `REJECTED_HANDLERS` lists such handlers."""
    why = REJECTED_HANDLERS.get(label_of_handler(handler))
    if why is not None:
        raise NotSupported(f"{label_of_handler(handler)} cannot be a guest: {why}")


def label_of_handler(handler: Any) -> str:
    """Return a handler's name for messages: the function's name, or the class name of an object."""
    handler = _unwrap_handler(handler)
    owner = handler.__self__ if ismethod(handler) else handler
    return getattr(owner, "__qualname__", None) or type(owner).__name__


def _unwrap_handler(handler: Any) -> Any:
    """Return the original handler. Ignite wraps a handler whose event has a filter, such as `every=10`, in another function."""
    return unwrap(handler, stop=ismethod)
