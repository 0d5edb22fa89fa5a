"""A run to look at: one HTML page of its folder, and a trace beside it."""

from callsheet.report.page import Live, data, page, write_report
from callsheet.report.run_folder import RunFolder, RunReader, image_bytes

__all__ = ["Live", "RunFolder", "RunReader", "data", "image_bytes", "page", "write_report"]
