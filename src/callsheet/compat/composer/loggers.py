"""`composer.loggers`: loggers with Composer's names and options, implemented by callsheet's loggers."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from callsheet import loggers
from callsheet.bridges.composer.names import LoggerDestination
from callsheet.bridges.composer.state import Logger
from callsheet.compat.composer.in_memory import InMemoryLogger
from callsheet.compat.composer.rejections import reject
from callsheet.compat.composer.submodules import offer
from callsheet.errors import NotSupported

if TYPE_CHECKING:
    from callsheet.compat.composer.trackers import MLFlowLogger, TensorboardLogger, WandBLogger

__all__ = [
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "Logger",
    "LoggerDestination",
    "MLFlowLogger",
    "ProgressBarLogger",
    "TensorboardLogger",
    "WandBLogger",
]

_OTHER_TRACKER_HINT = (
    "take one of WandBLogger, MLFlowLogger, TensorboardLogger and callsheet.loggers, or a LoggerDestination of your own"
)
_NOT_SUPPORTED = {
    "CometMLLogger": _OTHER_TRACKER_HINT,
    "MosaicMLLogger": "callsheet watch shows a run as it goes",
    "NeptuneLogger": _OTHER_TRACKER_HINT,
    "RemoteUploaderDownloader": "callsheet's own Trainer(checkpoints_folder='s3://...') writes there at once",
    "SlackLogger": "callsheet.callbacks.Notify posts the progress of a run to Slack",
}

_FILE_NAME_HINT = "the file is `output.log` in the run's folder"


class ConsoleLogger(loggers.ConsoleLogger):
    """Prints metrics records as lines."""

    def __init__(self, log_interval: Any = "1ba", stream: Any = "stderr", log_traces: bool = False) -> None:
        named = {id(sys.stderr): "stderr", id(sys.stdout): "stdout"}.get(id(stream), stream)
        reject("ConsoleLogger", {"log_traces": (log_traces, False, "there are no algorithms to trace")})
        super().__init__(stream=named, interval=None if str(log_interval) == "1ba" else str(log_interval))


class FileLogger(loggers.FileLogger):
    """Copies the output of the process to a file in the run's folder."""

    def __init__(
        self,
        filename: str = "{run_name}/logs-rank{rank}.txt",
        remote_file_name: str | None = None,
        *,
        capture_stdout: bool = True,
        capture_stderr: bool = True,
        buffer_size: int = 1,
        log_traces: bool = True,
        flush_interval: int = 100,
        overwrite: bool = False,
    ) -> None:
        reject(
            "FileLogger",
            {
                "filename": (filename, "{run_name}/logs-rank{rank}.txt", _FILE_NAME_HINT),
                "remote_file_name": (remote_file_name, None, _FILE_NAME_HINT),
                "capture_stdout": (capture_stdout, True, "both streams are captured"),
                "capture_stderr": (capture_stderr, True, "both streams are captured"),
            },
        )
        super().__init__()


class ProgressBarLogger(loggers.ProgressBarLogger):
    """Shows a progress bar."""

    def __init__(self, stream: Any = None, log_traces: bool = False) -> None:
        super().__init__()


offer(
    __name__,
    {
        "cometml_logger": "CometMLLogger",
        "console_logger": "ConsoleLogger",
        "file_logger": "FileLogger",
        "in_memory_logger": "InMemoryLogger",
        "logger": "Logger LoggerDestination",
        "logger_destination": "LoggerDestination",
        "mlflow_logger": "MLFlowLogger",
        "mosaicml_logger": "MosaicMLLogger",
        "neptune_logger": "NeptuneLogger",
        "progress_bar_logger": "ProgressBarLogger",
        "remote_uploader_downloader": "RemoteUploaderDownloader",
        "slack_logger": "SlackLogger",
        "tensorboard_logger": "TensorboardLogger",
        "wandb_logger": "WandBLogger",
    },
)


def __getattr__(name: str) -> Any:
    # Import the loggers for MLflow, TensorBoard and W&B only when they are used, because their packages may not be installed.
    if name in ("MLFlowLogger", "TensorboardLogger", "WandBLogger"):
        return getattr(importlib.import_module("callsheet.compat.composer.trackers"), name)
    if name in _NOT_SUPPORTED:

        def rejected(self: Any, *args: Any, **options: Any) -> None:
            raise NotSupported(f"{name} is not supported, unlike in Composer: {_NOT_SUPPORTED[name]}")

        return type(
            name,
            (LoggerDestination,),
            {"__init__": rejected, "__doc__": f"Raises NotSupported when it is created: {_NOT_SUPPORTED[name]}."},
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
