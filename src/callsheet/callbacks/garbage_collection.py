"""Runs garbage collection between steps, at the same steps on all ranks."""

from __future__ import annotations

import gc
import time

from callsheet.core.callback import Callback
from callsheet.core.context import Context
from callsheet.errors import ConfigError


class GarbageCollection(Callback):
    """Run Python's garbage collection at an interval of steps, and at no other time.

    By default, Python collects at arbitrary times, which differ between ranks. Ranks that synchronize at each step then wait for
    each other's collections. This callback collects when training begins, disables automatic collection, and collects at every
    step that is a multiple of `interval`, the same on all ranks, and every `interval` steps of an evaluation. Objects that are
    not part of a reference cycle are still freed at once. When training ends, also with an exception, automatic collection is
    enabled again if it was enabled before.

    Logs `gc/seconds`: the time of the collections since the last record, on the rank where it was longest.

    Args:
        interval: steps from one collection to the next.
        generation: how thorough: 2 examines everything; 1 and 0 examine younger objects only, in less time.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(self, *, interval: int = 1000, generation: int = 2) -> None:
        if interval < 1:
            raise ConfigError(f"interval={interval}: give at least one step")
        if generation not in (0, 1, 2):
            raise ConfigError(f"generation={generation!r}: Python has the generations 0, 1 and 2")
        self._interval = interval
        self._generation = generation
        self._has_disabled = False
        self._evaluated = 0  # how many steps of the current evaluation are completed

    def on_train_start(self, ctx: Context) -> None:
        """Run the garbage collection once, and disable Python's automatic collection."""
        self._evaluated = 0
        if gc.isenabled():
            gc.disable()
            self._has_disabled = True
        gc.collect(self._generation)

    def on_train_step_end(self, ctx: Context) -> None:
        """Run the garbage collection if the step is a multiple of the interval."""
        if ahead := -ctx.step % self._interval:
            ctx.mute(self, "on_train_step_end", until=ctx.step + ahead)
        else:
            self._collect(ctx)

    def on_eval_all_start(self, ctx: Context) -> None:
        """Set the count of evaluation steps to zero. Garbage is collected after every `interval` of these steps."""
        self._evaluated = 0

    def on_eval_step_end(self, ctx: Context) -> None:
        """Run the garbage collection every `interval` steps of an evaluation too, because evaluations may be long."""
        self._evaluated += 1
        if self._has_disabled and self._evaluated % self._interval == 0:
            self._collect(ctx)

    def on_train_end(self, ctx: Context) -> None:
        self._restore()

    def on_exception(self, ctx: Context) -> None:
        self._restore()

    def on_run_end(self, ctx: Context) -> None:
        self._restore()

    def _collect(self, ctx: Context) -> None:
        began = time.perf_counter()
        gc.collect(self._generation)
        ctx.log({"gc/seconds": time.perf_counter() - began}, over="sum", across="max")

    def _restore(self) -> None:
        if self._has_disabled:
            self._has_disabled = False
            gc.enable()
