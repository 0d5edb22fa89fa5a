"""What Ignite's handlers are attached to here: an engine that runs nothing, and is told what callsheet's loop tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import ismethod
from typing import Any
from weakref import ReferenceType

from ignite.engine import Engine, Events, State
from torch import Tensor

from callsheet.bridges.guest_base import NotOnTheList
from callsheet.context import Context
from callsheet.errors import NotSupported

NO_GUESTS: Mapping[str, str] = {
    "BasicTimeProfiler": "it measures the engine that runs the loop, which is not Ignite's here; callsheet's cost report does that",
    "HandlersTimeProfiler": "it measures the engine that runs the loop, which is not Ignite's here; callsheet's cost report does that",
    "FastaiLRFinder": "it runs the trainer by itself",
}
"""Handlers of Ignite's that cannot work here, and why."""

ALLOWED = frozenset(
    {
        *("add_event_handler", "has_event_handler", "remove_event_handler", "on", "register_events", "has_registered_events"),
        *("fire_event", "terminate", "state_dict_user_keys"),
    }
)
"""What a handler may call of its engine; beside them it may read `state`, `last_event_name`, `should_terminate` and `logger`."""


class GuestState(State):  # type: ignore[misc]  # Ignite's types are not read
    """Ignite's state, but for the data and the seed, which the loop does not have by that name. Handlers keep their own in it."""

    def __init__(self) -> None:
        super().__init__()
        del self.dataloader, self.seed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotOnTheList(
            f"the state of an Ignite engine has here no {name!r}: a guest may use {', '.join(sorted(vars(self)))}, and what handlers add"
        )


class GuestEngine(Engine):  # type: ignore[misc]  # Ignite's types are not read
    """In the place of a trainer, for handlers to be attached to; it does not run, it is told. See `ALLOWED` for what they may call.

    `engine.state` counts steps as iterations, and holds the batch, the output and the metrics. `terminate()` is a request that training
    stop.

    Args:
        output: what `engine.state.output` is at the end of a step: the step's loss, a tensor, if nothing else is said.
    """

    def __init__(self, output: Callable[[Context], Any] = lambda ctx: ctx.loss) -> None:
        super().__init__(_runs_nothing)
        self._at: dict[int, tuple[Any, list[Any]]] = {}  # an event and who is attached at it, by the event's identity
        self.state = GuestState()
        self.output = output
        self.evaluators: dict[str, GuestEngine] = {}
        self.ctx: Context | None = None
        """Where the loop is, once training has begun."""
        self.is_taken = False
        """It is a guest."""
        self.told: frozenset[str] | None = None
        """The events that are told, once training has begun."""

    def evaluator(self, name: str = "validation", output: Callable[[Context], Any] | None = None) -> GuestEngine:
        """The engine in the place of that which evaluates a dataset, the same for the same name.

        Its `state.output` is what the model gave, with the targets where the batch is a pair, as `create_supervised_evaluator` gives
        them; its `state.metrics` at the end are the results, and what metrics of Ignite's have found.
        """
        if name not in self.evaluators:
            self.evaluators[name] = _GuestEvaluator(output or _outputs_and_targets)
        return self.evaluators[name]

    def add_event_handler(self, event_name: Any, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As Ignite's own. Raises NotSupported for a handler that cannot work here, and within training for an event that is not told."""
        reject_handler(handler)
        name = getattr(event_name, "name", "")
        if self.told is not None and name in Events.__members__ and name not in self.told:
            raise NotSupported(
                f"{label_of_handler(handler)} wants to hear {name} of Ignite from now on: attach it before training begins"
            )
        self._at.clear()
        return super().add_event_handler(event_name, handler, *args, **kwargs)

    def remove_event_handler(self, handler: Callable[..., Any], event_name: Any) -> None:
        """As Ignite's own."""
        self._at.clear()
        super().remove_event_handler(handler, event_name)

    def _fire_event(self, event_name: Any, *event_args: Any) -> None:
        """As Ignite's own, but for a log line each time, and for the hash of the event, which is written in Python."""
        known = self._at.get(id(event_name))
        if known is None:
            known = self._at[id(event_name)] = event_name, self._event_handlers[event_name]
        self.last_event_name = event_name
        for handler, args, kwargs in known[1]:
            if args and type(args[0]) is ReferenceType:  # to this engine
                if len(args) == 1 and not (kwargs or event_args):
                    handler(self)
                else:
                    handler(self, *event_args, *args[1:], **kwargs)
            else:
                handler(*event_args, *args, **kwargs)

    def terminate(self, skip_completed: bool = False) -> None:
        """Ask that training stop; what the loop tells from then on is not passed on, but for the end."""
        if self.ctx is None:
            raise NotOnTheList("an Ignite engine can be terminated here only once training has begun")
        super().terminate(skip_completed)
        self.ctx.control.stop("a guest has terminated the engine")

    def listens_to(self, event: Events) -> bool:
        """Whether anybody is attached at this event."""
        return bool(self._event_handlers.get(event))

    def owners(self) -> list[Any]:
        """Who is attached, each once: of a method its object."""
        found: dict[int, Any] = {}
        for registered in self._event_handlers.values():
            for handler, _, _ in registered:
                handler = handler._parent() if hasattr(handler, "_parent") else handler  # it stands behind a filter
                owner = getattr(handler, "__self__", handler)
                found.setdefault(id(owner), owner)
        return list(found.values())


class _GuestEvaluator(GuestEngine):
    def terminate(self, skip_completed: bool = False) -> None:
        raise NotOnTheList("an evaluator of Ignite's cannot be terminated here: evaluations run to their end")


def _rejected(name: str) -> Callable[..., None]:
    def reject(self: GuestEngine, *args: Any, **kwargs: Any) -> None:
        raise NotOnTheList(
            f"an Ignite engine has here no {name}(): a guest may call {', '.join(sorted(ALLOWED))}; run it at home for the rest"
        )

    return reject


for _name in dir(Engine):
    if not _name.startswith("_") and callable(getattr(Engine, _name)) and _name not in ALLOWED:
        setattr(GuestEngine, _name, _rejected(_name))


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those metrics that are one number."""
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
    """Raise `NotSupported` where it is one of those that cannot be a guest."""
    why = NO_GUESTS.get(label_of_handler(handler))
    if why is not None:
        raise NotSupported(f"{label_of_handler(handler)} cannot be a guest: {why}")


def label_of_handler(handler: Any) -> str:
    """The name of its class, or of the function; of whom it belongs to where it is a method."""
    handler = handler._parent() if hasattr(handler, "_parent") else handler
    owner = handler.__self__ if ismethod(handler) else handler
    return getattr(owner, "__qualname__", None) or type(owner).__name__
