"""The callbacks of the trainings with callsheet.

Importing this module also writes callsheet's warnings and errors to a file in the working folder, one JSON string per line.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from callsheet import Callback, Context
from callsheet.testing import GrammarError, Recorder, check_events

MESSAGES, WATCHED = "messages.jsonl", "watched.json"


class Watch(Recorder):
    """When the run ends, writes the number of steps to a file, and the error if the events were not in lifecycle order."""

    def on_event(self, ctx: Context) -> None:
        super().on_event(ctx)
        if str(ctx.event) == "on_run_end":
            found = {"steps": self.events.count("on_train_step_end"), "order": _error_of(self.events)}
            Path(WATCHED).write_text(json.dumps(found), encoding="utf-8")


def _error_of(events: Iterable[str]) -> str:
    try:
        check_events(events)
    except GrammarError as error:
        return str(error)
    return ""


class Stops(Callback):
    """Requests a stop at the end of a step."""

    def __init__(self, *, at: int) -> None:
        self.at = at

    def on_train_step_end(self, ctx: Context) -> None:
        if ctx.step == self.at:
            ctx.control.stop(f"step {self.at}")


class _MessageFile(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with open(MESSAGES, "a", encoding="utf-8") as file:
            file.write(json.dumps(record.getMessage()) + "\n")


logging.getLogger("callsheet").addHandler(_MessageFile(logging.WARNING))
