"""InstructLab Training's API, implemented by callsheet. InstructLab need not be installed.

Code that was written for InstructLab's callbacks runs if this package is imported instead of `instructlab.training`,
`instructlab.training.callbacks` and `instructlab.training.config`.
"""

from typing import Any

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.bridges.instructlab.names import HOOK_NAMES, CallbackManager, TrainerCallback, TrainingContext
    from callsheet.compat.instructlab import config as _config
    from callsheet.compat.instructlab.arguments import DistributedBackend, LoraOptions, TorchrunArgs, TrainingArgs
    from callsheet.compat.instructlab.rejected import (
        deserialize_callback,
        deserialize_callbacks_from_cli,
        serialize_callback,
        serialize_callbacks_for_cli,
    )
    from callsheet.compat.instructlab.training import run_training

__all__ = [
    "HOOK_NAMES",
    "CallbackManager",
    "DistributedBackend",
    "LoraOptions",
    "TorchrunArgs",
    "TrainerCallback",
    "TrainingArgs",
    "TrainingContext",
    "deserialize_callback",
    "deserialize_callbacks_from_cli",
    "run_training",
    "serialize_callback",
    "serialize_callbacks_for_cli",
]


def __getattr__(name: str) -> Any:
    if name in _config.NOT_OFFERED:
        return getattr(_config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
