"""Determines which metrics records in a run's folder are still valid after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from callsheet.core.context import Context


@dataclass(frozen=True, slots=True)
class ValidRecords:
    """How many metrics records in a run's folder are still valid after a resume.

    Args:
        before: the number of records that were logged before the checkpoint was saved.
        kept: `before` plus the number of records of the checkpoint's step that were logged after the checkpoint, such as those of an
            evaluation. These records are valid unless the resumed run logs a record of that step again.
        step: the checkpoint's step.
    """

    before: int = 0
    kept: int = 0
    step: int = 0

    def are_repeated_by(self, step: int) -> bool:
        """Return whether a new record at `step` replaces records that are already in the run's folder.

        The replaced records are those of the checkpoint's step that were logged after the checkpoint.
        """
        return self.kept > self.before and step <= self.step


def valid_records(ctx: Context, steps: Sequence[int], counted: int | None) -> ValidRecords:
    """Return how many metrics records in the run's folder are valid after the checkpoint was loaded.

    This function must be called at `on_checkpoint_load_end`. If the run starts from the beginning, or from another run's
    checkpoint, no record is valid.

    Args:
        ctx: the context.
        steps: the steps of the records.
        counted: the number of records so far, as saved in the checkpoint; if it is None, records up to the checkpoint's step are
            counted.
    """
    resumed = ctx.checkpoint
    if resumed is None or not _is_own(ctx, resumed.path):
        return ValidRecords()
    if counted is None:
        counted = sum(step <= resumed.step for step in steps)
    before = min(counted, len(steps))  # after a crash of the machine, the file may lack some records
    same_step = sum(1 for _ in takewhile(lambda step: step <= resumed.step, steps[before:]))
    return ValidRecords(before, before + same_step, resumed.step)


def _is_own(ctx: Context, checkpoint: str) -> bool:
    """Return whether the checkpoint belongs to this run: its path is in the run's folder or in `run.checkpoints`."""
    run = ctx.run
    if "://" in run.checkpoints:
        return checkpoint.startswith(f"{run.checkpoints.rstrip('/')}/")
    places = [Path(place).absolute() for place in (run.folder, run.checkpoints) if place]
    return "://" not in checkpoint and any(Path(checkpoint).absolute().is_relative_to(place) for place in places)
