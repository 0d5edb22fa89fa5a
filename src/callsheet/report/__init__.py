"""Read a run's folder, and show it as one HTML page and a trace."""

from callsheet.report.page import Live, data, page, write_report
from callsheet.report.run_folder import RunFolder, RunReader, image_bytes

__all__ = ["Live", "RunFolder", "RunReader", "data", "image_bytes", "page", "write_report"]
