"""Copies what is written to `sys.stdout` and `sys.stderr`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

Take = Callable[[str, str], None]
"""A function that receives text and the name of the stream to which the text was written."""


class StreamTee:
    """A stream that replaces `sys.stdout` or `sys.stderr`, and passes text on to the original stream and to the function `take`.

    If another object wraps the tee when the tee is closed, the tee stays in place and only forwards. When the tee is the stream
    in `sys` again, its next `write` removes it.
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
        """The stream that this tee replaced. If that stream is a closed tee, the stream below the closed tee is returned instead."""
        under: Any = self._under
        return under.under if isinstance(under, StreamTee) and under._take is None else under

    def write(self, text: str) -> int:
        """Write `text` to the original stream, and pass it to the function `take`."""
        if self._take is None:
            self._remove()
        elif os.getpid() == self._process:
            self._take(text, self._name)
        return self._under.write(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write each of the `lines` to the original stream, and pass it to the function `take`."""
        for line in lines:
            self.write(line)

    def close_tee(self) -> None:
        """Stop copying. Restore the original stream, unless another object has replaced or wrapped the tee.

        The original stream is not closed. This method may be called twice.
        """
        self._take = None
        self._remove()
        _move_handlers(self, self.under)

    def _remove(self) -> None:
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self.under)

    def __iter__(self) -> Iterator[str]:
        return iter(self._under)

    def __getattr__(self, name: str) -> Any:
        # While this object is being copied, the copy has no `_under` yet, and reading `_under` below would recurse forever.
        if name == "_under":
            raise AttributeError(name)
        return getattr(self._under, name)


def _move_handlers(source: Any, target: Any) -> None:
    """Make all logging handlers that write to the stream `source` write to the stream `target` instead.

    A handler keeps the stream that was in `sys` when the handler was created.
    """
    known = [logger for logger in logging.Logger.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in [logging.getLogger(), *known]:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is source:
                handler.setStream(target)
