"""`composer.core`: Composer's events, times, data classes and base classes.

Each name can also be imported from a submodule with the name that it has in Composer, such as `Timestamp` from `core.time`.
"""

from __future__ import annotations

from typing import Any

from callsheet.bridges.composer.names import Callback, Event
from callsheet.bridges.composer.state import State
from callsheet.bridges.composer.time import Time, Timestamp, TimeUnit
from callsheet.compat.composer.data import DataSpec
from callsheet.compat.composer.evaluators import Evaluator
from callsheet.compat.composer.precision import Precision
from callsheet.compat.composer.submodules import offer
from callsheet.compat.not_offered import not_offered

__all__ = ["Callback", "DataSpec", "Evaluator", "Event", "Precision", "State", "Time", "TimeUnit", "Timestamp"]

_ALGORITHMS_HINT = "algorithms are not run; apply them to model and data yourself, or write a callback"
_ENGINE_HINT = "callsheet.CallbackManager fires events"
_NOT_OFFERED = {
    "Algorithm": _ALGORITHMS_HINT,
    "AlgorithmPass": _ALGORITHMS_HINT,
    "Engine": _ENGINE_HINT,
    "Trace": _ENGINE_HINT,
    "Traces": _ENGINE_HINT,
    "Serializable": "give the class state_dict() and load_state_dict()",
    "MemoryFormat": "give torch's own, such as torch.channels_last",
    "TrainerMode": "state.dataloader_label says what is run",
    "get_precision_context": "use torch.autocast",
    "ensure_data_spec": "the Trainer takes dataloaders and DataSpecs alike",
    "ensure_evaluator": "the Trainer takes dataloaders and Evaluators alike",
    "ensure_time": "use Time.from_input(...)",
}
_TYPES = {"Batch": Any, "JSON": Any, "Dataset": Any}

offer(
    __name__,
    {
        "algorithm": "Algorithm",
        "callback": "Callback",
        "data_spec": "DataSpec ensure_data_spec",
        "engine": "Engine Trace Traces",
        "evaluator": "Evaluator ensure_evaluator",
        "event": "Event",
        "passes": "AlgorithmPass",
        "precision": "Precision get_precision_context",
        "serializable": "Serializable",
        "state": "State",
        "time": "Time TimeUnit Timestamp ensure_time",
        "types": "Batch Dataset JSON MemoryFormat TrainerMode",
    },
)


def __getattr__(name: str) -> Any:
    if name in _TYPES:
        return _TYPES[name]
    if name in _NOT_OFFERED:
        return not_offered(name, "Composer", _NOT_OFFERED[name], __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
