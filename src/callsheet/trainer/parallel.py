"""Parallelism with torch: a single process, DistributedDataParallel, or FSDP2's `fully_shard`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from callsheet.core.callback import one_of
from callsheet.errors import ConfigError
from callsheet.run.copies import add_hook
from callsheet.run.process_groups import ProcessGroups

ParallelKind = Literal["auto", "single", "ddp", "fsdp"]
KINDS: tuple[ParallelKind, ...] = get_args(ParallelKind)

_STATE_PER_WEIGHTS = 4
"""The memory of weights, gradients and the optimizer's two moments together, as a multiple of the weights' memory."""
_STATE_MEMORY_SHARE = 0.6
"""The fraction of a device's memory that weights, gradients and optimizer state may take. The rest is for activations."""


@dataclass(frozen=True)
class Parallel:
    """How the model is distributed over the ranks.

    Args:
        kind: `"ddp"` keeps the whole model on every rank; `"fsdp"` shards weights, gradients and optimizer state; `"single"` uses
            one process; `"auto"` is `"ddp"` if the model fits on a device, else `"fsdp"`.
        shard_size: for `"fsdp"`: the number of ranks over which one copy of the model is sharded. If there are more ranks, they
            hold further copies (replicas). None: all ranks.
        blocks: for `"fsdp"`: class names of the modules that are gathered and freed as units. None: those that a Hugging Face
            model names, else the children of the model's `ModuleList`s and `Sequential`s.
        options: passed to `DistributedDataParallel` or `fully_shard`.

    Raises:
        ConfigError: an argument is invalid.
    """

    kind: ParallelKind = "auto"
    shard_size: int | None = None
    blocks: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("parallel", self.kind, KINDS)
        if self.kind != "fsdp" and (self.shard_size is not None or self.blocks is not None):
            raise ConfigError(f"shard_size and blocks are for parallel='fsdp', not {self.kind!r}; leave them out")

    def resolve(
        self, model: nn.Module, groups: ProcessGroups, device: torch.device, frozen: Sequence[nn.Module] = ()
    ) -> ParallelKind:
        """Return how a model is distributed over the ranks: `single`, `ddp` or `fsdp`.

        Args:
            model: the model that is trained.
            groups: the process groups of the run.
            device: the device of this rank. `auto` is `ddp` if the models fit on it.
            frozen: further models on the device, which are not trained.

        Raises:
            ConfigError: the kind does not fit the number of ranks.
        """
        if self.kind == "auto":
            return "single" if groups.size == 1 else "ddp" if _fits(model, device, frozen) else "fsdp"
        if self.kind == "single" and groups.size > 1:
            raise ConfigError(f"parallel='single' among {groups.size} ranks: each would train its own model; use 'ddp' or 'fsdp'")
        if self.kind != "single" and groups.size == 1:
            return "single"  # a script for several ranks must also run with one rank, where there is nothing to distribute
        if self.shard_size is not None and (self.shard_size < 1 or groups.size % self.shard_size):
            raise ConfigError(
                f"shard_size={self.shard_size} does not divide the {groups.size} ranks; give a divisor, or None for all ranks"
            )
        return self.kind


