"""Prints the progress of a run as plain lines on standard output or standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from callsheet.core.callback import one_of
from callsheet.core.context import Context
from callsheet.core.time import Interval, Time, Timestamp
from callsheet.errors import ConfigError
from callsheet.loggers.logger import Logger
from callsheet.loggers.support.figures import outcome, place, results, speeds

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = get_args(Stream)
_MAX_CELL_CHARACTERS = 60  # print at most this many characters of a table cell


class ConsoleLogger(Logger):
    """Print metrics records, evaluation results, tables and the run's outcome as plain lines.

    A metrics record is printed as `epoch 2  step 120  train/loss 0.1234  1,234 samples/s`: the position in training, the metrics
    with four significant digits, and the speeds.

    Args:
        stream: `stdout` or `stderr`.
        interval: how often to print a record, such as `"100ba"` or `"1ep"`; a whole number means batches. The last record is always
            printed. None prints every record. Evaluations and tables are always printed.
        metrics: patterns of the names to print, such as `"train/*"`.
        leave_out: patterns of names not to print, even if `metrics` matches them.
        table_rows: how many rows of a table to print; 0 prints no tables.

    Raises:
        ConfigError: an argument is invalid.
    """

    shows_outcome = True

    def __init__(
        self,
        *,
        stream: Stream = "stdout",
        interval: str | int | Time | None = None,
        metrics: Iterable[str] = ("*",),
        leave_out: Iterable[str] = ("time/*",),
        table_rows: int = 10,
    ) -> None:
        for name, patterns in (("metrics", metrics), ("leave_out", leave_out)):
            if isinstance(patterns, str):
                raise ConfigError(f"{name}={patterns!r}: give a list of patterns, [{patterns!r}]")
        if table_rows < 0:
            raise ConfigError(f"table_rows={table_rows}: give 0 or more")
        self._stream = one_of("stream", stream, STREAMS)
        self._interval = Interval.of("interval", interval) if interval is not None else None
        self._metrics, self._leave_out = tuple(metrics), tuple(leave_out)
        self._table_rows = table_rows
        self._printed_at: tuple[Timestamp, float | None] | None = None
        # Names of the metrics that the last evaluation's line shows. The line of the next metrics record leaves them out.
        self._evaluated: set[str] = set()
        self._pending = ""  # the line for the last metrics record, if it is not printed yet

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """If the run is resumed, print the checkpoint and the step from which it continues."""
        self._printed_at, self._evaluated, self._pending = None, set(), ""
        if ctx.checkpoint is not None:
            self._print(f"resumed from {ctx.checkpoint.path}, step {ctx.checkpoint.step}")

    def on_train_start(self, ctx: Context) -> None:
        """Store the step at which training starts (not 0 after a resume). The first interval for printing starts there."""
        self._printed_at = self._printed_at or (ctx.state.timestamp, ctx.state.elapsed)

    def on_log(self, ctx: Context) -> None:
        """Print the metrics record if the interval since the last printed record has passed."""
        known, self._evaluated = self._evaluated, set()
        shown = {name: value for name, value in ctx.record.values.items() if name not in known and self._is_wanted(name)}
        figures = [*(f"{_plain(name)} {value:.4g}" for name, value in shown.items()), *speeds(ctx)]
        line = "  ".join([place(ctx), *figures]) if figures else ""
        if known:  # the record follows an evaluation: print it now, without the metrics that the evaluation's line has shown
            self._print(line)
        elif self._is_time(ctx):
            self._print(line)
            self._pending = ""
        else:
            self._pending = line

    def on_train_end(self, ctx: Context) -> None:
        """Print the last metrics record if it was not printed yet."""
        line, self._pending = self._pending, ""
        self._print(line)

    on_exception = on_train_end

    def on_eval_all_end(self, ctx: Context) -> None:
        """Print the evaluation's results."""
        self._evaluated = {f"{name}/{metric}" for name, result in ctx.eval_results.items() for metric in result}
        self._print(f"evaluation at step {ctx.step}: {results(ctx)}")

    def log_table(self, ctx: Context, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print the table's first rows."""
        if self._table_rows:
            cells = [[_cell(cell) for cell in row] for row in (columns, *rows[: self._table_rows])]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
            if len(rows) > self._table_rows:
                lines.append(f"... and {len(rows) - self._table_rows} more rows")
            self._print("\n  ".join([f"{_plain(name)} at step {ctx.step}:", *lines]))

    def on_run_end(self, ctx: Context) -> None:
        self._print(outcome(ctx))

    def _is_time(self, ctx: Context) -> bool:
        if self._interval is None or self._printed_at is None:
            return True
        now = (ctx.state.timestamp, ctx.state.elapsed)
        is_time = self._interval.is_due(self._printed_at[0], now[0], self._printed_at[1], now[1])
        if is_time:
            self._printed_at = now
        return is_time

    def _is_wanted(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._metrics) and not any(
            fnmatchcase(name, pattern) for pattern in self._leave_out
        )

    def _print(self, text: str) -> None:
        if text:
            print(text, file=getattr(sys, self._stream), flush=True)


def _cell(value: Any) -> str:
    text = _plain(f"{value:.4g}" if isinstance(value, float) else str(value))
    return text if len(text) <= _MAX_CELL_CHARACTERS else f"{text[: _MAX_CELL_CHARACTERS - 3]}..."


def _plain(text: str) -> str:
    """Return `text` on one line, with terminal control codes escaped."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
