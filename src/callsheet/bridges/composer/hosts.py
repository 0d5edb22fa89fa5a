"""callsheet's callbacks as a callback of Composer. Composer is imported when a host is created."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.core.time import Time
from callsheet.run.run_lock import LOCK_TIMEOUT_SECONDS


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    log_interval: str | int | Time = "10ba",
    runs_folder: str | os.PathLike[str] = "runs",
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Any:
    """Wrap the callbacks in one `composer.Callback`, for `Trainer(callbacks=[host([...])])`. A Trainer may have several hosts.

    One Composer Trainer is one run. The run begins when the Trainer's constructor has loaded its checkpoint, if any, and ends with
    `close()`. Composer's own events cause all events of a step, except the end of the optimizer's step, for which the optimizer has a hook.
    A stop request calls `state.stop_training()`, the Trainer's evaluators carry out evaluation requests, and its CheckpointSaver
    save requests. Requests that it cannot carry out are rejected. Composer's checkpoints contain the callbacks' states, beside those of
    its own callbacks, and they are loaded together.

    Not supported: the gradient norm, the end of clipping, forwards after the first of a batch that is evaluated in parts, signals, and
    exceptions that no callback here has raised. Composer does not report these; such a run ends with `close()` and is recorded as failed.

    Args:
        strict: whether a callback that listens to an event which is never fired is an error. False: a warning is logged.
        log_interval: how often a metrics record is made; an integer means batches.
        runs_folder: the folder that contains the run's folder, whose name is Composer's run name.
        lock_timeout_seconds: how long to wait if another process trains in the run's folder, before `RunInUseError` is raised.

    Raises:
        NotSupported: when the Trainer is created or after its first step, depending on `strict`.
    """
    from callsheet.bridges.composer.trainer_host import ComposerHost  # imports Composer

    return ComposerHost(
        callbacks,
        strict=strict,
        log_interval=log_interval,
        runs_folder=runs_folder,
        lock_timeout_seconds=lock_timeout_seconds,
    )
