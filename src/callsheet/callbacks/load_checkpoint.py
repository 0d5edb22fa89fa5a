"""Starts a new run from the weights of a checkpoint."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from callsheet.checkpoint import Loaded, read_checkpoint
from callsheet.core.callback import Callback, label_of
from callsheet.core.context import Context
from callsheet.errors import CheckpointError, ConfigError

logger = logging.getLogger("callsheet")

_MODEL_PREFIX = "model."


class LoadCheckpoint(Callback):
    """Start a new run with the weights of another run's checkpoint. In a resumed run, which already has weights, load nothing.

    Only parameters and buffers are loaded. They are cast to the model's types and distributed over its shards. The checkpoint may
    be from a run with another number of ranks. Optimizer, scheduler, timestamp and callbacks start fresh. The weights are loaded
    before training, at `on_checkpoint_load_end`. The log lists what was loaded and what was not. If loading fails on one rank, it
    fails on all.

    Args:
        path: the checkpoint, a folder such as `runs/first/checkpoints/ep2-ba500`, or a URL that fsspec opens.
        weights: patterns of the names of weights to load, such as `"encoder.*"`; None loads all.
        leave_out: patterns of names not to load, such as `"head.*"`.
        strict: whether the weights to load must exist in both the model and the checkpoint, with the same sizes. False loads only
            those that fit.

    Raises:
        ConfigError: an argument is invalid.
        CheckpointError: the checkpoint is invalid, contains no model, or does not fit the model; without `strict`, only if
            nothing in it fits.
    """

    phase = "change"
    collective = True
    required_fields = ("model",)

    def __init__(
        self,
        *,
        path: str | os.PathLike[str],
        weights: str | Sequence[str] | None = None,
        leave_out: str | Sequence[str] = (),
        strict: bool = True,
    ) -> None:
        if not os.fspath(path):
            raise ConfigError("path='': name the checkpoint to load")
        self._path = os.fspath(path)
        self._weights = ["*"] if weights is None else [weights] if isinstance(weights, str) else list(weights)
        self._leave_out = [leave_out] if isinstance(leave_out, str) else list(leave_out)
        self._strict = strict
        if not self._weights:
            raise ConfigError("weights=[] would load nothing; name some, or None for all")

    def on_checkpoint_load_end(self, ctx: Context) -> None:
        """Load the weights, unless the run was resumed."""
        if ctx.checkpoint is not None:
            logger.info("%s does not load %s: the run is resumed from %s", label_of(self), self._path, ctx.checkpoint.path)
            return
        summary, error = "", None
        try:
            summary = self._load(ctx.model.state_dict())
        except Exception as caught:  # raise the error on all ranks together, after `gather` below
            error = caught
        failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(ctx.gather(str(error) if error else "")) if reason]
        if failed:
            alone = ctx.run.world_size == 1
            raise CheckpointError(str(error) if alone else "; ".join(failed)) from error
        if ctx.run.is_world_process_zero:
            logger.info("%s: %s", label_of(self), summary)

    def _load(self, here: Mapping[str, Any]) -> str:
        """Load the chosen weights from the checkpoint into `here`, the model's tensors by name. Return a summary as text."""
        wanted = {name: tensor for name, tensor in here.items() if isinstance(tensor, Tensor) and self._wants(name)}
        if not wanted:
            raise CheckpointError(
                f"no weight of the model matches {' or '.join(self._weights)}; it has {', '.join(list(here)[:10])}, ..."
            )
        misfits: dict[str, str] = {}
        scratch = _Scratch()

        def target(name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
            name = name.removeprefix(_MODEL_PREFIX) if name.startswith(_MODEL_PREFIX) else ""
            if name in wanted and wanted[name].shape == size:
                return wanted[name]
            if name in wanted:
                misfits[name] = f"{name} has the size {list(size)} in the checkpoint and {list(wanted[name].shape)} in the model"
            return scratch.tensor(size, dtype)

        there = _model_of(read_checkpoint(self._path, target=target), self._path)
        for name, tensor in wanted.items():
            source = there.get(name)
            if source is None:
                misfits[name] = f"{name} is not in the checkpoint"
            elif source is not tensor and name not in misfits:
                # A checkpoint stores tied weights (one tensor, two names) once. If this model does not tie them, copy the tensor.
                if id(source) in scratch.tensors:
                    misfits[name] = f"{name} shares its weights in the checkpoint with a name that is left out"
                elif source.shape != tensor.shape:
                    misfits[name] = (
                        f"{name} has the size {list(source.shape)} in the checkpoint and {list(tensor.shape)} in the model"
                    )
                else:
                    with torch.no_grad():
                        tensor.copy_(source)
        surplus = [f"{name} is not in the model" for name in there if name not in here and self._wants(name)]
        if self._strict and (misfits or surplus):
            raise CheckpointError(
                f"{self._path} does not fit the model: {_summarize([*misfits.values(), *surplus])}; strict=False loads what fits"
            )
        if len(misfits) == len(wanted):
            raise CheckpointError(f"nothing in {self._path} fits the model: {_summarize([*misfits.values(), *surplus])}")
        left = [*misfits.values(), *surplus]
        return f"loaded {len(wanted) - len(misfits)} weights of {self._path}" + (
            f"; left out: {_summarize(left)}" if left else ""
        )

    def _wants(self, name: str) -> bool:
        return any(fnmatchcase(name, each) for each in self._weights) and not any(
            fnmatchcase(name, each) for each in self._leave_out
        )


class _Scratch:
    """A destination for tensors that are read from the checkpoint but not used, such as the optimizer's state.

    All these tensors are read into the same memory, so that little memory is needed.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._memory: dict[torch.dtype, Tensor] = {}

    def tensor(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        memory = self._memory.get(dtype)
        if memory is None or memory.numel() < size.numel():
            self._memory[dtype] = memory = torch.empty(size.numel(), dtype=dtype)
        made = memory[: size.numel()].view(size)
        self.tensors[id(made)] = made
        return made


def _model_of(loaded: Loaded, path: str) -> Mapping[str, Any]:
    model = loaded.shared.get("model") if isinstance(loaded.shared, dict) else None
    if not isinstance(model, dict):
        raise CheckpointError(f"{path} holds no model; give one that a Trainer saved")
    return model


def _summarize(reasons: Sequence[str]) -> str:
    return ", ".join(reasons[:5]) + (f", and {len(reasons) - 5} more" if len(reasons) > 5 else "")
