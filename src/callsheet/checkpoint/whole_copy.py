"""Copies a model, which may be sharded over the ranks, to host memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_SHARDING_PREFIXES = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""The prefixes of the attributes that torch's `fully_shard` sets on modules."""


@torch.no_grad()
def whole_copy(model: nn.Module, *, keep: bool = True) -> nn.Module | None:
    """Return a full copy of `model` on the CPU. The model is unchanged.

    If the model is sharded, this is a collective that every rank must call.

    The function needs device memory for only one gathered tensor at a time. In the copy of a sharded model, the modules have their
    original classes, and only those forward hooks that the user added.

    Args:
        keep: whether this rank gets the copy. If False, the rank only takes part in the collective, and gets None.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:  # reshard, so that the modules hold their own shards again instead of gathered parameters
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
    """Copy a model that `fully_shard` has sharded, which `copy.deepcopy` does not support.

    The attributes that make the model sharded are left out.
    """
    copies = [(module, _unsharded_class(type(module))) for module in model.modules()]
    made = [(module, kind.__new__(kind)) for module, kind in copies]
    memo.update((id(module), empty) for module, empty in made)
    fresh = vars(nn.Module())
    for module, empty in made:
        for name, value in vars(module).items():
            if name.startswith(_SHARDING_PREFIXES):
                continue
            if name in ("_forward_hooks", "_forward_pre_hooks"):
                value = type(value)((key, hook) for key, hook in value.items() if not _is_of_sharding(hook))
            elif name in fresh and "_hooks" in name:
                value = fresh[name]
            vars(empty)[name] = copy.deepcopy(value, memo)
    return made[0][1]


def _unsharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    line = kind.__mro__
    found: type[nn.Module] = line[line.index(FSDPModule) + 1] if FSDPModule in line else kind
    return found


def _is_of_sharding(hook: Any) -> bool:
    """Return whether torch's sharding or callsheet has added this forward hook. Such a hook synchronizes the ranks.

    A copy of the model must not have such a hook: if one rank called the copy, the hook would wait for the other ranks.
    """
    return str(getattr(hook, "__module__", "")).startswith(("torch.distributed.", "callsheet."))
