"""Low-rank adapters (LoRA): adds them to a model, saves only the adapters in checkpoints, and exports the merged model."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from callsheet.checkpoint.ranks import RankGroup
from callsheet.core import optional as extras
from callsheet.errors import ConfigError

ALL_LINEAR = "all-linear"

_HARMLESS_WARNINGS = (
    "fan_in_fan_out is set to",  # peft corrects this option for the layer's type, and then warns of the correction
    "`is_gradient_checkpointing` is deprecated",  # peft's own code reads this deprecated attribute of transformers' models
)
"""The beginnings of those warnings of peft that are irrelevant to the user, and are suppressed."""


@dataclass
class Lora:
    """Train two low-rank matrices in addition to each weight matrix, which stays frozen (Hu et al. 2021, LoRA).

    Args:
        r: the rank of the adapters' matrices.
        alpha: the scale of the adapters: the product of the two matrices is multiplied by `alpha / r`.
        dropout: the dropout probability of the adapters' input.
        targets: the names of the modules that get adapters, such as `q_proj`; `all-linear` is every linear layer except the last.
        merge: whether the export adds the adapters to the model's weights. False exports only the adapters, as a folder that peft
            loads over the model of `model.path`.

    Raises:
        ConfigError: an argument is invalid.
    """

    r: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: str | list[str] = ALL_LINEAR
    merge: bool = True

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ConfigError(f"lora.r={self.r}: give a rank of 1 or more")
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"lora.alpha={self.alpha}: give a finite number above 0")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"lora.dropout={self.dropout}: give a probability from 0 to below 1")
        if not self.targets:
            raise ConfigError(f"lora.targets is empty; name modules, such as q_proj, or give {ALL_LINEAR}")

    def add_to(self, model: Any) -> None:
        """Add the adapters to a model.

        After this, only the adapters are trained, in fp32, and only they are in the model's state dict.

        Args:
            model: a model of transformers, which is changed in place.

        Raises:
            ConfigError: there is no module with a name in `targets`, or the module's type does not support adapters.
        """
        targets = self.targets
        if isinstance(targets, list):
            names = {name for path, _ in model.named_modules() for name in (path, path.rpartition(".")[2])}
            if missing := [target for target in targets if target not in names]:
                linear = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
                raise ConfigError(
                    f"lora.targets: the model has no module called {', '.join(missing)}; its linear layers are {', '.join(sorted(linear))}"
                )
        try:
            with _without_harmless_warnings():
                model.add_adapter(self._config())
        except ValueError as error:
            raise ConfigError(f"lora.targets={targets}: {error}") from error
        for parameter in model.parameters():
            if parameter.requires_grad:
                # Keep the adapters in float32: in bf16, a small optimizer step may not change a value at all.
                parameter.data = parameter.data.float()
        model.register_state_dict_post_hook(_leave_out_frozen)
        model.register_load_state_dict_post_hook(_need_no_frozen)

    def export_merged(self, model: Any, path: str | Path, *, writes: bool, processor: Any = None) -> None:
        """Write the model, with its adapters merged, as a Hugging Face folder.

        Every rank must call this method, which returns when everything is written.

        Args:
            model: the model with the adapters, which may be sharded.
            path: a folder of this machine.
            writes: whether this rank writes; it then holds all weights in host memory during the call.
            processor: the tokenizer or processor to save with the model.

        Raises:
            CheckpointError: on all ranks, if the model cannot be written.
        """
        with _group() as group:
            ranks = RankGroup(group)
            tensors = ranks.together(lambda: {**_frozen(model), **model.state_dict()})
            turns = _gather(tensors)

            def write() -> None:
                try:
                    if writes:  # merging changes the weights in place, so pass copies
                        self._write(model, {name: tensor.to("cpu", copy=True) for name, tensor in turns}, path, processor)
                finally:
                    for _ in turns:  # read `turns` to its end: gathering the weights needs every rank, and the other ranks wait
                        pass

            ranks.together(write)

    def _write(self, model: Any, whole: dict[str, Tensor], path: str | Path, processor: Any) -> None:
        peft = extras.load("peft", extra="hf", wanted_by="lora")
        # Find the class that transformers defines, because FSDP changes the model's class to a subclass of it.
        kind = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
        with _without_harmless_warnings(), torch.device("meta"):
            twin = peft.get_peft_model(kind(copy.deepcopy(model.config)), self._config())
        twin.base_model.model.load_state_dict(whole, assign=True)
        twin.base_model.model.tie_weights()
        merged = twin.merge_and_unload()
        merged.generation_config = model.generation_config
        merged.save_pretrained(path)
        if processor is not None:
            processor.save_pretrained(path)

    def _config(self) -> Any:
        peft = extras.load("peft", extra="hf", wanted_by="lora")
        return peft.LoraConfig(
            task_type="CAUSAL_LM", r=self.r, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=self.targets
        )


@contextmanager
def _without_harmless_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in _HARMLESS_WARNINGS:
            warnings.filterwarnings("ignore", message)
        yield


@contextmanager
def _group() -> Iterator[distributed.ProcessGroup | None]:
    """Provide, for a `with` block, a gloo process group with which ranks coordinate writing. With one process, provide None."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        yield None
        return
    group = distributed.new_group(backend="gloo")
    try:
        yield group
    finally:
        distributed.destroy_process_group(group)


def _gather(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


def _leave_out_frozen(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Remove the frozen weights from the model's state dict. These weights can be loaded from their source instead of a checkpoint.

    Without them, a checkpoint is a hundredth of the model's size.
    """
    for name in _frozen(model):
        state.pop(prefix + name, None)


def _need_no_frozen(model: nn.Module, keys: Any) -> None:
    frozen = _frozen(model)
    keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen]
