"""Reads a run's folder, shows it as an HTML page and as a trace, imports other tools' runs, and sends requests to a run."""

from callsheet.callbacks.support.trigger_file import leave_request, withdraw_request
from callsheet.report.imports import Imported, import_runs
from callsheet.report.run_folder import RunFolder, RunReader, image_bytes
from callsheet.report.run_page import Live, data, page, write_report

__all__ = [
    "Imported",
    "Live",
    "RunFolder",
    "RunReader",
    "data",
    "image_bytes",
    "import_runs",
    "leave_request",
    "page",
    "withdraw_request",
    "write_report",
]
