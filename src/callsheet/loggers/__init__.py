"""Where records go, one logger a file."""

from callsheet.loggers.logger import Logger
from callsheet.loggers.run_log import RunLog, read_metrics

__all__ = ["Logger", "RunLog", "read_metrics"]
