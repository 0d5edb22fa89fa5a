"""Wrappers of handlers. They check the interval, reject requests that need all ranks, log errors, and check the random state."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from callsheet.core.lifecycle import is_available
from callsheet.core.randomness import random_state, restore_random_state, same_random_state
from callsheet.core.time import Interval, Timestamp, TimeUnit
from callsheet.errors import CallsheetError, FieldNotAvailable, is_from_signal_handler, text_of

if TYPE_CHECKING:
    from callsheet.core.call_sheet import HandlerEntry, Registration
    from callsheet.core.context import Context

logger = logging.getLogger("callsheet")

Handler = Callable[["Context"], Any]
Timed = Callable[[Handler, "HandlerEntry"], Handler]
"""A function that wraps a handler in another function, which also measures the handler's time."""

FAILURES_ALLOWED = 3
"""How many failures in a row disable an isolated callback."""

NOT_WRITABLE_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR})
"""The `errno` values of file errors that would occur again in every further attempt."""


def wrap_handler(entry: HandlerEntry, checking: bool, in_lane: Callable[[HandlerEntry], Handler], timed: Timed | None) -> Handler:
    """Return the handler of a call-sheet entry, wrapped as its options require, for example to check the interval.

    A handler without such options is returned unchanged, so it has no overhead.
    """
    handler = _inline(entry, checking) if entry.lane == "inline" else in_lane(entry)
    if timed is not None:
        handler = timed(handler, entry)
    if entry.every is not None:
        handler = partial(_when_due, handler, entry, entry.every)
    return handler


def _inline(entry: HandlerEntry, checking: bool) -> Handler:
    handler = entry.handler
    if entry.draws_random:
        handler = partial(_keeping_randomness, handler)
    if entry.ranks != "all":
        handler = partial(in_gate, handler)
    if entry.on_error == "isolate":
        handler = partial(call_isolated, handler, entry.registration, entry.event)
    if checking and not entry.draws_random and entry.phase not in ("change", "restore"):
        handler = partial(_checking_randomness, handler, entry)
    return handler


def _when_due(handler: Handler, entry: HandlerEntry, every: Interval, ctx: Context) -> None:
    state = ctx.state
    elapsed = state.elapsed if every.at_end or every.every.unit is TimeUnit.DURATION else None
    now = every.index(state.timestamp, elapsed)
    if entry.previous is None:  # the event is fired for the first time since the run was started or resumed
        entry.previous = _first_index(every, entry.added_at or state.baseline, ctx)
    is_end = every.at_end and state.is_complete
    due = now > entry.previous or (is_end and not entry.was_end)
    entry.previous, entry.was_end = now, is_end
    if due:
        handler(ctx)


def _first_index(every: Interval, since: Timestamp, ctx: Context) -> int:
    state = ctx.state
    elapsed = None
    if every.every.unit is TimeUnit.DURATION and state.max_duration is not None:
        elapsed = since.count(state.max_duration.unit) / state.max_duration.value
    return every.index(since, elapsed)


def in_gate(handler: Handler, ctx: Context) -> None:
    """Call a handler that runs on some ranks only. During the call, reject all requests and collectives that need every rank."""
    outer, ctx.control.in_gate = ctx.control.in_gate, True
    try:
        handler(ctx)
    finally:
        ctx.control.in_gate = outer


def _keeping_randomness(handler: Handler, ctx: Context) -> None:
    before = random_state()
    try:
        handler(ctx)
    finally:
        restore_random_state(before)


def _checking_randomness(handler: Handler, entry: HandlerEntry, ctx: Context) -> None:
    before = random_state()
    handler(ctx)
    if not same_random_state(before, random_state()):
        restore_random_state(before)
        raise CallsheetError(
            f"{entry.registration.label} ({entry.registration.source}) drew random numbers at {entry.event}, which changes training; "
            "set `draws_random = True` in its class, or use phase 'change' if it should change training"
        )


def call_isolated(handler: Handler, registration: Registration, event: str, ctx: Context) -> None:
    """Call a handler and log its errors instead of raising them. Disable the callback after too many failures in a row."""
    if (registration.is_off or registration.muted) and registration.is_silent_at(event):
        return
    try:
        handler(ctx)
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        if not is_excused(registration, event, ctx, error):
            record_failure(registration, event, ctx, error)
    else:
        registration.failures_in_a_row = 0


def is_excused(registration: Registration, event: str, ctx: Context, error: BaseException) -> bool:
    """Return whether a handler failed only because the loop of another framework has not set a field of the context.

    The field should be available at this event, so the callback may read it, and its absence is not an error of the callback. The
    handler is then skipped with a warning.
    """
    if isinstance(error, FieldNotAvailable) and ctx.excuse is not None and error.name and is_available(error.name, event):
        ctx.excuse(f"{registration.label} ({registration.source}) reads ctx.{error.name} at {event}")
        return True
    return False


def record_failure(registration: Registration, event: str, ctx: Context, error: Exception) -> None:
    """Log the error that a callback raised, instead of raising it. Disable the callback after too many failures in a row.

    A callback that may not write to its file or folder is disabled at once on this rank. Its later errors follow from that, and
    are not logged.
    """
    registration.failures += 1
    if registration.cannot_write:
        return
    registration.failures_in_a_row += 1
    where = f"{event}, step {ctx.step}, rank {ctx.run.rank}"
    kind, text = type(error).__name__, text_of(error)
    registration.last_failure = f"{kind}: {text} (at {where})"
    if isinstance(error, OSError) and error.errno in NOT_WRITABLE_ERRNOS and error.filename is not None:
        registration.cannot_write = registration.is_off = True
        logger.error(
            "Callback %s may not use %s (%s), so it is switched off in this run; training continues. Make the folder writable, or choose "
            "another one, for example with runs_folder",
            registration.label,
            error.filename,
            error.strerror,
        )
        return
    logger.error(
        "Callback %s (%s) failed at %s; training continues: %s: %s",
        registration.label,
        registration.source,
        where,
        kind,
        text,
        exc_info=error,
    )
    if registration.failures_in_a_row == FAILURES_ALLOWED:
        if ctx.control.is_shared:
            # All ranks must disable the callback at the same step, so ask the other ranks through `ctx.control`.
            ctx.control.switch_off(registration.label, registration.number, registration.failures_in_a_row)
        else:
            registration.switch_off(registration.failures_in_a_row)
