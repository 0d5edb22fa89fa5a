"""The context: what a callback is given to read.

One instance a loop (training, evaluation, test, prediction), reused for every event. A field that is not told has an empty slot, and
reading it raises `FieldNotAvailable`: nothing stale is ever read, and a field that is told costs no more than an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from callsheet import distributed
from callsheet.control import Control
from callsheet.distributed import Ranks
from callsheet.errors import FieldNotAvailable, RequestRejected, did_you_mean
from callsheet.events import Event
from callsheet.lifecycle import ALWAYS, FIELDS
from callsheet.time import Time, Timestamp, elapsed_fraction

if TYPE_CHECKING:
    from callsheet.callback import Callback
    from callsheet.costs import Failures


class Outcome(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(slots=True)
class RunInfo:
    """The run: its name, where it writes, what it was configured with, and where this process stands in it.

    `checkpoints` is where its checkpoints stand, a folder or a URL; the folder `checkpoints` in `folder` where nobody said otherwise.
    `outcome` and `outcome_reason` are set at the run's end; the reason is one line, such as
    "stopped by EarlyStopper: ...", "reached max_duration, 2ep", "signal SIGTERM" or "ValueError: ...".
    `failures`, at the run's end, are the callbacks of this process that failed or whose lanes lost events.
    `has_lost_folder` says that another process has taken over the folder, so that nothing may be written there any more.
    """

    name: str
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)
    restart_count: int = 0
    device: str = "cpu"
    outcome: Outcome | None = None
    outcome_reason: str = ""
    checkpoints: str = ""
    failures: tuple[Failures, ...] = ()
    has_lost_folder: bool = False

    def __post_init__(self) -> None:
        if not self.checkpoints and self.folder is not None:
            self.checkpoints = str(self.folder / "checkpoints")

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return self.ranks.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its machine, from 0."""
        return self.ranks.local_rank

    @property
    def node_rank(self) -> int:
        """This machine among all, from 0."""
        return self.ranks.node_rank

    @property
    def world_size(self) -> int:
        """How many processes train together."""
        return self.ranks.world_size

    @property
    def is_world_process_zero(self) -> bool:
        """This is the first process of all."""
        return self.ranks.rank == 0

    @property
    def is_local_process_zero(self) -> bool:
        """This is the first process of its machine."""
        return self.ranks.local_rank == 0


class RunConstants(NamedTuple):
    """What of a `TrainState` no step changes: written anew where it changes, so that a snapshot takes it as one."""

    max_duration: Time | None = None
    baseline: Timestamp = Timestamp()
    epoch_batches: int | None = None
    evaluators: tuple[str, ...] = ()


def _of_course(name: str) -> Any:
    def write(state: TrainState, value: Any) -> None:
        state.course = state.course._replace(**{name: value})

    return property(attrgetter(f"course.{name}"), write)


