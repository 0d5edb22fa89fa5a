"""Callbacks for PyTorch training that run in callsheet's `Trainer`, in the loops of other frameworks and in hand-written loops.

A `Callback` handles the events of a run's lifecycle, and a `CallbackManager` fires the events. The `Trainer` is a training loop that fires
all events.
"""

from typing import TYPE_CHECKING

from callsheet.core.callback import Callback, at, every, foreign_hints, local_rank_zero_only, rank_zero_only
from callsheet.core.context import Context
from callsheet.core.events import Event
from callsheet.core.on_demand import attributes
from callsheet.core.time import Interval, Time, Timestamp
from callsheet.errors import CallsheetError, NonFiniteError

if TYPE_CHECKING:
    from callsheet.bridges.bare import attach
    from callsheet.core.background import Background
    from callsheet.core.callbacks_argument import normalize_callbacks, should_fire
    from callsheet.core.costs import CostReport
    from callsheet.core.manager import CallbackManager
    from callsheet.core.run_state import CheckpointInfo, MetricsRecord, Outcome, RunInfo, TrainState
    from callsheet.core.spec import CallbackSpec
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
    "CheckpointInfo",
    "Context",
    "CostReport",
    "Event",
    "Interval",
    "MetricsRecord",
    "NonFiniteError",
    "Outcome",
    "Process",
    "RunInfo",
    "Time",
    "Timestamp",
    "TrainState",
    "Trainer",
    "at",
    "attach",
    "every",
    "launch",
    "local_rank_zero_only",
    "normalize_callbacks",
    "rank_zero_only",
    "should_fire",
]


def _guest_hint(thing: object) -> str:
    from callsheet.bridges import guest_hint

    return guest_hint(thing)


foreign_hints.append(_guest_hint)

_ON_DEMAND_NAMES = {
    "callsheet.bridges.bare": ("attach",),
    "callsheet.core.background": ("Background",),
    "callsheet.core.costs": ("CostReport",),
    "callsheet.core.callbacks_argument": ("normalize_callbacks", "should_fire"),
    "callsheet.core.manager": ("CallbackManager",),
    "callsheet.core.run_state": ("CheckpointInfo", "MetricsRecord", "Outcome", "RunInfo", "TrainState"),
    "callsheet.core.spec": ("CallbackSpec",),
    "callsheet.lanes.process": ("Process",),
    "callsheet.launcher": ("launch",),
    "callsheet.trainer": ("Trainer",),
}
"""The names that are imported at their first use, by module. Importing all of them at once would also import torch, which is slow."""

_SUBPACKAGES = (
    *("bridges", "callbacks", "checkpoint", "compat", "errors", "launcher", "loggers", "metrics", "plugins", "recipes", "report"),
    *("testing", "trainer", "transport"),
)
"""The public submodules. Each is imported when it is first read as an attribute, such as `callsheet.callbacks`."""

__getattr__ = attributes(__name__, {name: module for module, names in _ON_DEMAND_NAMES.items() for name in names}, _SUBPACKAGES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
