"""A filter for log messages on ranks above 0, so that a message does not appear once for every rank."""

from __future__ import annotations

import logging
from typing import Literal, get_args

from callsheet.core.ranks import Ranks
from callsheet.errors import ConfigError, did_you_mean

LogRanksChoice = Literal["zero", "all"]
LOG_RANKS: tuple[LogRanksChoice, ...] = get_args(LogRanksChoice)


class LogRanks:
    """Hides log records below ERROR on ranks above 0, from `start` to `end`.

    The filter is added to the handlers of all loggers and not to the loggers, because a logger's filter does not apply to the
    records of its child loggers. Handlers that are added after `start` are not filtered.

    Args:
        choice: `"zero"` to hide these records, or `"all"` to log on every rank.
        ranks: this process's rank and the world size.

    Raises:
        ConfigError: `choice` is unknown.
    """

    def __init__(self, choice: LogRanksChoice, ranks: Ranks) -> None:
        if choice not in LOG_RANKS:
            raise ConfigError(f"unknown log_ranks {choice!r}{did_you_mean(choice, LOG_RANKS)} (one of {', '.join(LOG_RANKS)})")
        self._filters = choice == "zero" and ranks.rank > 0
        self._handlers: list[logging.Handler] = []

    def start(self) -> None:
        """Add the filter that hides messages below ERROR. On rank 0 this does nothing."""
        if self._filters and not self._handlers:
            named = [logger for logger in logging.Logger.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
            loggers = [logging.getLogger(), *named]
            self._handlers = list({id(handler): handler for logger in loggers for handler in logger.handlers}.values())
            if not logging.getLogger().handlers and logging.lastResort is not None:
                self._handlers.append(logging.lastResort)
            for handler in self._handlers:
                handler.addFilter(self._is_error)

    def end(self) -> None:
        """Remove the filter. This may be called twice."""
        for handler in self._handlers:
            handler.removeFilter(self._is_error)
        self._handlers = []

    def _is_error(self, record: logging.LogRecord) -> bool:  # a method, so that `end` removes the filter of this object only
        return record.levelno >= logging.ERROR
