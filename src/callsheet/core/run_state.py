"""The state of a run: its name and folder, the progress of training, records and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from callsheet.core.ranks import Ranks
from callsheet.core.time import Time, Timestamp, elapsed_fraction

if TYPE_CHECKING:
    from callsheet.core.costs import Failures


class Outcome(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(slots=True)
class RunInfo:
    """The run: its name, folder, configuration, and this process's ranks and device.

    Attributes:
        name: the name of the run.
        folder: the run's folder; None if the run writes no files.
        config: the run's configuration as plain data, which loggers receive as hyperparameters.
        ranks: the ranks of this process, and the world size.
        restart_count: how often torchrun has restarted the ranks.
        device: the device of this process, such as `cpu` or `cuda:0`.
        outcome: how the run ended; None until then.
        outcome_reason: one line, such as "stopped by EarlyStopper: ...", "reached max_duration, 2ep", "signal SIGTERM" or
            "ValueError: ..."; empty until the run's end.
        checkpoints: the folder or URL of the checkpoints, by default the folder `checkpoints` in `folder`.
        failures: the callbacks of this process that failed or whose lanes lost events; set at the run's end.
        inexact_counts: one line that says so if the framework in whose loop callsheet runs counts steps or epochs differently, or
            has left out, repeated or reordered events; otherwise empty.
        eval_interval: how often all datasets are evaluated, such as `1ep` or `100ba`; empty if this is not known, or if they have
            different intervals.
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
    inexact_counts: str = ""
    eval_interval: str = ""
    # This is a list with one element, because the copies of this object for callbacks in other threads must share the value.
    _lost: list[bool] = field(default_factory=lambda: [False], repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.checkpoints and self.folder is not None:
            self.checkpoints = str(self.folder / "checkpoints")

    @property
    def has_lost_folder(self) -> bool:
        """Whether another process has taken over the run's folder."""
        return self._lost[0]

    @has_lost_folder.setter
    def has_lost_folder(self, is_lost: bool) -> None:
        self._lost[0] = is_lost

    def may_write(self, path: str | os.PathLike[str]) -> bool:
        """Return whether this process may still write to a path. Call this method before each write.

        Args:
            path: the file or folder to be written.

        Returns:
            False if `path` is in the run's folder, and another process has taken over the folder. Otherwise True.
        """
        if not self._lost[0] or self.folder is None:
            return True
        return not Path(os.path.abspath(path)).is_relative_to(os.path.abspath(self.folder))

    @property
    def rank(self) -> int:
        """The number of this process among all processes of the run, from 0."""
        return self.ranks.rank

    @property
    def local_rank(self) -> int:
        """The number of this process among the processes of the run on this machine, from 0."""
        return self.ranks.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this machine among all machines, from 0."""
        return self.ranks.node_rank

    @property
    def world_size(self) -> int:
        """The number of processes that train together."""
        return self.ranks.world_size

    @property
    def is_world_process_zero(self) -> bool:
        """Whether this process has rank 0 among all processes of the run."""
        return self.ranks.rank == 0

    @property
    def is_local_process_zero(self) -> bool:
        """Whether this process has local rank 0, and is therefore the first process of the run on this machine."""
        return self.ranks.local_rank == 0


class RunConstants(NamedTuple):
    """The attributes of a `TrainState` that do not change from step to step.

    The object is replaced and never changed in place, so a snapshot need not copy it.
    """

    max_duration: Time | None = None
    baseline: Timestamp = Timestamp()
    epoch_batches: int | None = None
    evaluators: tuple[str, ...] = ()


def _constant_property(name: str) -> Any:
    def write(state: TrainState, value: Any) -> None:
        state.constants = state.constants._replace(**{name: value})

    return property(attrgetter(f"constants.{name}"), write)


@dataclass(init=False, slots=True)
class TrainState:
    """The progress of training, such as the completed steps and epochs.

    `timestamp` and `previous_timestamp` count the samples, tokens and seconds only up to the last log boundary.

    Args:
        max_duration: how long training lasts, or None if it has no limit.
        timestamp: how much is complete. It changes just before the end event of each step, epoch and round.
        previous_timestamp: the value of `timestamp` before the last step.
        baseline: the timestamp at which this process began to train.
        epoch_batches: the number of steps in an epoch, or None if it is not known.
        evaluators: the names of the evaluated datasets.
    """

    timestamp: Timestamp
    previous_timestamp: Timestamp
    constants: RunConstants

    def __init__(
        self,
        max_duration: Time | None = None,
        timestamp: Timestamp = Timestamp(),  # noqa: B008  # sharing one default is safe, since a Timestamp is immutable
        previous_timestamp: Timestamp = Timestamp(),  # noqa: B008
        baseline: Timestamp = Timestamp(),  # noqa: B008
        epoch_batches: int | None = None,
        evaluators: tuple[str, ...] = (),
    ) -> None:
        self.timestamp, self.previous_timestamp = timestamp, previous_timestamp
        self.constants = RunConstants(max_duration, baseline, epoch_batches, evaluators)

    if TYPE_CHECKING:  # for type checkers only: at run time, these annotations would become fields of the dataclass
        max_duration: Time | None
        baseline: Timestamp
        epoch_batches: int | None
        evaluators: tuple[str, ...]
    else:
        max_duration, baseline, epoch_batches, evaluators = map(_constant_property, RunConstants._fields)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of training as plain data."""
        return {"timestamp": self.timestamp.to_dict(), "previous_timestamp": self.previous_timestamp.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the progress of training that `state_dict` returned.

        Raises:
            ConfigError: a timestamp in `state` is invalid.
        """
        self.timestamp = self.baseline = Timestamp.from_dict(state["timestamp"])
        self.previous_timestamp = Timestamp.from_dict(state["previous_timestamp"])

    @property
    def elapsed(self) -> float | None:
        """The completed fraction of `max_duration`, or None if there is no `max_duration`."""
        return elapsed_fraction(self.timestamp, self.max_duration)

    @property
    def is_complete(self) -> bool:
        """Whether `max_duration` has been reached."""
        elapsed = self.elapsed
        return elapsed is not None and elapsed >= 1.0


@dataclass(frozen=True, slots=True)
class MetricsRecord:
    """The metrics that were logged since the last metrics record, as floats.

    To add values to the record at `on_log`, call `ctx.log(values, across="same")`.

    Attributes:
        step: the number of completed steps.
        values: the metrics by name, reduced over the ranks.
        elapsed_seconds: the seconds of training so far, over all processes of a resumed run.
        samples_per_second: the speed of all ranks together since the last record, without the time of evaluation and saving. 0 in
            a record of an evaluation.
        tokens_per_second: the same for tokens. 0 also if tokens are not counted.
        memory_bytes: on CUDA, the peak of allocated memory on this rank's device since the process began. On the CPU, the current
            memory of this rank's process.
    """

    step: int
    values: Mapping[str, float]
    elapsed_seconds: float = 0.0
    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The facts about one checkpoint, such as its path, step, kind and losses.

    Attributes:
        path: the path or URL of its folder.
        step: the number of completed steps.
        epoch: the number of completed epochs.
        kind: `periodic`, `best`, `final`, `preempt` or `requested`.
        train_loss: the mean loss of the last step over all ranks; None if it is not known.
        val_losses: the loss of each dataset in the last evaluation, by the dataset's name.
        best_metric_key: the metric for which the checkpoint is the best so far; None if it is not saved for a metric.
        size_bytes: the size of all files together; 0 until the checkpoint is written.
        is_finite: whether all weights and the loss are finite; set once the checkpoint is written.
        requested_by: the names of the callbacks that requested the checkpoint with `Control.save`, each once. Empty if none did.
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
