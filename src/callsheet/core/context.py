"""The context: the object that every handler receives.

Each loop (training, evaluation, test, prediction) has one context, which it reuses for every event. Reading a field outside its
window raises `FieldNotAvailable` instead of returning an old value. Reading an available field costs no more than reading any
attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Protocol

from callsheet.core import ranks as distributed
from callsheet.core.control import Control
from callsheet.core.events import Event
from callsheet.core.lifecycle import ALWAYS_AVAILABLE, FIELDS
from callsheet.errors import ConfigError, FieldNotAvailable, RequestRejected, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from callsheet.core.call_sheet import Dispatcher
    from callsheet.core.callback import Callback
    from callsheet.core.run_state import CheckpointInfo, MetricsRecord, RunInfo, TrainState


Over = Literal["last", "mean", "sum"]
"""How several values that are logged under one name are combined to one value in the next metrics record."""
Across = Literal["mean", "sum", "max", "same"]
"""How the values that several ranks log under one name are combined to one value."""
Boundary = Literal["step", "epoch", "round", "before_eval"]
"""A boundary at which a checkpoint may be requested: the end of a step, an epoch or a round, or the start of an evaluation."""

Loggable = Mapping[Any, Any]
"""Values that can be logged: a number for each name, or a one-dimensional tensor for a tuple of names.

(With the key type `str | tuple[str, ...]`, type checkers would reject a `dict[str, float]`.)
"""


NO_VALUES: Any = None
"""The default of `log`'s argument `values`. A call without `values`, such as `log(loss=1)`, then raises an error with a hint."""


class Accumulator(Protocol):
    """Collects logged values, from which the next metrics record is made; see `callsheet.run.metrics`."""

    def log(self, values: Loggable, *, over: Over, across: Across, weight: float | Tensor | None) -> None:
        """Add logged values for the next metrics record; see `Context.log`."""

    def latest(self, family: str) -> dict[str, float | Tensor]:
        """Return the last logged value of each metric named `<family>/<name>`; see `Context.logged`."""


class SampleCounter(Protocol):
    """Counts the samples of training; see `callsheet.run.tally`."""

    samples: int
    """How many samples this rank was trained on since `state.timestamp` was last updated."""
    resumed_samples: int

    @property
    def uncounted_samples(self) -> int:
        """How many samples of all ranks were trained on since `state.timestamp` was last updated."""

    @property
    def uncounted_tokens(self) -> int:
        """How many tokens of all ranks were trained on since `state.timestamp` was last updated."""


class LoggerLine(Protocol):
    """A function that calls a method such as `log_table` on every logger of the run; see `CallbackManager.notify_loggers`."""

    def __call__(self, method: str, ctx: Context, /, **payload: Any) -> None: ...


def check_logged(values: Any, misplaced: tuple[Any, ...], misnamed: Mapping[str, Any]) -> None:
    """Raise ConfigError if `Context.log` was not called with one dictionary."""
    if misplaced or misnamed or not isinstance(values, Mapping):
        by_place = [
            "{...}" if isinstance(each, Mapping) else repr(each)[:40] for each in (values, *misplaced) if each is not None
        ]
        given = ", ".join([*by_place, *(f"{name}={value!r}"[:40] for name, value in misnamed.items())])
        name = values if isinstance(values, str) else next(iter(misnamed), "mine/number")
        raise ConfigError(f"log({given}): give one dictionary of numbers by name, such as log({{{name!r}: 0.5}})")


