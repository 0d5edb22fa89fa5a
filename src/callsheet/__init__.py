"""One callback, every training loop.

A `Callback` hears the events of a run's lifecycle; a `CallbackManager` tells them; a `Trainer` is a loop that tells them all.
"""

from typing import TYPE_CHECKING, Any

from callsheet.callback import Callback, CallbackSpec, at, every, local_rank_zero_only, rank_zero_only
from callsheet.context import CheckpointInfo, Context, LogRecord, Outcome, RunInfo, TrainState
from callsheet.control import Control
from callsheet.errors import (
    CallsheetError,
    CheckpointError,
    ConfigError,
    FieldNotTold,
    LaneNotAvailable,
    MixedUnitsError,
    NonFiniteError,
    NotACallbackError,
    RegistrationError,
    RequestRefused,
    RunEndedError,
    UnknownEventError,
)
from callsheet.events import Event
from callsheet.manager import CallbackManager, normalize_callbacks, should_fire
from callsheet.time import Interval, Time, Timestamp, TimeUnit

if TYPE_CHECKING:
    from callsheet.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "CallbackManager",
    "CallbackSpec",
    "CallsheetError",
    "CheckpointError",
    "CheckpointInfo",
    "ConfigError",
    "Context",
    "Control",
    "Event",
    "FieldNotTold",
    "Interval",
    "LaneNotAvailable",
    "LogRecord",
    "MixedUnitsError",
    "NonFiniteError",
    "NotACallbackError",
    "Outcome",
    "RegistrationError",
    "RequestRefused",
    "RunEndedError",
    "RunInfo",
    "Time",
    "TimeUnit",
    "Timestamp",
    "TrainState",
    "Trainer",
    "UnknownEventError",
    "at",
    "every",
    "local_rank_zero_only",
    "normalize_callbacks",
    "rank_zero_only",
    "should_fire",
]


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # the one name that needs torch
        from callsheet.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'callsheet' has no attribute {name!r}")
