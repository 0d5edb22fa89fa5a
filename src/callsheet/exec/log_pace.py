"""Determines how often the metrics records of an observed script are made."""

from __future__ import annotations

from callsheet.bridges.boundary_order import HostedRecords
from callsheet.core.context import Context
from callsheet.core.time import Interval

FIRST_INTERVAL_STEPS = 10
"""The number of steps from one metrics record to the next, unless the user sets another number or the steps are very short."""
_MIN_INTERVAL_SECONDS = 2.0  # if less training time than this lies between two records, the interval is doubled
_MAX_INTERVAL_SECONDS = 10.0


class LogPace:
    """The number of steps from one metrics record of a run to the next. The number may change during the run.

    Args:
        steps: a fixed number of steps. None: ten steps at first. The number is doubled whenever a record comes less than two
            seconds after the previous record, so that records take a small share of the time even if steps are short. The number
            is set to ten again if there was no record for ten seconds.
    """

    def __init__(self, steps: int | None) -> None:
        self.steps = steps or FIRST_INTERVAL_STEPS
        """The current number of steps from one metrics record to the next."""
        self._is_fixed = steps is not None
        self._last = 0.0

    def adapt(self, seconds: float) -> bool:
        """Double `steps` if the new metrics record came too soon after the previous one. Return whether `steps` changed.

        `seconds` is the total training time at the new record.
        """
        since, self._last = seconds - self._last, seconds
        if self._is_fixed or since >= _MIN_INTERVAL_SECONDS:
            return False
        self.steps *= 2
        return True

    def shorten(self, seconds: float) -> bool:
        """Reset `steps` to ten if training has run too long (`seconds`) since the last record. Return whether `steps` changed."""
        if self._is_fixed or self.steps == FIRST_INTERVAL_STEPS or seconds < _MAX_INTERVAL_SECONDS:
            return False
        self.steps = FIRST_INTERVAL_STEPS
        return True


class PacedRecords(HostedRecords):
    """Makes metrics records at the interval that `pace` determines. `pace` must be set before training."""

    pace: LogPace

    def fire_log(self, ctx: Context) -> None:
        is_scheduled = self.are_due(ctx)  # False for the record of an evaluation and for the last record of a run
        super().fire_log(ctx)
        if is_scheduled and self.pace.adapt(ctx.state.timestamp.seconds):
            self.change_interval(Interval(self.pace.steps), ctx)
