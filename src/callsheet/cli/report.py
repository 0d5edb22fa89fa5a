"""`callsheet report`: write the report of a run to a file, as an HTML page."""

from __future__ import annotations

from callsheet.cli.named_run import run_folder
from callsheet.errors import CallsheetError, ConfigError
from callsheet.report.run_page import write_report

_RECORD_FILES = ("metrics.jsonl", "events.jsonl")
"""The files that JSONLLogger writes for every run."""


def report(run: str, *, out: str | None = None) -> str:
    """Write a run's HTML page, and its trace for Perfetto. Return the page's path and size as text.

    Raises:
        ConfigError: there is no such run.
        CallsheetError: the page cannot be written to `out`.
    """
    folder = run_folder(run)
    if not any((folder / name).is_file() for name in _RECORD_FILES):
        raise ConfigError(
            f"{folder} holds no records of a run: the logger JSONLLogger writes them (add it to `loggers`, from callsheet.loggers)"
        )
    try:
        page = write_report(folder, out)
    except OSError as error:
        raise CallsheetError(f"the page of {folder} cannot be written: {error}; name another place with --out") from error
    return f"{page} ({page.stat().st_size / 1e6:.1f} MB)"
