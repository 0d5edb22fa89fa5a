"""The log of metrics, for loops that make their own records (`examples/own_loop.py`)."""

from callsheet.run.metrics import MetricLog

__all__ = ["MetricLog"]
