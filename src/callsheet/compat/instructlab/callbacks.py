"""`instructlab.training.callbacks`: InstructLab's base class for callbacks, its context class and its callback manager."""

from callsheet.bridges.instructlab.names import HOOK_NAMES, CallbackManager, TrainerCallback, TrainingContext
from callsheet.compat.instructlab.rejected import (
    deserialize_callback,
    deserialize_callbacks_from_cli,
    serialize_callback,
    serialize_callbacks_for_cli,
)

__all__ = [
    "HOOK_NAMES",
    "CallbackManager",
    "TrainerCallback",
    "TrainingContext",
    "deserialize_callback",
    "deserialize_callbacks_from_cli",
    "serialize_callback",
    "serialize_callbacks_for_cli",
]
