"""A small model and its training on many ranks, for the tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from callsheet.errors import CheckpointError


class Net(nn.Module):
    """A model with sizes that the ranks do not divide, a weight with fewer rows than ranks, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 3)
        self.outer = nn.Linear(3, 5, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.outer(self.inner(self.embed(x))))  # type: ignore[no-any-return]


def gloo_group(seconds: float = 30) -> distributed.ProcessGroup | None:
    """Return a gloo group of all ranks, or None for a single process."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    group: distributed.ProcessGroup = distributed.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return group


def model_and_optimizer(seed: int, *, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    if sharded:
        fully_shard(model.inner)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train one step, which gives the same result on any number of ranks."""
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def whole(tree: Any) -> Any:
    """Return the tree as plain data with the exact values of whole tensors. (A process that ends cannot send a tensor.)"""
    if isinstance(tree, DTensor):
        tree = tree.full_tensor()
    if isinstance(tree, Tensor):
        return str(tree.dtype), tree.tolist()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return [whole(value) for value in tree] if isinstance(tree, list) else tree


def error_of(act: Callable[[], object]) -> str:
    """Return the message of the `CheckpointError` that the function raises on this rank."""
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"
