"""Protocols for the evaluation and the checkpoints of a run: the methods that `Boundaries` calls.

The Trainer implements these protocols, and so do hosts, which pass requests on to their framework.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from callsheet.core.context import Boundary, Context
from callsheet.core.control import Request
from callsheet.core.run_state import CheckpointInfo
from callsheet.core.time import Interval


@dataclass
class DueEvaluation:
    """An evaluation that is due at the end of a step, epoch or round, and that has not been done yet.

    `step` is the number of the last step; `boundary` is `"step"`, `"epoch"` or `"round"`; `names` are the names of the datasets.

    `is_checkpoint_due_fired` is True once `on_checkpoint_due` has been fired before this evaluation. Checkpoints store the fields
    of this class by name.
    """

    step: int
    boundary: Boundary
    names: list[str]
    is_checkpoint_due_fired: bool = False

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the `DueEvaluation` from its fields in a checkpoint. Old checkpoints call `is_checkpoint_due_fired` `is_told`."""
        return cls(**{("is_checkpoint_due_fired" if name == "is_told" else name): value for name, value in state.items()})


class EvaluationSchedule(Protocol):
    """How often one dataset is evaluated. `every` is None if the dataset is evaluated only on request."""

    every: Interval | None


class EvaluationPart(Protocol):
    """The methods that `Boundaries` needs to evaluate datasets.

    `results` holds the latest results by dataset name; `undone` is an evaluation that is due but not done, or None.
    """

    undone: DueEvaluation | None
    results: dict[str, dict[str, float]]

    @property
    def is_resumed(self) -> bool:
        """Whether checkpoints record an evaluation that is due but not done yet, so that a resumed run can do it."""

    @property
    def ends_at_signal(self) -> bool:
        """Whether a preemption signal ends a running evaluation early. A resumed run then repeats the evaluation."""

    @property
    def loaders(self) -> Mapping[str, Any]:
        """The evaluation dataloaders, by dataset name."""

    @property
    def schedules(self) -> Mapping[str, EvaluationSchedule]:
        """When each dataset is evaluated, by dataset name."""

    def due(self, ctx: Context, is_over: bool) -> list[str]:
        """Return the names of the datasets that are due for evaluation now."""

    def evaluate(self, loaders: Mapping[str, Any], *, standalone: bool) -> dict[str, dict[str, float]]:
        """Evaluate the model on these dataloaders, and return the losses and metrics by dataset name."""

    def take(self) -> dict[str, float]:
        """Return the values that were logged during the evaluation."""

    def mark_done(self, ctx: Context, names: Iterable[str]) -> None:
        """Record that these datasets have been evaluated."""


class Stateful(Protocol):
    """A part of a run whose state is saved in checkpoints."""

    def state_dict(self) -> Any:
        """Return the state, as plain data and tensors."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load the state that `state_dict` returned."""


class CheckpointsPart(Protocol):
    """The methods that `Boundaries` needs to save and load checkpoints.

    Checkpoints store the states of the parts in `shared` (the same on all ranks) and in `local` (each rank's own).
    """

    shared: dict[str, Stateful]
    local: dict[str, Stateful]
    optional: set[str]

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in the background."""

    @property
    def next_step(self) -> int:
        """The training step after which the loop must call `prepare` next."""

    stopped_by: Request | None

    def save(
        self,
        requests: tuple[Request, ...],
        path: str | None,
        *,
        train_loss: float | None,
        val_losses: Mapping[str, float],
        waits: bool,
    ) -> CheckpointInfo | None:
        """Save a checkpoint for these requests. `requests` is empty if the user called `Trainer.save_checkpoint`.

        Return None if another framework's loop saves the checkpoint later.
        """

    def load(self, resume: str | os.PathLike[str] | None) -> None:
        """Load the checkpoint that `resume` names, or that a callback requests."""

    def check_writable(self) -> None:
        """Raise CheckpointError if a callback saves checkpoints regularly but the folder for them is not writable."""

    def durable(self) -> int:
        """Return the number of background saves that this rank has finished."""

    def close(self) -> None:
        """Wait until a background save, if there is one, has finished. Called at the run's end."""

    def prepare(self, step: int) -> None:
        """After training step `step`, allocate the buffers that the first background save needs."""

    def publish(self, durable: int) -> None:
        """Fire `on_checkpoint_published` for the background save, if every rank has finished this save.

        Args:
            durable: the number of background saves that every rank has finished so far.
        """

    def finish(self) -> None:
        """Wait until the background save is complete, and fire `on_checkpoint_published`."""

    def earlier_stop(self) -> Request | None:
        """Return the request that stopped the run before it was resumed, or None if training may continue."""
