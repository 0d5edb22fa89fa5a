"""`host`, which runs callsheet's callbacks in InstructLab's training. InstructLab and torch are imported when `host` is called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from callsheet.core.callback import Callback
from callsheet.core.manager import CallbackManager
from callsheet.run.defaults import LOCK_TIMEOUT_SECONDS


def host(
    callbacks: CallbackManager | Callback | Iterable[Callback] | None,
    *,
    strict: bool = True,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Any:
    """Wrap the callbacks in one InstructLab callback, for `TrainingArgs(callbacks=[host([...])])` or InstructLab's `CallbackManager`.

    InstructLab calls its callbacks on a separate thread. Training does not wait for them, and they cannot read the model. So
    callsheet's callbacks receive only what InstructLab reports, on each rank separately: losses, learning rates, speeds,
    evaluations and checkpoints. A metrics record is made whenever InstructLab calls `on_log`. An error in a callback ends
    callsheet's run as failed, but InstructLab's training continues.

    If InstructLab starts the ranks itself, send the callbacks to the ranks: `with hosted.sent(): run_training(...)`, where
    `hosted` is what `host` has returned.

    Args:
        callbacks: a manager, a callback, or any iterable of callbacks.
        strict: whether it is an error if a callback needs something that is not available. False: a warning is logged.
        lock_timeout_seconds: how long to wait if another process writes in the run's folder. Then the run fails with
            `RunInUseError`, and InstructLab's training continues.

    Returns:
        A callback of InstructLab.

    Raises:
        NotSupported: a callback listens to an event that is never fired, reads the model or the data, or makes a request; see `strict`.
            Or the installed release of InstructLab has no callbacks.
    """
    # Import `hook_host` only when `host` is called, because `hook_host` imports torch.
    from callsheet.bridges.instructlab.hook_host import host_of

    return host_of(callbacks, strict=strict, lock_timeout_seconds=lock_timeout_seconds)
