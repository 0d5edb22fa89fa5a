from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from callsheet.loggers.support.stream_tee import StreamTee


def current_stderr() -> Any:
    """Return the current `sys.stderr`. A function, because type checkers narrow the attribute."""
    return sys.stderr


class Received(list[tuple[str, str]]):
    def take(self, text: str, stream: str) -> None:
        self.append((stream, text))

    @property
    def text(self) -> str:
        return "".join(text for _, text in self)


@contextlib.contextmanager
def replaced_stderr() -> Iterator[io.StringIO]:
    """Replace standard error. This is not a fixture, because pytest replaces the stream again between fixture and test."""
    stream = io.StringIO()
    before, sys.stderr = sys.stderr, stream
    try:
        yield stream
    finally:
        sys.stderr = before


def test_captures_and_forwards() -> None:
    with replaced_stderr() as stream:
        received = Received()
        tee = StreamTee("stderr", received.take)
        print("printed", file=sys.stderr)
        sys.stderr.writelines(["a", "b\n"])
        tee.close_tee()
        tee.close_tee()
        assert current_stderr() is stream
        print("not captured", file=sys.stderr)
        assert stream.getvalue() == "printed\nab\nnot captured\n"
        assert received.text == "printed\nab\n"
        assert {name for name, _ in received} == {"stderr"}


def test_it_behaves_like_the_wrapped_stream() -> None:
    with replaced_stderr():
        tee = StreamTee("stderr", Received().take)
        assert sys.stderr.isatty() is False
        assert hasattr(sys.stderr, "getvalue")  # an attribute of the stream
        assert not hasattr(sys.stderr, "nonsense")
        assert isinstance(copy.copy(tee), StreamTee)
        tee.close_tee()


def test_handlers_of_logging_are_captured_and_restored() -> None:
    with replaced_stderr() as stream:
        logger = logging.getLogger("a logger of its own")
        logger.propagate = False
        before, other = logging.StreamHandler(), logging.StreamHandler(kept := io.StringIO())
        logger.addHandler(before)
        logger.addHandler(other)
        received = Received()
        tee = StreamTee("stderr", received.take)
        late = logging.StreamHandler()
        logger.addHandler(late)
        logger.error("logged")
        assert received.text == "logged\nlogged\n"
        tee.close_tee()
        logger.error("not captured")
        logger.handlers.clear()
        assert received.text == "logged\nlogged\n"
        assert before.stream is late.stream is stream
        assert kept.getvalue() == "logged\nnot captured\n"


@pytest.mark.parametrize("order", ["inner first", "outer first"])
def test_two_tees_may_end_in_any_order(order: str) -> None:
    with replaced_stderr() as stream:
        logger = logging.getLogger("another of its own")
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        one, other = Received(), Received()
        tees = [StreamTee("stderr", one.take), StreamTee("stderr", other.take)]
        print("both", file=sys.stderr)
        first, second = tees if order == "inner first" else tees[::-1]
        first.close_tee()
        print("one", file=sys.stderr)
        second.close_tee()
        logger.handlers.clear()
        assert current_stderr() is stream
        assert handler.stream is stream
        assert sorted([one.text, other.text]) == ["both\n", "both\none\n"]
        assert stream.getvalue() == "both\none\n"


def test_a_wrapper_that_was_added_later_is_left_in_place() -> None:
    with replaced_stderr() as stream:
        received = Received()
        tee = StreamTee("stderr", received.take)
        with contextlib.redirect_stderr(io.StringIO()) as other:
            tee.close_tee()
            assert current_stderr() is other
            print("to the other", file=sys.stderr)
        assert current_stderr() is tee  # `redirect_stderr` restored the closed tee
        print("not captured", file=sys.stderr)
        assert received.text == ""
        assert stream.getvalue() == "not captured\n"
        assert current_stderr() is stream  # the tee removed itself


def test_a_forked_process_is_not_captured() -> None:
    with replaced_stderr() as stream:
        if not hasattr(os, "fork"):
            pytest.skip("nothing forks here")

        def take(text: str, name: str) -> None:
            os._exit(3)

        tee = StreamTee("stderr", take)
        child = os.fork()
        if not child:
            sys.stderr.write("from the child")
            os._exit(0 if stream.getvalue() == "from the child" else 4)
        assert os.waitpid(child, 0)[1] == 0
        tee.close_tee()