class ParallelModel:
    """The model in the form in which it is trained: unchanged, wrapped in DistributedDataParallel, or sharded by FSDP.

    A forward pass must call `module`. The model object remains the same, and the names of its parameters do not change. With
    `"fsdp"`, the parameters become DTensors, so the optimizer must be created afterwards.

    Args:
        dtype: the type in which a sharded model computes; None is the type of its weights.
        frozen: additional models that are not trained. They are put into evaluation mode. If the model is sharded, these models
            are sharded too, each in its own blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: Parallel,
        groups: ProcessGroups,
        device: torch.device,
        dtype: torch.dtype | None,
        frozen: Sequence[nn.Module] = (),
    ) -> None:
        self.kind = parallel.resolve(model, groups, device, frozen)
        self._model = model
        self.module: Any = model
        """The module that a task calls in the forward pass."""
        self._wrapped: Any = model
        self.forward_meets = False
        """Whether the ranks synchronize in every forward pass. If so, all ranks must run the same number of forward passes."""
        self._meet = True
        for beside in frozen:
            beside.eval().requires_grad_(False)
        if self.kind == "single":
            return
        self.forward_meets = self.kind == "fsdp" or any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        for one in (model, *frozen):
            _same_on_all_ranks(one)
        if self.kind == "ddp":
            ids = [device.index] if device.type == "cuda" else None
            self.module = self._wrapped = DistributedDataParallel(model, device_ids=ids, **parallel.options)
        else:
            mesh = _mesh(parallel.shard_size or groups.size, groups, device)
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype is not None else None)
            options = {"mesh": mesh, "mp_policy": policy, **parallel.options}
            _shard(model, parallel.blocks, options)
            # A frozen model, such as a teacher, normally runs without gradients, so free its gathered weights after the forward pass.
            for beside in frozen:
                _shard(beside, None, {**options, "reshard_after_forward": True})
            _share_statistics(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state. All ranks must call this method.

        Before that, broadcast rank 0's buffers to all ranks, as the next forward pass would do.
        """
        if self.kind != "single":
            for buffer in self._model.buffers():
                distributed.broadcast(buffer, src=0)
        return self._model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(state)

    def compile(self, options: Mapping[str, Any]) -> None:
        """Compile the module that a task calls. The model itself is unchanged.

        `Module.compile` is not used, because it would not compile the wrapper `DistributedDataParallel`.
        """
        self.module = torch.compile(self._wrapped, **options)

    def gradients_meet(self, meet: bool) -> None:
        """Set whether the next forward and backward pass reduces the gradients over the ranks.

        Only the last backward pass of a step needs to reduce them.
        """
        if meet == self._meet:
            return
        self._meet = meet
        if self.kind == "ddp":
            self._wrapped.require_backward_grad_sync = meet
        elif self.kind == "fsdp":
            # `fully_shard` has changed the model's class to an FSDPModule, which has the method `set_requires_gradient_sync`.
            self._wrapped.set_requires_gradient_sync(meet)


def clip_gradients(parameters: Iterable[Tensor], longest: float) -> Tensor:
    """Scale the gradients so that their total norm is at most `longest`.

    Return the norm before scaling, over all shards, as a scalar tensor.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in held if parameter.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(held, longest, norm)
    return norm


def _fits(model: nn.Module, device: torch.device, frozen: Sequence[nn.Module]) -> bool:
    if device.type != "cuda":
        return True
    needed = _STATE_PER_WEIGHTS * _size(model) + sum(map(_size, frozen))
    return needed <= _STATE_MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _same_on_all_ranks(model: nn.Module) -> None:
    """Broadcast the model's weights from rank 0 to all ranks.

    Without this, each rank would shard a model with its own initial weights, and the shards would not fit together.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            distributed.broadcast(tensor, src=0)


def _share_statistics(model: nn.Module) -> None:
    """Broadcast running statistics, such as those of BatchNorm, from rank 0 at every forward pass.

    DistributedDataParallel does this too, but FSDP's `fully_shard` does not synchronize buffers.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    buffers = [buffer for norm in norms for buffer in norm.buffers()]

    def follow(*_: Any) -> None:
        for buffer in buffers:
            distributed.broadcast(buffer, src=0)

    if buffers:
        add_hook(model.register_forward_pre_hook, follow)


def _mesh(shard: int, groups: ProcessGroups, device: torch.device) -> DeviceMesh:
    if shard == groups.size:
        return init_device_mesh(device.type, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (groups.size // shard, shard), mesh_dim_names=("replicate", "shard"))


def _shard(model: nn.Module, blocks: tuple[str, ...] | None, options: dict[str, Any]) -> None:
    for block in _blocks(model, blocks):
        fully_shard(block, **options)
    fully_shard(model, **options)


def _blocks(model: nn.Module, names: tuple[str, ...] | None) -> list[nn.Module]:
    """Return the modules that FSDP shards as units, innermost first."""
    named = names if names is not None else tuple(getattr(model, "_no_split_modules", None) or ())
    if named:
        found = [module for module in model.modules() if type(module).__name__ in named]
        if missing := set(named) - {type(module).__name__ for module in found}:
            if names is not None:
                here = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
                raise ConfigError(f"parallel blocks {', '.join(sorted(missing))}: the model has no such module; it has {here}")
    else:
        lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
        found = [child for several in lists for child in several.children() if child not in lists]
    uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    blocks = dict.fromkeys(module for module in reversed(found) if module is not model)
    return [block for block in blocks if any(True for _ in block.parameters()) and _is_closed(block, uses)]


def _is_closed(block: nn.Module, uses: Counter[int]) -> bool:
    """Return whether the block shares no parameters with the rest of the model, so that FSDP can shard the block as a unit.

    Shared parameters are gathered with the root module.
    """
    own = Counter(id(parameter) for module in block.modules() for parameter in module._parameters.values())
    return all(uses[parameter] == number for parameter, number in own.items())
