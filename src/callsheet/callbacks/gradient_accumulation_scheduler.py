"""How many batches make a step, by the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.errors import ConfigError


class GradientAccumulationScheduler(Callback):
    """Accumulate gradients over more batches, or fewer, from an epoch on.

    Before the first of its epochs the run's own `gradient_accumulation_steps` holds. A step's mean is over all samples of its batches, so that the learning
    rate is for the larger batch; the last step of an epoch has what is left. It keeps no state: a resumed run takes what its epoch calls for.

    Args:
        schedule: the batches of a step by the epoch from which on they count; epochs are counted from 1, as `ctx.epoch` is: `{1: 1, 5: 4}`.

    Raises:
        ConfigError: a schedule that is empty, or holds anything but whole numbers from 1 up.
    """

    phase = "change"
    collective = True  # all ranks take the same

    def __init__(self, *, schedule: Mapping[int, int]) -> None:
        if not isinstance(schedule, Mapping) or not schedule:
            raise ConfigError(f"schedule={schedule!r}: give batches by epoch, such as {{1: 1, 5: 4}}")
        # the keys of JSON are strings: a spec that was written as such has to be built again
        read: dict[Any, Any] = {int(key) if str(key).isdecimal() else key: batches for key, batches in schedule.items()}
        for epoch, batches in read.items():
            if any(type(number) is not int or number < 1 for number in (epoch, batches)):
                raise ConfigError(
                    f"schedule: {epoch!r}: {batches!r}; both the epoch and its batches are whole numbers, from 1 up"
                )
        self._schedule = dict(sorted(read.items()))

    def on_epoch_start(self, ctx: Context) -> None:
        """Take what the epoch calls for."""
        called_for = [batches for epoch, batches in self._schedule.items() if epoch <= ctx.epoch]
        if called_for:
            ctx.control.set_gradient_accumulation(called_for[-1])
