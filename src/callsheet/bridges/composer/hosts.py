"""`host`, which runs callsheet's callbacks in Composer's Trainer. Composer is imported only when `host` is called."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.core.optional import needed_by
from callsheet.core.time import Time
from callsheet.run.run_lock import LOCK_TIMEOUT_SECONDS


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    log_interval: str | int | Time = "10ba",
    run_name: str | None = None,
    runs_folder: str | os.PathLike[str] = "runs",
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Any:
    """Wrap the callbacks in one `composer.Callback`, for `Trainer(callbacks=[host([...])])`. A Trainer can have several of them.

    One Composer Trainer is one run. The run begins when the Trainer's constructor has loaded its checkpoint, if there is one, and
    ends with `close()`. Composer's events cause all events of a step, except the end of the optimizer's step, for which there is
    a hook on the optimizer. A stop request calls `state.stop_training()`. The Trainer's evaluators carry out requests to
    evaluate, and its CheckpointSaver carries out requests to save. Requests that the Trainer cannot carry out are rejected.
    Composer's checkpoints contain the callbacks' states in addition to those of its own callbacks, and they are loaded together.

    Not supported: the gradient norm, the end of clipping, forward passes after the first of a batch that is evaluated in parts,
    signals, and exceptions that were not raised by a callback of this host. Composer does not report such exceptions; the run
    then ends with `close()` and is recorded as failed.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        strict: whether a callback that listens to an event which is never fired is an error. False: a warning is logged.
        log_interval: how often a metrics record is made; an integer means batches.
        run_name: the name of callsheet's run; None: Composer's run name.
        runs_folder: the folder that contains the run's folder.
        lock_timeout_seconds: how long to wait if another process trains in the run's folder, before `RunInUseError` is raised.

    Returns:
        A `composer.Callback`.

    Raises:
        NotSupported: when the Trainer is created or after its first step, depending on `strict`.
        MissingPackage: Composer is not installed.
    """
    with needed_by("callsheet.bridges.composer.host"):
        from callsheet.bridges.composer.trainer_host import ComposerHost  # imported here, because it imports Composer

    return ComposerHost(
        callbacks,
        strict=strict,
        log_interval=log_interval,
        run_name=run_name,
        runs_folder=runs_folder,
        lock_timeout_seconds=lock_timeout_seconds,
    )
