"""Prints the messages of `callsheet exec` while a script runs.

The messages go to the process's original standard error, even if the script redirects its output or configures `logging`.
"""

from __future__ import annotations

import logging
import sys

from callsheet.errors import text_of

logger = logging.getLogger("callsheet")

_stream = sys.stderr


def begin() -> None:
    """Send callsheet's warnings and errors to standard error, and not to the logging handlers that the script configures."""
    if _stream is not None:
        handler = _Handler()
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
    logger.propagate = False


def warn(message: str) -> None:
    """Print a line on standard error."""
    _write(f"callsheet: {message}")


def log_failure(what: str, error: BaseException) -> None:
    """Log an error of callsheet, which must not end the script."""
    logger.error(
        "callsheet exec: %s (%s: %s); the script continues without callbacks",
        what,
        type(error).__name__,
        text_of(error),
        exc_info=error,
    )


class _Handler(logging.Handler):
    """Writes log messages on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _write(self.format(record))
        except Exception:  # a message that cannot be written must not end the script
            self.handleError(record)


def _write(line: str) -> None:
    if _stream is None or _stream.closed:
        return
    bars = sys.modules.get("tqdm.std")
    if bars is not None:  # `tqdm.write` erases the progress bars, writes the line, and draws the bars again below it
        bars.tqdm.write(line, file=_stream)
    else:
        print(line, file=_stream)
    _stream.flush()
