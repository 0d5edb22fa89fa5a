"""What one rank writes to a checkpoint.

The training thread collects the data. If a background thread writes the data, the training thread copies them first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from callsheet.checkpoint.layout import SHARED_PREFIX, own
from callsheet.checkpoint.plain import Json, flatten
from callsheet.checkpoint.seal import plain_info
from callsheet.checkpoint.tensors import check_storable, local_part
from callsheet.core.page_locked import page_locked
from callsheet.errors import CheckpointError


@dataclass(slots=True)
class Draft:
    """What one rank saves: JSON documents, the tensors by name, and this rank's part of each tensor."""

    state: Json
    local: Json
    info: dict[str, Any]
    tensors: dict[str, Tensor]
    parts: dict[str, Tensor]

    @classmethod
    @torch.no_grad()  # without this, the local shard of a DTensor would have an autograd graph
    def of(cls, shared: object, local: object, info: Mapping[str, Any], rank: int) -> Draft:
        """Split the state of this rank into JSON documents and tensors.

        Raise `CheckpointError` for values that are not plain data, and for a tensor that a file cannot hold.
        """
        state, shared_tensors = flatten(shared)
        document, own_tensors = flatten(local)
        tensors = {SHARED_PREFIX + name: tensor for name, tensor in shared_tensors.items()}
        tensors |= {own(rank) + name: tensor for name, tensor in own_tensors.items()}
        parts = {name: local_part(tensor) for name, tensor in tensors.items()}
        for name, part in parts.items():
            check_storable(name, part)
        return cls(state, document, plain_info(info), tensors, parts)

    def plan(self) -> SavePlan:
        """Return what this rank saves, as a `SavePlan` of torch's distributed checkpoint (DCP).

        The rank saves its shard of a DTensor, and the whole of any other tensor.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(self.tensors)
        plan = planner.create_local_plan()
        for item in plan.items:
            assert item.tensor_data is not None
            if self.parts[item.index.fqn].shape != item.tensor_data.chunk.sizes:
                raise CheckpointError(
                    f"{item.index.fqn}: its shard on this rank does not have the size that its placement requires"
                )
        return plan


class Kind(NamedTuple):
    """The shape and dtype of a host buffer for the copy of a tensor, and whether the buffer is page-locked.

    The buffer for a tensor on a GPU is page-locked.
    """

    shape: torch.Size
    dtype: torch.dtype
    is_pinned: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Kind:
        """Return the kind of host buffer (dtype, size, page-locked or not) that a copy of the tensor needs."""
        return cls(tensor.shape, tensor.dtype, tensor.is_cuda)

    def buffer(self) -> Tensor:
        """Allocate a host buffer that has this kind's shape and dtype, and is page-locked if `is_pinned` is True."""
        return page_locked(self.shape, self.dtype) if self.is_pinned else torch.empty(self.shape, dtype=self.dtype)


class Staging:
    """Host buffers into which tensors are copied. The buffers are reused, so a copy is valid only until the next copy is made."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Kind, Tensor]] = []

    def prepare(self, kinds: Iterable[Kind]) -> None:
        """Allocate a buffer for each of `kinds` that has none yet. Also write to it, because the first write to new memory is slow."""
        missing = Counter(kinds)
        missing.subtract(kind for kind, _ in self._buffers)
        for kind in missing.elements():
            self._buffers.append((kind, kind.buffer().zero_()))

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors to host buffers, and return the copies by name.

        Buffers that are not needed are released.
        """
        free: dict[Kind, list[Tensor]] = defaultdict(list)
        for kind, buffer in reversed(self._buffers):
            free[kind].append(buffer)
        kinds = [Kind.of(tensor) for tensor in tensors.values()]
        self._buffers = [(kind, free[kind].pop() if free[kind] else kind.buffer()) for kind in kinds]
        buffers = [buffer for _, buffer in self._buffers]
        gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        if tensors:
            torch._foreach_copy_(buffers, list(tensors.values()), non_blocking=bool(gpus))
        for gpu in gpus:
            torch.cuda.current_stream(gpu).synchronize()
        return dict(zip(tensors, buffers, strict=True))
