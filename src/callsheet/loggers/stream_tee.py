"""Python's own `sys.stdout` and `sys.stderr`, listened to."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

Take = Callable[[str, str], None]
"""Is given text, and the name of the stream it was written to."""


class StreamTee:
    """Stands before a stream: what is written there is also given to `take`, in the process that made the tee.

    When it is closed while somebody else stands before it, it stays, and only passes on; if it ever comes to stand in `sys` again it
    takes itself away.
    """

    def __init__(self, name: str, take: Take) -> None:
        self._name = name
        self._under: TextIO = getattr(sys, name)
        self._take: Take | None = take
        self._process = os.getpid()
        setattr(sys, name, self)
        _move_handlers(self._under, self)

    @property
    def under(self) -> Any:
        """The stream that it stands before; of other tees, only one that is still open."""
        under: Any = self._under
        return under.under if isinstance(under, StreamTee) and under._take is None else under

    def write(self, text: str) -> int:
        """Write to the stream, and tell."""
        if self._take is None:
            self._step_aside()
        elif os.getpid() == self._process:
            self._take(text, self._name)
        return self._under.write(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def close_tee(self) -> None:
        """Listen no more, and go away where that can be; the stream itself stays open. May be called twice."""
        self._take = None
        self._step_aside()
        _move_handlers(self, self.under)

    def _step_aside(self) -> None:
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self.under)

    def __iter__(self) -> Iterator[str]:
        return iter(self._under)

    def __getattr__(self, name: str) -> Any:
        if name == "_under":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._under, name)


def _move_handlers(source: Any, target: Any) -> None:
    """Have the handlers of logging that write to one stream write to another: they keep the one that they found when they were made."""
    known = [logger for logger in logging.Logger.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in [logging.getLogger(), *known]:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is source:
                handler.setStream(target)
