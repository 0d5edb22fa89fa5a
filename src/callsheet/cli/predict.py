"""`callsheet predict`: write a trained model's predictions for rows of data as JSON lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callsheet.cli.opened import open_run
from callsheet.cli.whole_file import whole_file
from callsheet.errors import ConfigError
from callsheet.loggers.support.json_text import json_text

if TYPE_CHECKING:
    from callsheet.recipes.data.tables import Table


def predict(run: str, overrides: Sequence[str], *, rows: str, checkpoint: str | None = None, out: str | None = None) -> str:
    """Write the model's answer for each row to `out` or to standard output.

    The file `out` is created when all answers are complete. On standard output, each answer is printed when it is ready.

    Return a summary to print at the end.

    Raises:
        ConfigError: there is no such run, checkpoint or file, or a row cannot be used; the message names its place.
        CallsheetError: the answers cannot be written, or the checkpoint is invalid.
    """
    from callsheet.recipes.data.rows import Rows
    from callsheet.recipes.data.tables import Table

    table = Rows(rows).read(())
    assert isinstance(table, Table)  # `read` returns a stream of rows only if that is requested
    job = open_run(run, overrides, command="predict", checkpoint=checkpoint)
    is_first = job.ranks.rank == 0
    written = 0
    with job.trainer, _answers_to(out if is_first else None) as file, _progress(len(table), is_shown=is_first) as show:
        with _places(table, rows):
            for answer in job.answers(_show_progress(table, show)):
                if is_first:
                    file.write(json_text(answer) + "\n")
                    written += 1
        if is_first and written != len(table):
            raise ConfigError(f"{type(job).__name__} gave {written} answers for {len(table)} rows; it should give one for each")
    return f"{written} answers in {out}" if is_first and out is not None else ""


@contextmanager
def _places(table: Table, path: str) -> Iterator[None]:
    """While the `with` block runs, replace a row number in an error message, such as `row 3`, by the row's place in its file."""
    try:
        yield
    except ConfigError as error:
        numbered = re.match(r"row (\d+)\b", str(error))
        if numbered and 1 <= int(numbered.group(1)) <= len(table):
            raise ConfigError(table.place(int(numbered.group(1)) - 1) + str(error)[numbered.end() :]) from None
        raise ConfigError(f"{path}: {error}") from None


def _show_progress(table: Table, show: Any) -> Iterator[Mapping[str, Any]]:
    for row in table:
        yield row
        show()


def _answers_to(out: str | None) -> Any:
    files: Any = whole_file(Path(out)) if out is not None else nullcontext(sys.stdout)
    return files


@contextmanager
def _progress(total: int, *, is_shown: bool) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (is_shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
