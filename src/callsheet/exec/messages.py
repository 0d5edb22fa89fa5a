"""What `callsheet exec` prints while a script runs. It goes to standard error, since standard output is the script's."""

from __future__ import annotations

import logging
import sys

from callsheet.errors import text_of


def warn(message: str) -> None:
    """Print a line on standard error."""
    print(f"callsheet: {message}", file=sys.stderr, flush=True)


def log_failure(logger: logging.Logger, what: str, error: BaseException) -> None:
    """Log an error of callsheet, which must not end the script."""
    logger.error(
        "callsheet exec: %s (%s: %s); the script continues without callbacks",
        what,
        type(error).__name__,
        text_of(error),
        exc_info=error,
    )
