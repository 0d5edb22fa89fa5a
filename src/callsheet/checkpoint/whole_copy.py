"""A copy of the model in host memory: whole, whatever shards the ranks hold it in."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_SHARDING = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""What `fully_shard` writes on modules, by how the names begin."""


@torch.no_grad()
def whole_copy(model: nn.Module, *, keep: bool = True) -> nn.Module | None:
    """A copy of `model` on the CPU, which is left as it is; a collective where the model is sharded: every rank must reach it.

    Nothing more is taken on the device than one gathered tensor at a time. The copy of a sharded model is of the classes that it had
    before, and keeps of its hooks those around the forward that are the user's.

    Args:
        keep: whether this rank is to have the copy; where it is False, the rank only takes part, and gets None.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:  # so that what the modules hold are the shards
        module.reshard()
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep and (whole is not tensor or tensor.device.type != "cpu"):
            host = whole.detach().to("cpu", copy=True)
            memo[id(tensor)] = nn.Parameter(host, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else host
    if not keep:
        return None
    return _of_shards(model, memo) if sharded else copy.deepcopy(model, memo)


def _of_shards(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy`, which sharded modules refuse, without what makes them sharded."""
    copies = [(module, _unsharded(type(module))) for module in model.modules()]
    made = [(module, kind.__new__(kind)) for module, kind in copies]
    memo.update((id(module), empty) for module, empty in made)
    fresh = vars(nn.Module())
    for module, empty in made:
        for name, value in vars(module).items():
            if name.startswith(_SHARDING):
                continue
            if name in ("_forward_hooks", "_forward_pre_hooks"):
                value = type(value)((key, hook) for key, hook in value.items() if not _is_of_sharding(hook))
            elif name in fresh and "_hooks" in name:
                value = fresh[name]
            vars(empty)[name] = copy.deepcopy(value, memo)
    return made[0][1]


def _unsharded(kind: type[nn.Module]) -> type[nn.Module]:
    line = kind.__mro__
    found: type[nn.Module] = line[line.index(FSDPModule) + 1] if FSDPModule in line else kind
    return found


def _is_of_sharding(hook: Any) -> bool:
    """Torch's own, and ours that share what is not sharded: on one rank alone they would wait for the others."""
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed.", "callsheet."))
