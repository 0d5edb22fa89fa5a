"""`instructlab.training.config`: argument classes. Names that callsheet does not support raise `NotSupported` when used."""

from __future__ import annotations

from typing import Any

from callsheet.compat.instructlab.arguments import DistributedBackend, LoraOptions, TorchrunArgs, TrainingArgs
from callsheet.compat.not_offered import not_offered

__all__ = ["DistributedBackend", "LoraOptions", "TorchrunArgs", "TrainingArgs"]

_SHARDING_HINT = "the recipe shards the model where TrainingArgs(parallel='fsdp') says so; leave it out"
NOT_OFFERED = {
    "DataProcessArgs": "give the messages to TrainingArgs(data_path=...); run_training prepares them",
    "DeepSpeedOffloadStrategy": "nothing is offloaded to the CPU; leave it out",
    "DeepSpeedOptions": "DeepSpeed is not used; leave it out",
    "FSDPOptions": _SHARDING_HINT,
    "ModelTypes": "the model's own configuration says what it is; leave it out",
    "Optimizer": "the recipe trains with AdamW; leave it out",
    "PretrainingConfig": "use the recipe callsheet.recipes.pretrain",
    "QuantizeDataType": "adapters over quantized weights are not offered; leave it out",
    "ShardingStrategies": _SHARDING_HINT,
}


def __getattr__(name: str) -> Any:
    if name in NOT_OFFERED:
        return not_offered(name, "InstructLab", NOT_OFFERED[name], __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
