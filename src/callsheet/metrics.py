"""The public import path of `MetricLog`, with which a training loop can make its own metrics records (`examples/own_loop.py`)."""

from callsheet.run.metrics import MetricLog

__all__ = ["MetricLog"]
