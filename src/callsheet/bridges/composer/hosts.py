"""Defines `host`, which runs callsheet's callbacks in Composer's Trainer. Composer is imported only when `host` is called."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.core.optional import needed_by
from callsheet.core.time import Time
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS, LOG_INTERVAL


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    log_interval: str | int | Time = LOG_INTERVAL,
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Any:
    """Wrap the callbacks in one `composer.Callback`, for `Trainer(callbacks=[host([...])])`. A Trainer can have several hosts.

    A run lasts as long as a Composer Trainer: it begins in the Trainer's constructor, after a checkpoint (if any) was loaded,
    and ends with `close()`. The host fires the events of a step at Composer's events, and the end of the optimizer's step in a
    hook on the optimizer. If a callback requests a stop, the host calls `state.stop_training()`. The Trainer's evaluators carry
    out requests to evaluate, and its `CheckpointSaver` carries out requests to save. Requests that the Trainer cannot carry out
    are rejected. Composer's checkpoints also contain the states of callsheet's callbacks, which are restored when the Trainer
    loads one.

    Not supported: the gradient norm, the end of clipping, signals, forward passes after the first of a batch that is evaluated in
    parts, and exceptions that were not raised by a callback of this host. Composer does not report such exceptions. A run
    that such an exception ends is recorded as failed at `close()`.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        strict: whether to raise an error if a callback listens to an event that is never fired. False: a warning is logged.
        log_interval: how often a metrics record is made; an integer means batches.
        run_name: the name of callsheet's run; None: Composer's run name.
        runs_folder: the folder that contains the run's folder.
        lock_timeout_seconds: how long to wait while another process trains in the run's folder; then `RunInUseError` is raised.

    Returns:
        A `composer.Callback`.

    Raises:
        NotSupported: a callback cannot work in this Trainer, see `strict`. Raised in the Trainer's constructor or after the first
            step.
        MissingPackage: Composer is not installed.
    """
    with needed_by("callsheet.bridges.composer.host"):
        from callsheet.bridges.composer.trainer_host import ComposerHost  # imported here, since `trainer_host` imports Composer

    return ComposerHost(
        callbacks,
        strict=strict,
        log_interval=log_interval,
        run_name=run_name,
        runs_folder=runs_folder,
        lock_timeout_seconds=lock_timeout_seconds,
    )
