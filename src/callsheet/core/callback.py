"""The base class of callbacks: methods named after events, and class attributes that say how these methods are called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar, get_args

from callsheet.core.hooks import Hooks
from callsheet.core.lane_options import LaneOptions
from callsheet.core.ranks import RankGate, read_ranks
from callsheet.core.time import Interval, Time
from callsheet.errors import ConfigError, RegistrationError, check_arguments, did_you_mean, where

if TYPE_CHECKING:
    from callsheet.core.context import Context
    from callsheet.core.control import RequestName

Phase = Literal["change", "measure", "decide", "save", "report", "restore"]
Lane = Literal["inline", "background", "process"]
OnError = Literal["raise", "isolate"]

PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phases in the order in which the handlers of one event are called.

Within a phase, handlers are called in the order of registration.
"""
LANES: tuple[Lane, ...] = get_args(Lane)
ERROR_POLICIES: tuple[OnError, ...] = get_args(OnError)

foreign_hints: list[Callable[[object], str]] = []
"""Functions that take an object that is not a callback, and return a hint for the error message.

`import callsheet` adds a function that recognizes callbacks of other frameworks. `core` must not import that function itself.
"""


@cache
def _parameters_of(kind: type[Callback]) -> Mapping[str, Parameter]:
    """Return the parameters of the class's constructor by name, including `self`."""
    return signature(kind.__init__).parameters


def _familiar_arguments(parameters: Mapping[str, Parameter]) -> dict[str, str]:
    """Return a dict from argument names of other frameworks to those in `parameters`, such as `{"save_top_k": "keep=..."}`."""
    from callsheet.core.familiar_names import CALLBACK_ARGUMENTS

    return {name: f"{meant}=..." for name, meant in CALLBACK_ARGUMENTS.items() if meant in parameters}


class Callback(Hooks):
    """The base class of all callbacks. Override the methods of the events that you want to handle; each method receives the context.

    A class overrides either these methods or `on_event`, which handles every event. Options such as `phase` are class attributes,
    and an instance may have its own values. All options are checked when the callback is added, not when an event is fired.

    Examples:
        >>> class Greeter(Callback):
        ...     def on_train_start(self, ctx):
        ...         print(f"training {ctx.run.name} from step {ctx.step}")
    """

    name: str = ""
    """The callback's name in messages and tables, and the key of its saved state; if empty, the name of its class."""
    phase: Phase = "measure"
    """When the callback's handlers are called, relative to other callbacks' handlers of the same event: one of `PHASES`.

    `change` and `decide` are for callbacks that act on training.
    """
    ranks: RankGate = "all"
    """The ranks on which the callback is called: `all`, `zero`, `local_zero`, or a set of ranks."""
    lane: Lane = "inline"
    """Where the callback runs: `inline` (the training thread), `background` (its own thread), or `process` (its own process)."""
    on_error: OnError | None = None
    """What happens when a handler raises an error.

    `raise`: the error ends the run. `isolate`: the error is logged, and three errors in a row disable the callback. None: `raise`
    for an inline callback, `isolate` for one in a lane.
    """
    collective: bool = False
    """Whether the callback calls collectives (torch.distributed), or must do the same on all ranks.

    If so, it must run inline and on every rank.
    """
    draws_random: bool = False
    """Whether the callback draws random numbers.

    If so, the random states are restored after each handler, so that training is not affected.
    """
    keep_fields: tuple[str, ...] = ()
    """Fields of the context that stay available after their usual window. Only `outputs` can be kept, until `on_train_step_end`."""
    snapshot_fields: tuple[str, ...] = ()
    """The context fields that the callback receives if it runs in a lane. If empty, it receives all fields that need no copy."""
    requests: tuple[RequestName, ...] = ()
    """The requests that the callback may make, such as `stop`.

    A host (an adapter for another framework's loop) that supports none of these requests rejects the callback.
    """
    required_fields: tuple[str, ...] = ()
    """Fields without which the callback cannot work, such as `model`.

    A host (an adapter for another framework's loop) that lacks one of these fields rejects the callback.
    """
    writes_to_run_folder: bool = False
    """Whether the callback writes files to `ctx.run.folder`.

    If so, a host (an adapter for another framework's loop) locks the folder, so that no second process uses it. A Trainer always
    locks it.
    """
    shows_outcome: bool = False
    """Whether the callback shows the user how and why the run ended.

    If no callback does, a run that was stopped or preempted logs the reason as a warning.
    """
    weights_in_state: str = ""
    """The key of `state_dict` under which the callback saves weights of the model; empty if it saves none.

    A checkpoint in which these weights are not finite is marked as not finite, as if they were the model's own. Buffers for copying
    the weights are allocated in advance.
    """
    transport_ignore: tuple[str, ...] = ()
    """Attributes that each process creates for itself, so that they may differ between processes; see `callsheet.transport`."""
    lane_options: LaneOptions = LaneOptions()
    """The size of the queue of events if the callback runs in a lane, and what happens when the queue is full."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Store the constructor's arguments, from which a `CallbackSpec` can construct the callback again."""
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        if args or kwargs:
            parameters = _parameters_of(cls)  # type: ignore[arg-type]  # `@cache` needs hashable arguments, and classes are hashable
            check_arguments(cls.__name__, parameters, (cls, *args), kwargs, lambda: _familiar_arguments(parameters))
        self = super().__new__(cls)
        self._arguments = (args, kwargs)
        return self

    def on_event(self, ctx: Context) -> Awaitable[None] | None:
        """Handle every event. `ctx.event` is the name of the event."""

    def share_with(self, others: Sequence[Callback]) -> None:
        """Share state with callbacks that were added earlier, so that work which several callbacks have in common is done only once.

        The manager calls this when it adds the callback, unless the callback has a lane.

        Args:
            others: the callbacks that were added before this one, in the order in which they were added.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that must survive a resume, as plain data and tensors. Called when a checkpoint is saved."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned. Called when a checkpoint is loaded."""

    if not TYPE_CHECKING:  # hide `__getattr__` from type checkers, so that they reject unknown attributes

        def __getattr__(self, name: str) -> Any:  # Python calls `__getattr__` only if there is no attribute `name`
            from callsheet.core import familiar_names

            # If the class has an attribute of this name, it is a property that raised an AttributeError. Raise that error again.
            is_foreign = name in familiar_names.EVENTS or name in familiar_names.CALLBACK_METHODS
            if is_foreign and not hasattr(type(self), name):
                raise AttributeError(
                    f"{type(self).__name__!r} has no attribute {name!r}, because it is a callback of callsheet. Another framework runs it in "
                    f"a host, such as callsheet.bridges.huggingface.host([{type(self).__name__}(...)]), or callsheet.bridges.lightning.host",
                    name=name,
                )
            return object.__getattribute__(self, name)  # raises Python's usual AttributeError, or the property's own


