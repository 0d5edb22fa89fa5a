"""Python's garbage collection, between steps, and on all ranks between the same ones."""

from __future__ import annotations

import gc
import time

from callsheet.callback import Callback
from callsheet.context import Context
from callsheet.errors import ConfigError


class GarbageCollection(Callback):
    """Collect garbage every so many steps, and not at any other time.

    Python collects when it sees fit, and on every rank at another moment; where ranks meet at each step, all wait for each of them. With
    this, training begins with a collection and goes on without, until a step whose number `interval` divides, the same on all ranks,
    or so many steps into an evaluation. What is not part of a cycle is freed at once, as always. As soon as training has ended, also by an
    exception, collection is on again if it was before.

    Logs `gc/seconds`: what the collections since the last record took, on the rank where it was most.

    Args:
        interval: steps from one collection to the next.
        generation: how thorough: 2 looks at everything, 1 and 0 at what is younger, in less time.

    Raises:
        ConfigError: an argument that cannot work.
    """

    def __init__(self, *, interval: int = 1000, generation: int = 2) -> None:
        if interval < 1:
            raise ConfigError(f"interval={interval}: give at least one step")
        if generation not in (0, 1, 2):
            raise ConfigError(f"generation={generation!r}: Python has the generations 0, 1 and 2")
        self._interval = interval
        self._generation = generation
        self._has_disabled = False
        self._evaluated = 0  # steps of the evaluation in hand

    def on_train_start(self, ctx: Context) -> None:
        """From here on nobody else collects."""
        self._evaluated = 0
        if gc.isenabled():
            gc.disable()
            self._has_disabled = True
        gc.collect(self._generation)

    def on_train_step_end(self, ctx: Context) -> None:
        """Collect, where the step is one of those."""
        if ahead := -ctx.step % self._interval:
            ctx.mute(self, "on_train_step_end", until=ctx.step + ahead)
        else:
            self._collect(ctx)

    def on_eval_all_start(self, ctx: Context) -> None:
        """Count anew."""
        self._evaluated = 0

    def on_eval_step_end(self, ctx: Context) -> None:
        """An evaluation may have more steps than training between two of them."""
        self._evaluated += 1
        if self._has_disabled and self._evaluated % self._interval == 0:
            self._collect(ctx)

    def on_train_end(self, ctx: Context) -> None:
        """Leave collection as it was."""
        self._restore()

    def on_exception(self, ctx: Context) -> None:
        """Likewise."""
        self._restore()

    def on_run_end(self, ctx: Context) -> None:
        """Likewise, however it came to this."""
        self._restore()

    def _collect(self, ctx: Context) -> None:
        began = time.perf_counter()
        gc.collect(self._generation)
        ctx.log({"gc/seconds": time.perf_counter() - began}, over="sum", across="max")

    def _restore(self) -> None:
        if self._has_disabled:
            self._has_disabled = False
            gc.enable()
