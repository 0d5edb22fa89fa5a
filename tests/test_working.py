"""`working` shows the progress of work that takes long."""

from __future__ import annotations

import io
import threading

import pytest

from callsheet.core import working as module
from callsheet.core.working import working


class Stream(io.StringIO):
    """A stream with an event that is set when something is written."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal, self.is_written = is_terminal, threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def flush(self) -> None:
        self.is_written.set()


def shown(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> str:
    stream = Stream(is_terminal=is_terminal)
    for name in ("_TERMINAL_PAUSE_SECONDS", "_FIRST_LINE_SECONDS", "_NEXT_LINE_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr("sys.stderr", stream)
    with working("counting"):
        assert stream.is_written.wait(30)
    return stream.getvalue()


def test_on_a_terminal_progress_is_one_line_that_is_erased_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, is_terminal=True)
    assert text.startswith("\rcounting: 0 s\x1b[K\r")
    assert text.endswith("\r\x1b[K")
    assert "\n" not in text


def test_without_a_terminal_progress_is_printed_as_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, is_terminal=False).splitlines()[0] == "counting: 0 s so far"


def test_short_work_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with working("nothing"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_closed_stream_does_not_end_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(is_terminal=True)
    stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    done = []
    with working("counting"):
        done.append(1)
    assert done == [1]
