"""The public import path of `MetricLog`, for training loops that make their own metrics records (`examples/own_loop.py`)."""

from callsheet.run.metrics import MetricLog

__all__ = ["MetricLog"]
