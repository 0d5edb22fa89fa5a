"""What one rank has to write: found on the training thread, and for a background writer copied there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from callsheet.checkpoint.layout import SHARED, own
from callsheet.checkpoint.plain import Json, flatten
from callsheet.checkpoint.seal import plain_info
from callsheet.checkpoint.tensors import check_storable, local_part
from callsheet.errors import CheckpointError


@dataclass(slots=True)
class Draft:
    """The documents, the tensors by their names in the checkpoint, and what this rank holds of each."""

    state: Json
    local: Json
    info: dict[str, Any]
    tensors: dict[str, Tensor]
    parts: dict[str, Tensor]

    @classmethod
    @torch.no_grad()  # or a DTensor's shard would come with a graph
    def of(cls, shared: object, local: object, info: Mapping[str, Any], rank: int) -> Draft:
        """Raises `CheckpointError` for what is not plain data, or a tensor that a file cannot hold."""
        state, shared_tensors = flatten(shared)
        document, own_tensors = flatten(local)
        tensors = {SHARED + name: tensor for name, tensor in shared_tensors.items()}
        tensors |= {own(rank) + name: tensor for name, tensor in own_tensors.items()}
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        for name, part in parts.items():
            check_storable(name, part)
        return cls(state, document, plain_info(info), tensors, parts)

    def plan(self) -> SavePlan:
        """What of it DCP would have this rank write: of a DTensor its shard, of any other all."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(self.tensors)
        plan = planner.create_local_plan()
        for item in plan.items:
            assert item.tensor_data is not None
            if self.parts[item.index.fqn].shape != item.tensor_data.chunk.sizes:
                raise CheckpointError(f"{item.index.fqn}: its shard on this rank is not of the size that its placement calls for")
        return plan


class Staging:
    """Buffers on the host, reused from one copy to the next: what was copied stands until the next is made."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of the tensors by name, made once this returns; page-locked where they are on a GPU."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if tensors:
            torch._foreach_copy_(list(self._buffers.values()), list(tensors.values()), non_blocking=bool(gpus))
        for gpu in gpus:
            torch.cuda.current_stream(gpu).synchronize()
        return self._buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
