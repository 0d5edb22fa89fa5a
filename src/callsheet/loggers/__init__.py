"""Where records go, one logger a file."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from callsheet.loggers.console_logger import ConsoleLogger
from callsheet.loggers.csv_logger import CSVLogger
from callsheet.loggers.file_logger import FileLogger
from callsheet.loggers.in_memory_logger import InMemoryLogger
from callsheet.loggers.jsonl_logger import JSONLLogger
from callsheet.loggers.jsonl_reader import read_metrics
from callsheet.loggers.logger import Logger
from callsheet.loggers.progress_bar_logger import ProgressBarLogger

if TYPE_CHECKING:
    from callsheet.loggers.mlflow_logger import MLflowLogger
    from callsheet.loggers.opentelemetry_logger import OpenTelemetryLogger
    from callsheet.loggers.tensorboard_logger import TensorboardLogger
    from callsheet.loggers.trackio_logger import TrackioLogger
    from callsheet.loggers.wandb_logger import WandBLogger

__all__ = [
    "CSVLogger",
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "JSONLLogger",
    "Logger",
    "MLflowLogger",
    "OpenTelemetryLogger",
    "ProgressBarLogger",
    "TensorboardLogger",
    "TrackioLogger",
    "WandBLogger",
    "read_metrics",
]

_ON_DEMAND = {
    "MLflowLogger": "mlflow_logger",
    "OpenTelemetryLogger": "opentelemetry_logger",
    "TensorboardLogger": "tensorboard_logger",
    "TrackioLogger": "trackio_logger",
    "WandBLogger": "wandb_logger",
}
"""Those that need more than the standard library to be imported."""


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return getattr(import_module(f"callsheet.loggers.{_ON_DEMAND[name]}"), name)
    raise AttributeError(f"module 'callsheet.loggers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
