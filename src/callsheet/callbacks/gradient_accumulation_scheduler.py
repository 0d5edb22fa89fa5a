"""Changes the number of batches per step at the start of given epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.errors import ConfigError


class GradientAccumulationScheduler(Callback):
    """Change the number of batches over which gradients are accumulated, at the start of given epochs.

    Before the first epoch in the schedule the run's own `gradient_accumulation_steps` applies. The loss of a step is the mean
    over all samples of its batches, so choose the learning rate for the larger batch. The last step of an epoch may have fewer
    batches. This callback keeps no state, because a resumed run uses the value for its epoch.

    Args:
        schedule: maps an epoch to the number of batches per step in that epoch and the following ones. Epochs are counted from 1,
            as in `ctx.epoch`: `{1: 1, 5: 4}`.

    Raises:
        ConfigError: the schedule is empty, or an epoch or a number of batches is not a whole number of at least 1.
    """

    phase = "change"
    collective = True  # all ranks must accumulate the same number of batches
    requests = ("set_gradient_accumulation",)

    def __init__(self, *, schedule: Mapping[int, int]) -> None:
        if not isinstance(schedule, Mapping) or not schedule:
            raise ConfigError(f"schedule={schedule!r}: give batches by epoch, such as {{1: 1, 5: 4}}")
        # Accept strings as keys, because arguments that were saved as JSON have string keys.
        read: dict[Any, Any] = {int(key) if str(key).isdecimal() else key: batches for key, batches in schedule.items()}
        for epoch, batches in read.items():
            if any(type(number) is not int or number < 1 for number in (epoch, batches)):
                raise ConfigError(
                    f"schedule: {epoch!r}: {batches!r} is invalid; both the epoch and its batches must be whole numbers from 1 up"
                )
        self._schedule = dict(sorted(read.items()))

    def on_epoch_start(self, ctx: Context) -> None:
        due = [batches for epoch, batches in self._schedule.items() if epoch <= ctx.epoch]
        if due:
            ctx.control.set_gradient_accumulation(due[-1])
