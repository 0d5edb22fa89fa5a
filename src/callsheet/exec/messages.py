"""What `callsheet exec` prints while a script runs.

It goes to the standard error that the process was started with, even if the script redirects its output or configures `logging`.
"""

from __future__ import annotations

import logging
import sys

from callsheet.errors import text_of

logger = logging.getLogger("callsheet")

_stream = sys.stderr


def begin() -> None:
    """Send callsheet's warnings and errors to standard error, and no messages to the handlers that the script configures."""
    if _stream is not None:
        handler = logging.StreamHandler(_stream)
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
    logger.propagate = False


def warn(message: str) -> None:
    """Print a line on standard error."""
    if _stream is not None and not _stream.closed:
        print(f"callsheet: {message}", file=_stream, flush=True)


def log_failure(what: str, error: BaseException) -> None:
    """Log an error of callsheet, which must not end the script."""
    logger.error(
        "callsheet exec: %s (%s: %s); the script continues without callbacks",
        what,
        type(error).__name__,
        text_of(error),
        exc_info=error,
    )
