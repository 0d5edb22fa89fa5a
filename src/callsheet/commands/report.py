"""`callsheet report`: the page of a run, as a file."""

from __future__ import annotations

from callsheet.commands.named_run import run_folder
from callsheet.errors import CallsheetError
from callsheet.report.page import write_report


def report(run: str, *, out: str | None = None) -> str:
    """Write the page and the trace, and say where they lie.

    Raises:
        ConfigError: there is no such run.
        CallsheetError: the page cannot be written there.
    """
    folder = run_folder(run)
    try:
        page = write_report(folder, out)
    except OSError as error:
        raise CallsheetError(f"the page of {folder} cannot be written: {error}; name another place with --out") from error
    return f"{page} ({page.stat().st_size / 1e6:.1f} MB)"
