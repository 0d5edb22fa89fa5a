"""Adds what a loop logs with `accelerator.log` to callsheet's metrics records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from callsheet.bridges.accelerate.guests import numbers
from callsheet.core.context import Context


class RecordTracker(GeneralTracker):  # type: ignore[misc]  # mypy does not read Accelerate's types
    """An Accelerate tracker that passes what the loop logs with `accelerator.log` on to callsheet, until its `remove` is called.

    Args:
        accelerator: the Accelerator with which the loop logs.
        ctx: the context of the training.
        give_up: called with errors of callsheet.
    """

    name = "callsheet"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, accelerator: Accelerator, ctx: Context, give_up: Callable[[Exception], None]) -> None:
        self._accelerator, self.tracker, self._give_up = accelerator, ctx, give_up
        super().__init__()  # called last, because the base class reads the attributes that were just set
        accelerator.trackers.append(self)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the loop's settings. The accelerator calls this in `init_trackers`."""
        try:
            self.tracker.log_hyperparameters(values)
        except Exception as error:
            self._give_up(error)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Log those `values` that are numbers, with the prefix `accelerate/`, at the current step of the run."""
        try:
            if found := numbers(values):
                self.tracker.log({f"accelerate/{name}": value for name, value in found.items()}, across="same")
        except Exception as error:
            self._give_up(error)

    def remove(self) -> None:
        """Remove the tracker from the accelerator."""
        # Assign a new list, because `accelerator.log` may be iterating over the old one.
        self._accelerator.trackers = [each for each in self._accelerator.trackers if each is not self]