class Context:
    """The fields that callbacks read, and the methods with which callbacks log values and make requests.

    The fields are those of `callsheet.core.lifecycle.FIELDS`, which defines what each field means and when it is available. Other
    attributes are for the loop that owns the context.

    Args:
        run: the run's name, folder, ranks and device.
        state: the progress of training; None: that of a new run.
        model: the model that callbacks see, or a list of its chunks.
        user_state: what callbacks share during the run, by name; None: a new dict.
        control: the requests that the loop supports; None: `stop`, `save` and `evaluate`.
        accumulator: collects what `log` receives for the next metrics record; None: these values are dropped.
        loggers: passes tables, images, files and hyperparameters on to the loggers; None: these are dropped.

    Raises:
        FieldNotAvailable: on reading a field outside its window; the message names the window.
    """

    __slots__ = (
        *(name for name in FIELDS if name != "event"),
        "__weakref__",
        "_accumulator",
        "_loggers",
        "dispatcher",
        "eval_samples",
        "excuse",
        "is_filler",
        "kept",
        "loss_is_new",
        "samples_in_all",
        "tally",
    )

    run: RunInfo
    state: TrainState
    step: int
    epoch: int
    model: Any
    user_state: dict[str, Any]
    control: Control
    optimizer: Any
    scheduler: Any
    batch: Any
    microbatch: Any
    outputs: Any
    loss: Tensor
    loss_dict: dict[str, Tensor]
    grad_norm: Tensor | None
    learning_rate: float
    step_skipped: bool
    record: MetricsRecord
    boundary: Boundary
    eval_name: str
    standalone: bool
    eval_losses: dict[str, Tensor]
    eval_results: dict[str, dict[str, float]]
    checkpoint: CheckpointInfo | None
    exception: BaseException
    span: str

    def __init__(
        self,
        run: RunInfo,
        *,
        state: TrainState | None = None,
        model: Any = None,
        user_state: dict[str, Any] | None = None,
        control: Control | None = None,
        accumulator: Accumulator | None = None,
        loggers: LoggerLine | None = None,
    ) -> None:
        self.run = run
        self.state = state if state is not None else _new_state()
        self.step = 0
        self.epoch = 0
        self.model = model
        self.user_state = user_state if user_state is not None else {}
        self.control = control if control is not None else Control()
        self._accumulator = accumulator
        self._loggers = loggers
        self.excuse: Callable[[str], None] | None = None
        """A function that logs that a handler was skipped because a field is missing. It is set only in another framework's loop.

        If None, reading a missing field raises an error.
        """
        self.kept: frozenset[str] = frozenset()
        self.loss_is_new = False
        """Whether the loop makes new tensors for each step's loss and gradient norm, and never writes to them again.

        If so, a snapshot need not copy these tensors.
        """
        self.is_filler = False
        """Whether the microbatch (in an evaluation, the batch) is a filler, whose samples and tokens are not counted.

        A rank gets a filler if other ranks have one more batch.
        """
        self.samples_in_all: int | None = None
        """In an evaluation, the number of samples in the batches of all ranks, without fillers; None if it is not known."""
        self.eval_samples: int | None = None
        """At the end of an evaluation, the number of its samples on all ranks, without fillers; None if it is not known."""
        self.tally: SampleCounter | None = None
        """Counts the samples that `state.timestamp` does not contain yet. None if the loop counts none."""
        self.dispatcher: Dispatcher | None = None
        """The object that fires the events: normally the callback manager, which sets this attribute."""

    @property
    def event(self) -> Event | None:
        """The event that is being fired; None between events.

        The event is read from the dispatcher, because writing a field of the context at every event would make each event slower.
        """
        return self.dispatcher.current if self.dispatcher is not None else None

    def sibling(self, accumulator: Accumulator | None = None) -> Context:
        """Return a context for another loop of the same run, such as an evaluation.

        The two contexts share all fields that are always available.

        Args:
            accumulator: collects what the new context logs; None: the accumulator of this context.
        """
        other = type(self)(
            self.run,
            state=self.state,
            model=self.model,
            user_state=self.user_state,
            control=self.control,
            accumulator=accumulator if accumulator is not None else self._accumulator,
            loggers=self._loggers,
        )
        other.step, other.epoch, other.excuse = self.step, self.epoch, self.excuse
        other.dispatcher, other.tally = self.dispatcher, self.tally
        for name in ("optimizer", "scheduler"):
            if self.has(name):
                setattr(other, name, getattr(self, name))
        return other

    def log(
        self,
        values: Loggable = NO_VALUES,
        *misplaced: Never,
        over: Over = "last",
        across: Across = "mean",
        weight: float | Tensor | None = None,
        **misnamed: Never,
    ) -> None:
        """Log numbers for the next metrics record. Tensors stay on their device until that record is made.

        A tensor is not copied: the record holds the value that the tensor has when the record is made.

        At `on_log`, values with `across="same"` are added to `ctx.record`, the record that is being made, so handlers that are
        called later, such as the loggers, read them.

        Args:
            values: numbers or scalar tensors by name, with names like `family/name`. A tuple of names is for a one-dimensional
                tensor with a number for each name; this is much cheaper for many numbers.
            *misplaced, **misnamed: not allowed; values that are given in this way raise the error that says how to log a number.
            over: how the values that this rank logs under one name for one record are combined: `last`, `mean` or `sum`.
            across: how the values of the data-parallel ranks are combined: `mean`, `sum`, `max`, or `same` if they are equal
                already.
            weight: the weight of each value in a mean, a number or scalar tensor; None means 1.

        Raises:
            ConfigError: `over` or `across` is unknown or differs from an earlier call for the same name, a value is not a single
                number for each name, or `values` is no dictionary.
        """
        # In the common case, a single dict, do not call `check_logged`, because the call would make each `log` slower.
        if misplaced or misnamed or type(values) is not dict:
            check_logged(values, misplaced, misnamed)
        if across == "same" and self.event == Event.LOG:
            self.record = replace(self.record, values={**self.record.values, **_floats(values)})
        elif self._accumulator is not None:
            self._accumulator.log(values, over=over, across=across, weight=weight)

    def logged(self, family: str) -> dict[str, float | Tensor]:
        """For each metric of a family, such as `train`, return the last value that this rank logged since the last metrics record.

        Values that the loop logs, such as `train/loss`, are included only if `on_log` has a handler.

        Args:
            family: the part of the metrics' names before the first `/`, such as `train`.

        Returns:
            The values by full name, as they were logged: numbers, or scalar tensors on their device. Numbers that were logged in
                one tensor under several names are not included.
        """
        return self._accumulator.latest(family) if self._accumulator is not None else {}

    def log_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Pass hyperparameters to every logger.

        Args:
            values: plain data by name, which may be nested.
        """
        self._to_loggers("log_hyperparameters", values=dict(values))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Pass a table to every logger.

        Args:
            name: the name of the table.
            columns: the titles of the columns.
            rows: the rows, each with a cell for each column.
        """
        self._to_loggers("log_table", name=name, columns=list(columns), rows=[list(row) for row in rows])

    def log_images(self, name: str, images: Sequence[Any]) -> None:
        """Pass images to every logger.

        Args:
            name: the name under which the images are logged.
            images: arrays or tensors of shape (height, width), (height, width, 3) or (3, height, width), with integers from 0 to
                255 or floats from 0 to 1.
        """
        self._to_loggers("log_images", name=name, images=list(images))

    def log_file(self, name: str, path: str | Path) -> None:
        """Pass a file to every logger that can store files.

        Args:
            name: the name of the file in the loggers' storage, such as `traces/step-10.json`.
            path: where the file is. It must still exist when loggers in lanes read it.
        """
        self._to_loggers("log_file", name=name, path=Path(path))

    def mute(self, callback: Callback, *events: str, until: int | None = None) -> None:
        """Stop calling the callback's handlers for these events from the next event on, until the step `until` or the run's end.

        Use it for handlers that are needed only at some steps: `ctx.mute(self, "on_forward_end")`. Muted handlers cost no time.

        Args:
            callback: the callback whose handlers are muted.
            events: the names of the events.
            until: the step at whose beginning the handlers are unmuted. If that step is only a few steps away, or the loop does not report
                the ends of its steps, the call has no effect; so check `ctx.step` in the handler as well.

        Raises:
            UnknownEventError: no such event.
            RegistrationError: the callback is not on the run's call sheet.
            RequestRejected: the caller is a callback in a lane (another thread or process).
        """
        if self.dispatcher is not None:
            self.dispatcher.mute(self, callback, events, True, until)

    def unmute(self, callback: Callback, *events: str) -> None:
        """Call the callback's handlers for these events again, after `mute` has stopped calling them.

        Args:
            callback: the callback whose handlers are unmuted.
            events: the names of the events.

        Raises:
            UnknownEventError: no such event.
            RegistrationError: the callback is not on the run's call sheet.
            RequestRejected: the caller is a callback in a lane (another thread or process).
        """
        if self.dispatcher is not None:
            self.dispatcher.mute(self, callback, events, False, None)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks. This is a collective: every rank must call it.

        Args:
            value: this rank's value, which torch.distributed pickles.

        Returns:
            The value of each rank, in the order of ranks. In a run with one rank, the list holds `value` itself.

        Raises:
            RequestRejected: the caller is a handler that runs on some ranks only, or a callback in a lane (another thread or
                process).
        """
        if self.control.in_gate:
            raise RequestRejected(
                "ctx.gather() in a handler that runs on some ranks only would hang; let the handler run on all ranks, and write on one of them"
            )
        return distributed.gather(value)

    def has(self, name: str) -> bool:
        """Return whether a field is available now.

        `hasattr` returns the same, but is slower, because it formats an error message first.

        Args:
            name: the name of the field, such as `loss`.
        """
        reads = _READERS.get(name)
        if reads is None:
            return hasattr(self, name)
        try:
            reads(self)
        except AttributeError:
            return False
        return True

    def close(self, event: str) -> None:
        """Delete the context's fields that are no longer available after an event. The loop calls this after firing the event.

        Args:
            event: the name of the event that was fired.
        """
        if self.kept:
            for name, keeps in _FIELDS_CLOSED_BY.get(event, ()):
                if not (keeps and name in self.kept):  # delete the field, unless a callback keeps it with `keep_fields`
                    setattr(self, name, None)
                    delattr(self, name)
        else:
            _DELETERS[event](self)

    def close_all(self, *, before: str = "") -> None:
        """Delete all fields of the context, except those that are available at every event. Called at the end of a run.

        Args:
            before: the name of an event; the fields that `close(before)` deletes are kept. Empty: no such field is kept.
        """
        left = {*ALWAYS_AVAILABLE, *(name for name, _ in _FIELDS_CLOSED_BY.get(before, ()))}
        for name in FIELDS:
            if name not in left and self.has(name):
                delattr(self, name)

    def _to_loggers(self, method: str, **payload: Any) -> None:
        if self._loggers is not None:
            self._loggers(method, self, **payload)

    if not TYPE_CHECKING:  # hide `__getattr__` from type checkers, so that they reject unknown attributes

        def __getattr__(self, name: str) -> Any:  # Python calls `__getattr__` only if the attribute has no value
            if name in FIELDS:
                raise FieldNotAvailable(_not_available(name, self.event), name=name)
            # With the argument `name`, Python prints only this message, and adds no suggestion of its own.
            raise AttributeError(f"the context has no field {name!r}{_field_hint(name)}", name=name)


def _field_hint(name: str) -> str:
    from callsheet.core import familiar_names  # imported here, because only error messages need this module

    meant = familiar_names.FIELDS.get(name)
    return f"; did you mean {meant!r}?" if meant else did_you_mean(name, FIELDS)


def _floats(values: Loggable) -> dict[str, float]:
    """Return each logged metric as a float, by name. A tensor that was logged under several names becomes one float per name."""
    found: dict[str, float] = {}
    for name, value in values.items():
        try:
            found |= {name: float(value)} if isinstance(name, str) else zip(name, map(float, value), strict=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: {value!r} is not one number a name ({error})") from None
    return found


def _new_state() -> TrainState:
    """Return the training state of a new run.

    The module `run_state` is imported only here, because its dataclasses would slow down `import callsheet`.
    """
    from callsheet.core.run_state import TrainState

    return TrainState()


_READERS: dict[str, Callable[[Context], Any]] = {name: vars(Context)[name].__get__ for name in FIELDS}
"""For each field, the function that reads its slot. It bypasses `Context.__getattr__`, which would format an error message."""


def _not_available(name: str, event: str | None) -> str:
    windows = " and ".join(
        f"at {opens}" if opens == closes else f"from {opens} to {closes}" for opens, closes in FIELDS[name].windows
    )
    return f"ctx.{name} is not available {f'at {event}' if event else 'here'}; it is available {windows or 'once the loop has set it'}"


_FIELDS_CLOSED_BY: dict[str, tuple[tuple[str, bool], ...]] = {}
for _field in FIELDS.values():
    for _event in {*(closes for _, closes in _field.windows), *filter(None, [_field.kept_until])}:
        # True if `_event` ends the field's first window. A callback that names the field in `keep_fields` keeps it after this event.
        _keeps = _event == _field.windows[0][1]
        _FIELDS_CLOSED_BY[_event] = (*_FIELDS_CLOSED_BY.get(_event, ()), (_field.name, _keeps))


def _deleter(names: Iterable[str]) -> Callable[[Context], None]:
    """Compile a function that deletes the fields `names` of a context.

    The function runs at every step, and in another framework's loop several times a step. A loop over the names would take twice
    as long (`benchmarks/results/shortcuts.md`).
    """
    # Assign None first, because `del` of a slot without a value raises an error.
    lines = "".join(f"    ctx.{name} = None\n    del ctx.{name}\n" for name in names)
    scope: dict[str, Any] = {}
    exec(f"def delete(ctx):\n{lines}    return", scope)  # `exec` is safe, since `FIELDS` defines all these names
    delete: Callable[[Context], None] = scope["delete"]
    return delete


class _Deleters(dict[str, Callable[[Context], None]]):
    """For each event, the function that deletes the context's fields that are no longer available after that event.

    A function is compiled when it is first read, which takes about 0.1 ms.
    """

    def __missing__(self, event: str) -> Callable[[Context], None]:
        self[event] = delete = _deleter(name for name, _ in _FIELDS_CLOSED_BY.get(event, ()))
        return delete


_DELETERS = _Deleters()