@dataclass(init=False, slots=True)
class TrainState:
    """How far training is.

    `timestamp` counts what is completed and moves just before each end event; `previous_timestamp` is the one before the last step.
    Its samples, tokens and seconds are those of the last log boundary and stand still between. `baseline` is where this process began.
    `epoch_batches` is how many steps an epoch has, where that is known; `evaluators` are the names of the datasets that are evaluated.
    """

    timestamp: Timestamp
    previous_timestamp: Timestamp
    course: RunConstants

    def __init__(
        self,
        max_duration: Time | None = None,
        timestamp: Timestamp = Timestamp(),  # noqa: B008  # it cannot change
        previous_timestamp: Timestamp = Timestamp(),  # noqa: B008
        baseline: Timestamp = Timestamp(),  # noqa: B008
        epoch_batches: int | None = None,
        evaluators: tuple[str, ...] = (),
    ) -> None:
        self.timestamp, self.previous_timestamp = timestamp, previous_timestamp
        self.course = RunConstants(max_duration, baseline, epoch_batches, evaluators)

    if TYPE_CHECKING:  # else they would be fields of the dataclass
        max_duration: Time | None
        baseline: Timestamp
        epoch_batches: int | None
        evaluators: tuple[str, ...]
    else:
        max_duration, baseline, epoch_batches, evaluators = map(_of_course, RunConstants._fields)

    def state_dict(self) -> dict[str, Any]:
        """How far training is, as plain data."""
        return {"timestamp": self.timestamp.to_dict(), "previous_timestamp": self.previous_timestamp.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave: this process begins there. Raises ConfigError where it is not what `state_dict` gives."""
        self.timestamp = self.baseline = Timestamp.from_dict(state["timestamp"])
        self.previous_timestamp = Timestamp.from_dict(state["previous_timestamp"])

    @property
    def elapsed(self) -> float | None:
        """The completed fraction of `max_duration`, or None where no duration is known."""
        return elapsed_fraction(self.timestamp, self.max_duration)

    @property
    def is_complete(self) -> bool:
        """`max_duration` has been reached."""
        elapsed = self.elapsed
        return elapsed is not None and elapsed >= 1.0


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """What was logged since the last boundary, as floats; speeds are of training alone, evaluation and saving left out."""

    step: int
    values: dict[str, float]
    elapsed_seconds: float = 0.0
    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint. `kind` is periodic, best, final, preempt or requested.

    `size_bytes` and `is_finite`, whether weights and loss were, are known once it is written. `requested_by` are the names under which
    it was asked for (`Control.save`), each once; empty where no request was made.
    """

    path: str
    step: int
    epoch: int
    kind: str
    train_loss: float | None = None
    val_losses: dict[str, float] = field(default_factory=dict)
    best_metric_key: str | None = None
    size_bytes: int = 0
    is_finite: bool = True
    requested_by: tuple[str, ...] = ()


Loggable = Mapping[Any, Any]
"""Numbers by name, or tensors of one dimension by the tuple of their numbers' names. (No narrower type takes a dict of either.)"""


class Accumulator(Protocol):
    """Where logged values go until the next boundary; see `callsheet.metrics`."""

    def log(self, values: Loggable, *, over: str, across: str, weight: Any) -> None:
        """Take values; see `Context.log`."""

    def latest(self, family: str) -> dict[str, Any]:
        """What has been taken; see `Context.logged`."""


class LoggerLine(Protocol):
    """Passes a call such as `log_table` on to every logger of the run; see `CallbackManager.notify_loggers`."""

    def __call__(self, method: str, ctx: Context, /, **payload: Any) -> None: ...


class Context:
    """What callbacks read, and the few methods with which they write.

    The fields are those of `callsheet.lifecycle.FIELDS`, which says what each means and when it is told. Attributes that are no fields
    are for the loop that owns the context.

    Raises:
        FieldNotAvailable: on reading a field outside its window; the message names the window.
    """

    __slots__ = (*FIELDS, "__weakref__", "_accumulator", "_loggers", "excuse", "kept", "loss_is_new", "muting")

    event: Event | None
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
    loss: Any
    loss_dict: dict[str, Any]
    grad_norm: Any
    learning_rate: float
    step_skipped: bool
    record: MetricsRecord
    boundary: str
    eval_name: str
    standalone: bool
    eval_losses: dict[str, Any]
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
        self.event = None
        self.run = run
        self.state = state if state is not None else TrainState()
        self.step = 0
        self.epoch = 0
        self.model = model
        self.user_state = user_state if user_state is not None else {}
        self.control = control if control is not None else Control()
        self._accumulator = accumulator
        self._loggers = loggers
        self.excuse: Callable[[str], None] | None = None
        """Logs that a handler could not be called for want of a field, where the loop is another framework's; None: that is an error."""
        self.kept: frozenset[str] = frozenset()
        self.loss_is_new = False
        """Whether the loop makes a new tensor for each step's loss and never writes to it again: then a snapshot need not copy it."""
        self.muting: Callable[[Callback, tuple[str, ...], bool, int | None], None] | None = None
        """For the manager: what `mute` and `unmute` call."""

    def sibling(self, accumulator: Accumulator | None = None) -> Context:
        """A context for another loop of the same run, such as an evaluation: it shares all but the fields of a window.

        What is logged on it goes to `accumulator`, or where this context's goes.
        """
        other = Context(
            self.run,
            state=self.state,
            model=self.model,
            user_state=self.user_state,
            control=self.control,
            accumulator=accumulator if accumulator is not None else self._accumulator,
            loggers=self._loggers,
        )
        other.step, other.epoch, other.muting, other.excuse = self.step, self.epoch, self.muting, self.excuse
        for name in ("optimizer", "scheduler"):
            if self.has(name):
                setattr(other, name, getattr(self, name))
        return other

    def log(self, values: Loggable, *, over: str = "last", across: str = "mean", weight: Any = None) -> None:
        """Log numbers for the next record; tensors stay on their device until the boundary.

        Args:
            values: numbers or scalar tensors by name, names as `family/name`. A tuple of names takes a tensor of one dimension, a
                number for each: for many numbers that is much cheaper.
            over: what becomes of several values of one name until the boundary: `last`, `mean` or `sum`.
            across: how the data-parallel ranks' values become one: `mean`, `sum`, `max`, or `same` where they are equal already.
            weight: of each value in a mean, a number or scalar tensor; 1 where it is None.

        A tensor is not copied: what is logged is what it holds at the boundary.

        Raises:
            ConfigError: an unknown `over` or `across`, one that differs from the name's earlier one, or a value that is not one number
                a name.
        """
        if self._accumulator is not None:
            self._accumulator.log(values, over=over, across=across, weight=weight)

    def logged(self, family: str) -> dict[str, Any]:
        """What was logged as `<family>/<name>` since the last boundary, on this rank: the last value of each, by that name.

        What loops log themselves, such as `train/loss`, is there where somebody hears records.
        """
        return self._accumulator.latest(family) if self._accumulator is not None else {}

    def log_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Give the run's settings to every logger."""
        self._to_loggers("log_hyperparameters", values=dict(values))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Give a table to every logger: one sequence of cells a row, as long as `columns`."""
        self._to_loggers("log_table", name=name, columns=list(columns), rows=[list(row) for row in rows])

    def log_images(self, name: str, images: Sequence[Any]) -> None:
        """Give images to every logger: arrays or tensors of shape (height, width), (height, width, 3) or (3, height, width)."""
        self._to_loggers("log_images", name=name, images=list(images))

    def log_file(self, name: str, path: str | Path) -> None:
        """Give a file that was written to every logger that can store one."""
        self._to_loggers("log_file", name=name, path=Path(path))

    def mute(self, callback: Callback, *events: str, until: int | None = None) -> None:
        """Tell the callback these events no more, from the next one on and until the run's end: then they cost it nothing.

        For what is only needed now and then: `ctx.mute(self, "on_forward_end")`.

        Args:
            until: the step from whose beginning on they are told again. They are told all the same if it is but a few steps away, which
                does not pay, or in a loop that does not say when its steps have ended: so look at `ctx.step`, too.

        Raises:
            UnknownEventError: no such event.
            RegistrationError: the callback is not on the run's call sheet.
            RequestRejected: in a lane.
        """
        if self.muting is not None:
            self.muting(callback, events, True, until)

    def unmute(self, callback: Callback, *events: str) -> None:
        """Tell them to it again; see `mute`."""
        if self.muting is not None:
            self.muting(callback, events, False, None)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in the order of ranks. A collective: every rank must reach it.

        Raises:
            RequestRejected: in a handler that runs on some ranks only.
        """
        if self.control.in_gate:
            raise RequestRejected(
                "ctx.gather() in a handler that runs on some ranks only would hang the others; let it run on all ranks, and gate the writing"
            )
        return distributed.gather(value)

    def has(self, name: str) -> bool:
        """Whether the field `name` can be read now. `hasattr` says the same, but writes a message to say no."""
        reads = _READS.get(name)
        if reads is None:
            return hasattr(self, name)
        try:
            reads(self)
        except AttributeError:
            return False
        return True

    def close(self, event: str) -> None:
        """For the loop: `event` has been told, and the windows that end with it are shut."""
        if self.kept:
            for name, keeps in _CLOSED_BY.get(event, ()):
                if not (keeps and name in self.kept):  # a listener wants it as long as can be
                    setattr(self, name, None)
                    delattr(self, name)
        else:
            shut = _SHUTS.get(event)
            if shut is None:
                shut = _SHUTS[event] = _shutting(name for name, _ in _CLOSED_BY.get(event, ()))
            shut(self)

    def close_all(self, *, before: str = "") -> None:
        """For the loop: every window is shut, as after an exception; those that end with the event `before` stay open."""
        left = {*ALWAYS, *(name for name, _ in _CLOSED_BY.get(before, ()))}
        for name in FIELDS:
            if name not in left and self.has(name):
                delattr(self, name)

    def _to_loggers(self, method: str, **payload: Any) -> None:
        if self._loggers is not None:
            self._loggers(method, self, **payload)

    if not TYPE_CHECKING:  # a type checker should know the fields, and no others

        def __getattr__(self, name: str) -> Any:  # only reached where a slot is empty
            if name in FIELDS:
                raise FieldNotAvailable(_not_told(name, self.event), name=name)
            raise AttributeError(f"the context has no field {name!r}{did_you_mean(name, FIELDS)}")


_READS: dict[str, Callable[[Context], Any]] = {name: vars(Context)[name].__get__ for name in FIELDS}
"""The slots' own ways of being read, which write no message for one that is empty."""


def _not_told(name: str, event: str | None) -> str:
    windows = " and ".join(
        f"at {opens}" if opens == closes else f"from {opens} to {closes}" for opens, closes in FIELDS[name].windows
    )
    return f"ctx.{name} is not told {f'at {event}' if event else 'here'}: it can be read {windows or 'once the loop has set it'}"


_CLOSED_BY: dict[str, tuple[tuple[str, bool], ...]] = {}
for _field in FIELDS.values():
    for _event in {*(closes for _, closes in _field.windows), *filter(None, [_field.kept_until])}:
        _keeps = _event == _field.windows[0][1]  # where a listener may ask that it be kept
        _CLOSED_BY[_event] = (*_CLOSED_BY.get(_event, ()), (_field.name, _keeps))


def _shutting(names: Iterable[str]) -> Callable[[Context], None]:
    """Empties these slots, one after the other: every step does, and a loop over names takes twice as long."""
    empty = "".join(f"    ctx.{name} = None\n    del ctx.{name}\n" for name in names)  # a slot that is empty cannot be emptied
    scope: dict[str, Any] = {}
    exec(f"def shut(ctx):\n{empty}    return", scope)  # of names in the lifecycle's table
    shut: Callable[[Context], None] = scope["shut"]
    return shut


_SHUTS: dict[str, Callable[[Context], None]] = {}
"""What empties the fields that an event closes; compiled when the event is first closed, which takes about 0.1 ms."""
