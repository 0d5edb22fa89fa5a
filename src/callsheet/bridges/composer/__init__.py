"""The Composer bridge: callsheet's callbacks in MosaicML Composer's Trainer, and Composer's in ours.

Only a host needs Composer itself: it is imported when one is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from callsheet.extras import needed_by

with needed_by(__name__):
    from callsheet.bridges.composer.guests import ComposerGuest, guest
from callsheet.bridges.composer.names import COMPOSER_EVENTS
from callsheet.callback import Callback
from callsheet.manager import CallbackManager
from callsheet.run_lock import LOCK_TIMEOUT_SECONDS
from callsheet.time import Time

__all__ = ["EVENT_MAP", "NOT_FIRED", "ComposerGuest", "guest", "host"]

EVENT_MAP: Mapping[str, tuple[str, ...]] = COMPOSER_EVENTS
"""Our event, and those of Composer's that it is told at, or that a guest is told at it."""

NOT_FIRED = (
    *("on_test_start", "on_test_step_start", "on_test_forward_start", "on_test_forward_end", "on_test_step_end", "on_test_end"),
    "on_preempt",
)
"""Events that Composer's Trainer has no moment for."""


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    log_interval: str | int | Time = "10ba",
    runs_folder: str | os.PathLike[str] = "runs",
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Any:
    """The callbacks as one `composer.Callback`, for `Trainer(callbacks=[host([...])])`; several of them may stand side by side.

    A run is one Composer Trainer: it begins when its constructor has loaded what there was to be loaded, and ends with `close()`. All of
    the step is told from Composer's own events, and the end of the optimizer's step from the optimizer. A stop is `state.stop_training()`,
    an evaluation is made by the Trainer's evaluators, a save by its CheckpointSaver; what it cannot be asked for is refused. The
    callbacks' states are in Composer's checkpoints, beside those of its own callbacks, and are loaded with them.

    What is not carried: the norm of the gradients, the end of clipping, forwards after the first of a batch that is evaluated in parts,
    signals, and exceptions that no callback here has raised: Composer tells nobody, and such a run ends, as failed, with `close()`.

    Args:
        strict: whether it is an error that somebody hears an event which is not told; else a warning.
        log_interval: how often a record is made; a whole number means batches.
        runs_folder: where the run's folder stands; its name is Composer's run name.
        lock_timeout_seconds: how long to wait if another process trains in the run's folder; then `RunInUseError` is raised.

    Raises:
        NotSupported: when the Trainer is made, or after its first step; see `strict`.
    """
    from callsheet.bridges.composer.hosts import ComposerHost  # it needs Composer

    return ComposerHost(
        callbacks,
        strict=strict,
        log_interval=log_interval,
        runs_folder=runs_folder,
        lock_timeout_seconds=lock_timeout_seconds,
    )