def label_of(callback: Callback) -> str:
    """Return the callback's name in tables, errors and checkpoints: its `name`, or the name of its class if `name` is empty."""
    return callback.name or type(callback).__name__


class Marks(NamedTuple):
    """The options that the decorators `every`, `at`, `rank_zero_only` and `local_rank_zero_only` set on a function.

    None means that the decorator was not used, so the callback's own option applies.
    """

    every: Interval | None = None
    phase: Phase | None = None
    ranks: RankGate | None = None


F = TypeVar("F", bound=Callable[..., Any])
W = TypeVar("W", bound=str)


def every(interval: str | int | Time, *, at_end: bool = False) -> Callable[[F], F]:
    """Decorate a handler so that it is called only at an interval.

    At `on_train_step_end`, `"100ba"` means the steps 100, 200, and so on. At other events, the method is called if an interval
    was completed since the event was last fired.

    Args:
        interval: the interval, such as `"100ba"`, `"1ep"` or `"10m"`. A whole number means batches.
        at_end: whether the handler is also called when training reaches `max_duration`.

    Returns:
        A decorator, which returns the handler itself.

    Raises:
        RegistrationError: the interval is invalid or not above zero; the message names the method and its line.
    """
    if callable(interval):
        raise RegistrationError(f"write @every('100ba'), with an interval ({interval.__qualname__}, {where(interval)})")
    return _mark(lambda: {"every": Interval(interval, at_end=at_end)})


def at(phase: Phase) -> Callable[[F], F]:
    """Decorate a handler so that it runs in another phase (such as `report`) than the callback's other handlers.

    Args:
        phase: one of `PHASES`: `change`, `measure`, `decide`, `save`, `report` or `restore`.

    Returns:
        A decorator, which returns the handler itself.

    Raises:
        RegistrationError: the phase is unknown; the message names the method and its line.
    """
    return _mark(lambda: {"phase": one_of("phase", phase, PHASES)})


def rank_zero_only(function: F) -> F:
    """Decorate a function so that it runs on global rank 0 only.

    The rank is read when the call sheet is compiled or the function is called, never when the module is imported.

    Args:
        function: a handler, or any other function.

    Returns:
        A function that calls `function` on rank 0, and returns None on all other ranks.
    """
    return _add_gate("zero", function)


def local_rank_zero_only(function: F) -> F:
    """Decorate a function so that it runs on local rank 0 of each machine only. See `rank_zero_only`.

    Args:
        function: a handler, or any other function.

    Returns:
        A function that calls `function` on local rank 0, and returns None on all other ranks.
    """
    return _add_gate("local_zero", function)


def marks(function: Any) -> Marks:
    """Return the options that callsheet's decorators, such as `every`, have set on a function or bound method."""
    found: Marks = getattr(function, "__callsheet__", Marks())
    return found


def one_of(what: str, word: str, words: tuple[W, ...]) -> W:
    """Return `word` if it is one of the valid `words`; otherwise raise a `ConfigError` that suggests the most similar word."""
    if word not in words:
        raise ConfigError(f"unknown {what} {word!r}{did_you_mean(str(word), words)} (one of {', '.join(words)})")
    return words[words.index(word)]


def _mark(changes: Callable[[], dict[str, Any]]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        try:
            made = changes()
        except ConfigError as error:
            raise RegistrationError(f"{error} ({function.__qualname__}, {where(function)})") from None
        function.__callsheet__ = marks(function)._replace(**made)  # type: ignore[attr-defined]  # functions accept new attributes
        return function

    return decorate


def _add_gate(gate: RankGate, function: F) -> F:
    @wraps(function)
    def on_those_ranks(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if read_ranks().passes(gate) else None

    return _mark(lambda: {"ranks": gate})(on_those_ranks)  # type: ignore[return-value]  # the wrapper has the signature of `function`


_GATE_CODE = _add_gate("zero", lambda: None).__code__


def remove_gate(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that `rank_zero_only` or `local_rank_zero_only` has wrapped. Return any other handler unchanged.

    The call sheet checks the rank once, when it is compiled, so the wrapper's check at each call is not needed.
    """
    function: Any = getattr(handler, "__func__", handler)
    if getattr(function, "__code__", None) is not _GATE_CODE:
        return handler
    inner: Callable[..., Any] = function.__wrapped__
    return inner.__get__(handler.__self__) if hasattr(handler, "__self__") else inner
