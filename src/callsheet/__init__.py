"""One callback, every training loop.

A `Callback` handles the events of a run's lifecycle, a `CallbackManager` fires them, and a `Trainer` is a loop that fires them all.
"""

from typing import TYPE_CHECKING

from callsheet.core.background import Background
from callsheet.core.callback import Callback, at, every, local_rank_zero_only, rank_zero_only
from callsheet.core.context import Context
from callsheet.core.control import Control
from callsheet.core.events import Event
from callsheet.core.manager import CallbackManager, normalize_callbacks, should_fire
from callsheet.core.on_demand import attributes
from callsheet.core.run_state import CheckpointInfo, MetricsRecord, Outcome, RunInfo, TrainState
from callsheet.core.spec import CallbackSpec
from callsheet.core.time import Interval, Time, Timestamp, TimeUnit
from callsheet.errors import (
    CallsheetError,
    CheckpointError,
    ConfigError,
    DistributedError,
    FieldNotAvailable,
    HangError,
    MissingPackage,
    MixedUnitsError,
    NonFiniteError,
    NotACallbackError,
    NotSupported,
    RegistrationError,
    RequestRejected,
    RunEndedError,
    RunInUseError,
    RunLockLostError,
    UnknownArgument,
    UnknownEventError,
)

if TYPE_CHECKING:
    from callsheet.bridges.bare import attach
    from callsheet.lanes.process import Process
    from callsheet.launcher import launch
    from callsheet.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Background",
    "Callback",
    "CallbackManager",
    "CallbackSpec",
    "CallsheetError",
    "CheckpointError",
    "CheckpointInfo",
    "ConfigError",
    "Context",
    "Control",
    "DistributedError",
    "Event",
    "FieldNotAvailable",
    "HangError",
    "Interval",
    "MetricsRecord",
    "MissingPackage",
    "MixedUnitsError",
    "NonFiniteError",
    "NotACallbackError",
    "NotSupported",
    "Outcome",
    "Process",
    "RegistrationError",
    "RequestRejected",
    "RunEndedError",
    "RunInUseError",
    "RunInfo",
    "RunLockLostError",
    "Time",
    "TimeUnit",
    "Timestamp",
    "TrainState",
    "Trainer",
    "UnknownArgument",
    "UnknownEventError",
    "at",
    "attach",
    "every",
    "launch",
    "local_rank_zero_only",
    "normalize_callbacks",
    "rank_zero_only",
    "should_fire",
]

__getattr__ = attributes(  # imported at first use, since these modules import torch or start processes
    __name__,
    {
        "Process": "callsheet.lanes.process",
        "Trainer": "callsheet.trainer",
        "attach": "callsheet.bridges.bare",
        "launch": "callsheet.launcher",
    },
)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
