"""Loggers: callbacks that write metrics records to a destination, such as a file or W&B. Each file contains one logger."""

from typing import TYPE_CHECKING

from callsheet.core.on_demand import attributes
from callsheet.loggers.console_logger import ConsoleLogger
from callsheet.loggers.csv_logger import CSVLogger
from callsheet.loggers.file_logger import FileLogger
from callsheet.loggers.in_memory_logger import InMemoryLogger
from callsheet.loggers.jsonl_logger import JSONLLogger
from callsheet.loggers.logger import Logger
from callsheet.loggers.progress_bar_logger import ProgressBarLogger
from callsheet.loggers.support.jsonl_reader import read_metrics

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

__getattr__ = attributes(  # import these loggers on first use, because they need more than the standard library
    __name__,
    {
        "MLflowLogger": "callsheet.loggers.mlflow_logger",
        "OpenTelemetryLogger": "callsheet.loggers.opentelemetry_logger",
        "TensorboardLogger": "callsheet.loggers.tensorboard_logger",
        "TrackioLogger": "callsheet.loggers.trackio_logger",
        "WandBLogger": "callsheet.loggers.wandb_logger",
    },
)


def __dir__() -> list[str]:
    return __all__
