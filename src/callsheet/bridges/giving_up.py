"""Decides what happens after an error in a host, the adapter that runs callsheet in another framework's loop.

Errors of the user's code are raised. After an error of the host itself, training continues without the host.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from callsheet.errors import CallsheetError, FieldNotAvailable, HostError, is_from_signal_handler, is_users, text_of
from callsheet.run.process_groups import HostGaveUp

if TYPE_CHECKING:
    from callsheet.bridges.observed_run import ObservedRun

logger = logging.getLogger("callsheet")


def is_for_user(error: BaseException) -> bool:
    """Return whether to raise the error to the user. If not, it comes from a bug in callsheet on some rank, and is only logged.

    The user must know about:

    - an error of a callback, or of another function of the user.
    - an error that callsheet raises on purpose.
    - a file that cannot be read or written.
    - a `BaseException` that is not an `Exception`, such as `KeyboardInterrupt`.
    - an error that the user's signal handler has raised while a host was running.

    A `HostGaveUp` (another rank has left the run) is only logged, because training continues on that other rank too.
    """
    if isinstance(error, HostGaveUp):
        return False
    is_on_purpose = isinstance(error, (CallsheetError, OSError)) and not isinstance(error, FieldNotAvailable)
    return not isinstance(error, Exception) or is_users(error) or is_on_purpose or is_from_signal_handler(error)


def give_up(run: ObservedRun, error: BaseException, *, contained: bool = False) -> None:
    """End the run because of a bug in callsheet's adapter: log the error, and fire `on_exception` and `on_run_end`.

    Training continues without callsheet. The caller must remove the host's hooks. If there are several ranks, the run ends in the
    same way on the others, at their next collective of callsheet.

    Args:
        run: the run.
        error: the error.
        contained: whether an error about which the user must know is handled in the same way, instead of being raised.

    Raises:
        the error: the user must know about it, and `contained` is False. In this case, the run has not ended.
    """
    is_fault = not is_for_user(error)
    if not is_fault and not contained:
        raise error
    if run.lifetime.has_ended:  # an earlier error has already ended the run, and was logged
        return
    message = (
        f"callsheet cannot follow {run.host} after step {run.state.timestamp.batch} ({type(error).__name__}: {text_of(error)}). The callbacks "
        "are not called any more in this run, which is recorded as failed. Training continues"
    )
    is_of_this_rank = not isinstance(error, HostGaveUp)
    if is_fault and is_of_this_rank:
        message += ". Please report this with the traceback"
    logger.error("%s", message, exc_info=error if is_of_this_rank else None)
    given_up = HostError(message)
    given_up.__cause__ = error
    run.fail(given_up)


def weakly(leave: Callable[[Exception], None]) -> Callable[[Exception], None]:
    """Return a function that calls `leave`, a method of a host, without keeping the host alive.

    If the host no longer exists, an error of a hook that was still running is ignored, because the host has already ended its run.
    """
    method = weakref.WeakMethod(leave)

    def called(error: Exception) -> None:
        if (bound := method()) is not None:
            bound(error)

    return called
